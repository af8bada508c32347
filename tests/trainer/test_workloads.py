"""The workloads as users start them: what they learn, print and write."""

import itertools
import json
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.workloads.shared.classification import set_learning_rate
from ddp_trainer.workloads.shared.schedule import constant

from .launch import TRAINER, alone, group, new_python, newest, torchrun

ROOT = Path(__file__).parents[2]

# The keys of each event, beside "event" and "time".
KEYS = {
    "start": "workload world_size device backend parameters train_samples test_samples epochs "
    "steps batch_size resumed_step precision",
    "train": "epoch epochs step steps loss learning_rate samples_per_second",
    "eval": "epoch step loss accuracy samples",
    "checkpoint": "step path seconds",
    "model": "path",
    "end": "step result seconds peak_memory_mib",
}
PHASES = "import rendezvous setup data forward backward optimizer evaluate checkpoint"


def succeed(run):
    """Wait until the run ends, and return it. Fail if it fails."""
    assert run.finish() == 0, run.stderr
    return run


def result_of(run):
    return run.of("end")[0]["result"]


def losses_of(run):
    return [entry["loss"] for entry in run.of("train")]


# --- One run of digits, seen from all sides.


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return a complete run of digits on two ranks with default flags, and its folder.

    No process of it is a fork, so it also shows how a new Python ends.
    """
    folder = tmp_path_factory.mktemp("digits")
    began = time.time()
    run = torchrun(
        *TRAINER,
        "digits",
        start=new_python,
        DDP_CHECKPOINT_DIR=folder / "checkpoints",
        DDP_RESULT_FILE=folder / "result",
        DDP_HEARTBEAT_FILE=folder / "heartbeat",
    )
    assert run.finish() == 0, run.stderr
    run.began = began
    return run, folder


def test_digits_reaches_97_percent_on_two_ranks(digits):
    run, _ = digits
    assert result_of(run)["accuracy"] >= 0.97
    losses = losses_of(run)
    assert losses[-1] < 0.1 * losses[0]


def test_stdout_has_only_json_lines_with_the_documented_keys(digits):
    run, _ = digits
    assert run.stray == []
    assert {entry["event"] for entry in run.events} == set(KEYS)
    for entry in run.events:
        assert set(entry) == {"event", "time", *KEYS[entry["event"]].split()}
        assert run.began <= entry["time"] <= time.time()
    assert run.events[0]["event"] == "start"
    assert run.events[-1]["event"] == "end"


def test_steps_are_counted_up_to_the_announced_total(digits):
    run, _ = digits
    (start,) = run.of("start")
    assert (start["world_size"], start["backend"], start["batch_size"]) == (2, "gloo", 64)
    assert (start["train_samples"], start["test_samples"]) == (1437, 360)
    steps = [entry["step"] for entry in run.of("train")]
    assert steps == sorted(set(steps))
    assert steps[-1] == start["steps"] == run.of("end")[0]["step"] == start["epochs"] * 23
    assert all(entry["samples"] == 360 for entry in run.of("eval"))


def test_the_last_event_has_the_seconds_of_each_phase(digits):
    run, _ = digits
    seconds = run.of("end")[0]["seconds"]
    assert set(seconds) == set(PHASES.split())
    assert all(spent >= 0 for spent in seconds.values())
    assert seconds["backward"] > 0


def test_the_result_file_has_the_result(digits):
    run, folder = digits
    assert json.loads((folder / "result").read_text()) == result_of(run)


def test_the_heartbeat_file_is_complete_and_of_this_run(digits):
    run, folder = digits
    beat = json.loads((folder / "heartbeat").read_text())
    assert set(beat) == {"time", "step"}
    assert run.began <= beat["time"] <= time.time()
    assert 1 <= beat["step"] <= run.of("end")[0]["step"]


# --- What any run reports.


def test_the_only_step_of_a_run_has_a_learning_rate_above_0():
    run = succeed(alone(*TRAINER, "digits", "--epochs", 1, "--batch-size", 1437))
    assert [entry["learning_rate"] > 0 for entry in run.of("train")] == [True]


def test_tensorboard_shows_the_reported_losses_once_also_after_a_resume(tmp_path):
    folder = tmp_path / "board"

    def toy(steps):
        flags = ("--steps", steps, "--log-every", 5, "--checkpoint-dir", tmp_path / "checkpoints")
        run = succeed(group(*TRAINER, "toy", *flags, DDP_TENSORBOARD_DIR=folder))
        return {event["step"]: event["loss"] for event in run.of("train")}

    expected = toy(20) | toy(30)
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    files = [tensorboard_events(path) for path in paths]
    shown = {}
    for event in itertools.chain(*files):
        for value in event.summary.value:
            if value.tag == "train/loss":
                shown[event.step] = value.simple_value
    assert shown == pytest.approx(expected)

    # The second file makes TensorBoard drop earlier events from step 21 on.
    assert [event.step for event in files[1] if event.HasField("session_log")] == [21]


def tensorboard_events(path: Path) -> list:
    """Return the events of a file of TFRecords.

    A record has 8 bytes of length, a checksum of 4, the event, and a checksum of 4.
    """
    data = path.read_bytes()
    events = []
    while data:
        end = 12 + int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12:end]))
        data = data[end + 4 :]
    return events


def test_tensorboard_files_that_cannot_be_written_are_refused_at_the_start(tmp_path):
    (tmp_path / "tensorboardX.py").write_text("raise ImportError")
    variables = {"DDP_TENSORBOARD_DIR": tmp_path / "board", "PYTHONPATH": tmp_path}
    run = alone(*TRAINER, "toy", **variables)
    assert run.finish() == 2
    assert "tensorboardX is not installed; run `pip install tensorboardX`" in run.stderr
    (tmp_path / "tensorboardX.py").unlink()
    (tmp_path / "board").touch()
    run = alone(*TRAINER, "toy", **variables)
    assert run.finish() == 2
    assert f"{tmp_path}/board: cannot be written" in run.stderr


def test_a_finished_run_reports_its_result_again_on_one_process(digits):
    first, folder = digits
    flags = ("--checkpoint-dir", folder / "checkpoints")
    again = succeed(alone(*TRAINER, "digits", *flags, DDP_RESULT_FILE=folder / "again"))
    assert "training was complete" in again.stderr
    assert again.of("train") == []
    result = result_of(again)
    before = result_of(first)
    assert result["accuracy"] == before["accuracy"]
    assert result["loss"] == pytest.approx(before["loss"])
    assert json.loads((folder / "again").read_text()) == result


def one_more_epoch(checkpoints):
    """Resume digits on one process, at the global batch size of the two ranks."""
    flags = ("--epochs", 21, "--batch-size", 64, "--checkpoint-dir", checkpoints)
    return succeed(alone(*TRAINER, "digits", *flags))


def test_a_finished_run_continues_with_more_epochs(digits, tmp_path):
    _, folder = digits
    shutil.copytree(folder / "checkpoints", tmp_path / "copy")
    run = one_more_epoch(tmp_path / "copy")
    (start,) = run.of("start")
    assert (start["resumed_step"], start["steps"]) == (460, 483)
    assert torch.load(newest(tmp_path / "copy"), weights_only=True)["step"] == 483


@pytest.mark.parametrize(
    ("flags", "batch_size", "message"),
    [
        ((), 64, "this run keeps that, instead of its own 32"),
        (("--on-resize", "change"), 32, "this run continues with its own 32"),
        (("--global-batch-size", 64, "--on-resize", "refuse"), 64, ""),
    ],
)
def test_another_number_of_processes_keeps_or_changes_the_samples_per_step(
    digits, tmp_path, flags, batch_size, message
):
    _, folder = digits
    shutil.copytree(folder / "checkpoints", tmp_path / "copy")
    run = succeed(alone(*TRAINER, "digits", "--checkpoint-dir", tmp_path / "copy", *flags))
    assert run.of("start")[0]["batch_size"] == batch_size
    assert message in run.stderr
    assert ("64 samples per step" in run.stderr) == bool(message)


def test_another_number_of_processes_is_refused_if_the_samples_per_step_must_stay(digits, tmp_path):
    _, folder = digits
    shutil.copytree(folder / "checkpoints", tmp_path / "copy")
    flags = ("--checkpoint-dir", tmp_path / "copy", "--on-resize", "refuse")
    run = alone(*TRAINER, "digits", *flags)
    assert run.finish() == 2
    assert "made with 64 samples per step over all ranks, but this run has 32" in run.stderr


@pytest.mark.parametrize(("rate_batch_size", "expected"), [(128, 0.02), (None, 0.01)])
def test_a_rate_that_is_meant_for_a_batch_size_grows_with_the_samples_per_step(
    rate_batch_size, expected
):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    task = SimpleNamespace(
        samples=300,
        optimizer=optimizer,
        learning_rate=0.01,
        schedule=constant,
        rate_batch_size=rate_batch_size,
    )
    sampler = GlobalBatchSampler(300, 256)
    # The last step of an epoch is smaller. This does not change its rate.
    for shard in sampler:
        assert set_learning_rate(task, sampler.batch_size, shard, epochs=1) == expected
        assert optimizer.param_groups[0]["lr"] == expected


def test_the_toy_learns_on_one_process():
    run = succeed(
        alone(*TRAINER, "toy", "--steps", 300, "--learning-rate", 0.05, "--log-every", 20)
    )
    losses = losses_of(run)
    assert losses[-1] < 0.2 * losses[0]
    assert result_of(run)["loss"] < losses[0]
    assert run.of("start")[0]["backend"] == "none"


def test_a_diverging_run_warns_once_and_reports_null(tmp_path):
    # JSON has no NaN, although Python's json module writes and reads it.
    flags = ("--learning-rate", "1e6", "--steps", 100)
    run = succeed(alone(*TRAINER, "toy", *flags, DDP_RESULT_FILE=tmp_path / "result.json"))
    assert losses_of(run)[-1] is None
    assert run.stderr.count("try a lower learning rate") == 1
    assert json.loads((tmp_path / "result.json").read_text())["loss"] is None


def test_the_rest_of_an_epoch_joins_the_last_batch_if_it_is_small(tiny_cifar10):
    # 50 images in batches of 24: a separate step on the last two gave a loss of 4e10.
    flags = "--limit-train 50 --batch-size 24 --epochs 1 --learning-rate 0.001 --log-every 1"
    run = succeed(alone(*TRAINER, "cifar10", "--data", tiny_cifar10, *flags.split()))
    assert [entry["step"] for entry in run.of("train")] == [1, 2]
    assert run.of("eval")[0]["loss"] < 5


def script_in(readme: str) -> str:
    """Return the only Python script in a README."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
    return script


