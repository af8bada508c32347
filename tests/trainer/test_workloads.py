"""The workloads as their users start them: what they learn, what they print, which files they leave."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from .launch import TRAINER, alone, newest, torchrun

KEYS = {
    "start": "workload world_size device backend parameters train_samples test_samples epochs steps batch_size "
    "resumed_step precision",
    "train": "epoch epochs step steps loss learning_rate samples_per_second",
    "eval": "epoch step loss accuracy samples",
    "checkpoint": "step path seconds",
    "model": "path",
    "end": "step result seconds peak_memory_mib",
}
PHASES = {
    "import",
    "rendezvous",
    "setup",
    "data",
    "forward",
    "backward",
    "optimizer",
    "evaluate",
    "checkpoint",
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A whole run of digits with its defaults on two ranks, and the folder with its files."""
    folder = tmp_path_factory.mktemp("digits")
    began = time.time()
    run = torchrun(
        *TRAINER,
        "digits",
        DDP_CHECKPOINT_DIR=folder / "checkpoints",
        DDP_RESULT_FILE=folder / "result",
        DDP_HEARTBEAT_FILE=folder / "heartbeat",
    )
    assert run.finish() == 0, run.stderr
    run.began = began
    return run, folder


def test_digits_are_recognised_on_two_ranks(digits):
    run, _ = digits
    assert run.of("end")[0]["result"]["accuracy"] >= 0.97
    losses = [entry["loss"] for entry in run.of("train")]
    assert losses[-1] < 0.1 * losses[0]


def test_stdout_is_json_lines_of_the_documented_shape_and_nothing_else(digits):
    run, _ = digits
    assert run.stray == []
    assert {entry["event"] for entry in run.events} == set(KEYS)
    for entry in run.events:
        assert set(entry) == {"event", "time", *KEYS[entry["event"]].split()}
        assert run.began <= entry["time"] <= time.time()
    assert run.events[0]["event"] == "start"
    assert run.events[-1]["event"] == "end"


def test_steps_count_through_to_the_announced_total(digits):
    run, _ = digits
    (start,) = run.of("start")
    assert (start["world_size"], start["backend"], start["batch_size"]) == (2, "gloo", 64)
    assert (start["train_samples"], start["test_samples"]) == (1437, 360)
    steps = [entry["step"] for entry in run.of("train")]
    assert steps == sorted(set(steps))
    assert steps[-1] == start["steps"] == run.of("end")[0]["step"] == start["epochs"] * 23
    assert all(entry["samples"] == 360 for entry in run.of("eval"))


def test_no_step_is_wasted_at_a_rate_of_0():
    run = alone(*TRAINER, "digits", "--epochs", 1, "--batch-size", 1437)
    assert run.finish() == 0, run.stderr
    assert [entry["learning_rate"] > 0 for entry in run.of("train")] == [True]


def test_the_time_is_accounted_for(digits):
    run, _ = digits
    seconds = run.of("end")[0]["seconds"]
    assert set(seconds) == PHASES
    assert all(spent >= 0 for spent in seconds.values())
    assert seconds["backward"] > 0


def test_the_result_file_holds_the_result(digits):
    run, folder = digits
    assert json.loads((folder / "result").read_text()) == run.of("end")[0]["result"]


def test_the_heartbeat_is_whole_and_of_this_run(digits):
    run, folder = digits
    beat = json.loads((folder / "heartbeat").read_text())
    assert set(beat) == {"time", "step"}
    assert run.began <= beat["time"] <= time.time()
    assert 1 <= beat["step"] <= run.of("end")[0]["step"]


def test_tensorboard_shows_what_the_lines_say_and_nothing_twice_after_a_resume(tmp_path):
    folder = tmp_path / "board"

    def toy(steps):
        flags = ("--steps", steps, "--log-every", 5, "--checkpoint-dir", tmp_path / "checkpoints")
        run = torchrun(*TRAINER, "toy", *flags, DDP_TENSORBOARD_DIR=folder)
        assert run.finish() == 0, run.stderr
        return {event["step"]: event["loss"] for event in run.of("train")}

    expected = toy(20) | toy(30)
    files = [
        events_of(path)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    ]
    shown = {
        event.step: value.simple_value
        for file in files
        for event in file
        for value in event.summary.value
        if value.tag == "train/loss"
    }
    assert shown == pytest.approx(expected)
    assert [event.step for event in files[1] if event.HasField("session_log")] == [
        21
    ]  # later ones of before are void


def events_of(path: Path) -> list:
    """A file of TFRecords: eight bytes of length, a checksum of four, the event, a checksum of four."""
    data, events = path.read_bytes(), []
    while data:
        end = 12 + int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12:end]))
        data = data[end + 4 :]
    return events


def test_tensorboards_files_without_what_writes_them_are_refused_at_the_start(tmp_path):
    (tmp_path / "tensorboardX.py").write_text("raise ImportError")
    variables = {"DDP_TENSORBOARD_DIR": tmp_path / "board", "PYTHONPATH": tmp_path}
    run = alone(*TRAINER, "toy", **variables)
    assert run.finish() == 2
    assert "there is no tensorboardX: pip install it" in run.stderr
    (tmp_path / "tensorboardX.py").unlink()
    (tmp_path / "board").touch()
    run = alone(*TRAINER, "toy", **variables)
    assert run.finish() == 2
    assert f"cannot write to {tmp_path}/board" in run.stderr


def test_a_finished_run_started_again_on_one_process_reports_its_result_again(digits):
    first, folder = digits
    again = alone(
        *TRAINER,
        "digits",
        "--checkpoint-dir",
        folder / "checkpoints",
        DDP_RESULT_FILE=folder / "again",
    )
    assert again.finish() == 0, again.stderr
    assert "training was complete" in again.stderr
    assert again.of("train") == []
    result, before = again.of("end")[0]["result"], first.of("end")[0]["result"]
    assert result["accuracy"] == before["accuracy"]
    assert result["loss"] == pytest.approx(before["loss"])
    assert json.loads((folder / "again").read_text()) == result


def test_more_epochs_go_on_from_a_finished_run(digits, tmp_path):
    _, folder = digits
    shutil.copytree(folder / "checkpoints", tmp_path / "copy")
    run = alone(
        *TRAINER,
        "digits",
        "--epochs",
        21,
        "--batch-size",
        64,
        "--checkpoint-dir",
        tmp_path / "copy",
    )
    assert run.finish() == 0, run.stderr
    (start,) = run.of("start")
    assert (start["resumed_step"], start["steps"]) == (460, 483)
    assert torch.load(newest(tmp_path / "copy"), weights_only=True)["step"] == 483


def test_the_toy_learns_alone_and_its_loss_falls():
    run = alone(*TRAINER, "toy", "--steps", 300, "--learning-rate", 0.05, "--log-every", 20)
    assert run.finish() == 0, run.stderr
    losses = [entry["loss"] for entry in run.of("train")]
    assert losses[-1] < 0.2 * losses[0]
    assert run.of("end")[0]["result"]["loss"] < losses[0]
    assert run.of("start")[0]["backend"] == "none"


def test_a_run_that_diverges_says_so_and_its_lines_stay_json(tmp_path):
    """JSON has no NaN, although Python writes and reads it."""
    run = alone(
        *TRAINER,
        "toy",
        "--learning-rate",
        "1e6",
        "--steps",
        100,
        DDP_RESULT_FILE=tmp_path / "result.json",
    )
    assert run.finish() == 0, run.stderr
    assert [entry["loss"] for entry in run.of("train")][-1] is None
    assert run.stderr.count("the training diverges, a lower learning rate may help") == 1
    assert json.loads((tmp_path / "result.json").read_text())["loss"] is None


def test_a_few_images_left_over_in_an_epoch_ruin_no_model(tiny_cifar10):
    """50 images in batches of 24: a step on the last two alone left a loss of 4e10."""
    flags = "--limit-train 50 --batch-size 24 --epochs 1 --learning-rate 0.001 --log-every 1"
    run = alone(*TRAINER, "cifar10", "--data", tiny_cifar10, *flags.split())
    assert run.finish() == 0, run.stderr
    assert [entry["step"] for entry in run.of("train")] == [1, 2]
    assert run.of("eval")[0]["loss"] < 5


def test_the_script_in_the_readme_runs_alone_and_on_two_ranks_and_resumes(tmp_path):
    readme = (Path(__file__).parents[2] / "trainer" / "README.md").read_text()
    script = tmp_path / "script.py"
    script.write_text(readme.split("```python\n")[1].split("```")[0])
    for start in (torchrun, alone):
        run = start(script, DDP_CHECKPOINT_DIR=tmp_path / "c")
        assert run.finish() == 0, run.stderr
        assert run.of("end")[0]["result"]["loss"] < 0.01
    assert run.of("start")[0]["steps"] == run.of("end")[0]["step"] == 48


def test_the_script_in_the_readme_ends_by_a_signal_as_the_workloads_do(tmp_path):
    readme = (Path(__file__).parents[2] / "trainer" / "README.md").read_text()
    script = tmp_path / "script.py"
    endless = (
        readme.split("```python\n")[1]
        .split("```")[0]
        .replace("sampler.epoch < 3", "sampler.epoch < 1_000_000")
    )
    script.write_text(endless)
    run = alone(script, DDP_CHECKPOINT_DIR=tmp_path / "c")
    run.wait_for("train")
    run.signal(signal.SIGTERM)
    assert run.finish() == 143, run.stderr
    assert run.of("interrupted")[0]["path"] == str(newest(tmp_path / "c"))
    assert "Traceback" not in run.stderr