def test_the_script_in_the_trainers_readme_runs_on_two_ranks_and_resumes_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(script_in("trainer/README.md"))
    for start in (torchrun, alone):
        run = succeed(start(script, DDP_CHECKPOINT_DIR=tmp_path / "c"))
        assert result_of(run)["loss"] < 0.01
    assert run.of("start")[0]["steps"] == run.of("end")[0]["step"] == 48


def test_the_script_in_the_trainers_readme_saves_and_ends_at_a_signal(tmp_path):
    script = tmp_path / "script.py"
    endless = script_in("trainer/README.md").replace(
        "sampler.epoch < 3", "sampler.epoch < 1_000_000"
    )
    script.write_text(endless)
    run = alone(script, DDP_CHECKPOINT_DIR=tmp_path / "c")
    run.wait_for("train")
    run.signal(signal.SIGTERM)
    assert run.finish() == 143, run.stderr
    assert run.of("interrupted")[0]["path"] == str(newest(tmp_path / "c"))
    assert "Traceback" not in run.stderr


def test_the_commands_of_the_checkpoint_page_have_the_documented_effect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "workloads" / "checkpoint.md").read_text()
    commands = [line.split() for line in page.splitlines() if line.startswith("    ")]
    assert len(commands) == 3
    starts = []
    for launcher, *words in commands:
        arguments = words[words.index("ddp_trainer") + 1 :]
        start = torchrun if launcher == "torchrun" else alone
        run = succeed(start(*TRAINER, *arguments))
        starts.append((run.of("start")[0]["resumed_step"], run.of("end")[0]["step"]))
        if len(starts) == 1:
            files = sorted(path.name for path in Path("walk").glob("step-*"))
            assert files == ["step-g0001-0000000060.pt", "step-g0001-0000000069.pt"]
            assert all(f"`{name}`" in page for name in files)
    assert starts == [(0, 69), (69, 115), (115, 138)]

    # The weights alone are those of the checkpoint.
    weights = torch.load("walk/model.pth", weights_only=True)
    saved = torch.load(newest(Path("walk")), weights_only=True)["parts"]["model"]
    assert list(weights) == list(saved)
    assert all(torch.equal(weights[name], saved[name]) for name in weights)