def test_the_commands_of_the_checkpoint_page_do_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "workloads" / "checkpoint.md").read_text()
    commands = [line.split() for line in page.splitlines() if line.startswith("    ")]
    assert len(commands) == 3
    starts = []
    for launcher, *words in commands:
        arguments = words[words.index("ddp_trainer") + 1 :]
        run = (torchrun if launcher == "torchrun" else alone)(*TRAINER, *arguments)
        assert run.finish() == 0, run.stderr
        starts.append((run.of("start")[0]["resumed_step"], run.of("end")[0]["step"]))
        if len(starts) == 1:
            assert {path.name for path in Path("walk").glob("step-*")} == {
                "step-0000000060.pt",
                "step-0000000069.pt",
            }
    assert starts == [(0, 69), (69, 115), (115, 138)]
    weights = torch.load("walk/model.pth", weights_only=True)
    saved = torch.load(newest(Path("walk")), weights_only=True)["parts"]["model"]
    assert list(weights) == list(saved)
    assert all(torch.equal(weights[name], saved[name]) for name in weights)


def test_an_evaluation_that_a_signal_cut_short_is_made_up_for(digits, tmp_path):
    """As if it had come while epoch 20 was evaluated, and more epochs were wanted."""
    _, folder = digits
    shutil.copytree(folder / "checkpoints", tmp_path / "copy")
    path = newest(tmp_path / "copy")
    state = torch.load(path, weights_only=True)
    state["parts"]["scores"]["evaluated"] = 19
    torch.save(state, path)
    run = alone(
        *TRAINER,
        "digits",
        "--epochs",
        21,
        "--batch-size",
        64,
        "--checkpoint-dir",
        tmp_path / "copy",
    )
    assert run.finish() == 0, run.stderr
    assert [entry["epoch"] for entry in run.of("eval")] == [20, 21]


def test_with_synchronised_batch_norm_two_processes_are_as_one_at_equal_global_batch(tiny_cifar10):
    """In the first steps, before rounding grows: ResNet-18 on random images at this rate amplifies every last bit."""

    def losses(launcher, batch_size, *flags):
        flags = (
            "--data",
            tiny_cifar10,
            "--epochs",
            1,
            "--batch-size",
            batch_size,
            "--log-every",
            1,
            *flags,
        )
        run = launcher(*TRAINER, "cifar10", "--learning-rate", "0.001", *flags)
        assert run.finish() == 0, run.stderr
        return [entry["loss"] for entry in run.of("train")][:2]

    one = losses(alone, 16)
    assert losses(torchrun, 8, "--sync-batch-norm") == pytest.approx(one, rel=1e-3)
    assert losses(torchrun, 8) != pytest.approx(one, rel=1e-3)


def test_the_script_in_the_first_readme_runs_and_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    first = torchrun("script.py", DDP_CHECKPOINT_DIR="here")
    assert first.finish() == 0, first.stderr
    assert newest(tmp_path / "here")
    again = torchrun("script.py", DDP_CHECKPOINT_DIR="here")
    assert again.finish() == 0, again.stderr
    assert first.of("checkpoint")
    assert not again.of("train"), "it began anew"


@pytest.mark.parametrize(
    "workload",
    [
        "mnist --fake --batch-size 4 --rounds 2 --steps 2",
        "resnet50 --image-size 32 --batch-size 2 --rounds 2 --steps 1",
    ],
)
def test_both_arms_are_measured_on_random_images(workload):
    run = torchrun(*TRAINER, *workload.split())
    assert run.finish() == 0, run.stderr
    result = run.of("end")[0]["result"]
    assert all(result[arm]["median"] > 0 for arm in ("native", "ddp"))
    assert result["ddp_overhead"] == pytest.approx(
        1 - result["ddp"]["median"] / result["native"]["median"], abs=1e-3
    )


def test_a_model_over_two_devices_trains_on_two_ranks():
    run = torchrun(
        *TRAINER, "model_parallel", "--steps", 60, "--log-every", 10, "--learning-rate", 0.05
    )
    assert run.finish() == 0, run.stderr
    assert run.of("pipeline")[0]["gradient_difference"] <= 1e-5
    losses = [entry["loss"] for entry in run.of("train")]
    assert losses[-1] < losses[0]


def test_a_heartbeat_that_cannot_be_written_ends_no_training_and_a_result_is_told_before(tmp_path):
    run = alone(
        *TRAINER,
        "digits",
        "--epochs",
        1,
        DDP_HEARTBEAT_FILE=tmp_path / "missing" / "heartbeat",
        DDP_RESULT_FILE=tmp_path / "missing" / "result",
    )
    assert run.finish() == 2
    assert run.stderr.count("no heartbeat at step 0") == 1
    assert (
        "the training is done, but its result cannot be written to DDP_RESULT_FILE=" in run.stderr
    )
    assert run.of("end")[0]["result"]["accuracy"] > 0