def test_a_resumed_run_repeats_an_evaluation_that_a_signal_interrupted(digits, tmp_path):
    # Make the checkpoint look like one of a run that stopped while it evaluated epoch 20.
    _, folder = digits
    shutil.copytree(folder / "checkpoints", tmp_path / "copy")
    path = newest(tmp_path / "copy")
    state = torch.load(path, weights_only=True)
    state["parts"]["scores"]["evaluated"] = 19
    torch.save(state, path)
    run = one_more_epoch(tmp_path / "copy")
    assert [entry["epoch"] for entry in run.of("eval")] == [20, 21]


def test_two_processes_with_synchronised_batch_norm_train_the_same_as_one(tiny_cifar10):
    def losses(start, batch_size, *flags):
        settings = ["--epochs", 1, "--learning-rate", 0.001, "--log-every", 1]
        # Only two steps: on random images, ResNet-18 amplifies differences of rounding.
        settings += ["--data", tiny_cifar10, "--batch-size", batch_size, "--limit-train", 32]
        run = succeed(start(*TRAINER, "cifar10", *settings, *flags))
        losses = losses_of(run)
        assert len(losses) == 2
        return losses

    one = losses(alone, 16)
    assert losses(group, 8, "--sync-batch-norm") == pytest.approx(one, rel=1e-3)
    assert losses(group, 8) != pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    "workload",
    [
        "mnist --fake --batch-size 4 --rounds 2 --steps 2",
        "resnet50 --image-size 32 --batch-size 2 --rounds 2 --steps 1",
    ],
)
def test_both_arms_are_measured_on_random_images(workload):
    run = succeed(group(*TRAINER, *workload.split()))
    result = result_of(run)
    native = result["native"]["median"]
    ddp = result["ddp"]["median"]
    assert native > 0
    assert ddp > 0
    assert result["ddp_overhead"] == pytest.approx(1 - ddp / native, abs=1e-3)


def test_a_model_over_two_devices_trains_on_two_ranks():
    flags = ("--steps", 60, "--log-every", 10, "--learning-rate", 0.05)
    run = succeed(group(*TRAINER, "model_parallel", *flags))
    assert run.of("pipeline")[0]["gradient_difference"] <= 1e-5
    losses = losses_of(run)
    assert losses[-1] < losses[0]


def test_only_a_result_file_that_cannot_be_written_fails_the_run_and_only_at_its_end(tmp_path):
    variables = {
        "DDP_HEARTBEAT_FILE": tmp_path / "missing" / "heartbeat",
        "DDP_RESULT_FILE": tmp_path / "missing" / "result",
    }
    run = alone(*TRAINER, "digits", "--epochs", 1, **variables)
    assert run.finish() == 2
    assert run.stderr.count("no heartbeat at step 0") == 1
    assert "the training is complete, but its result cannot be written" in run.stderr
    assert result_of(run)["accuracy"] > 0
