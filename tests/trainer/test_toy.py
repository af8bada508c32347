"""The toy and messages, started by torchrun, --spawn, torch.distributed.launch, and alone."""

import signal
import subprocess
import sys

import psutil
import pytest
import torch

from ddp_trainer.cli import main
from ddp_trainer.cli.options import ToyOptions
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.workloads import messages
from ddp_trainer.workloads import toy as workload
from ddpjob.local.ports import free_port

from .launch import (
    TRAINER,
    alone,
    finish,
    group,
    new_python,
    newest,
    ranks,
    torchrun,
)

STEPS = 100

# Bytes, from 1 KiB to 1 MiB.
POWERS_OF_4 = [2**power for power in range(10, 21, 2)]


def parameters(folder):
    """Return all parameters in the newest checkpoint as one flat tensor."""
    state = torch.load(newest(folder), weights_only=True)["parts"]["model"]
    return torch.cat([tensor.flatten() for tensor in state.values()])


def toy(*flags, start, batch_size):
    settings = ("--steps", STEPS, "--learning-rate", 0.05, "--batch-size", batch_size)
    return start(*TRAINER, "toy", *settings, *flags)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the final parameters of one process."""
    folder = tmp_path_factory.mktemp("single")
    run = toy("--checkpoint-dir", folder, start=alone, batch_size=40)
    assert run.finish() == 0, run.stderr
    return parameters(folder)


def by_launch(*arguments):
    """Start two processes with the predecessor of torchrun. `arguments` begin with -m."""
    module_and_flags = arguments[1:]
    settings = ("--nproc-per-node", 2, "--master-port", free_port())
    return alone("-m", "torch.distributed.launch", *settings, "--module", *module_and_flags)


@pytest.mark.parametrize("way", ["torchrun", "spawn", "launch"])
def test_two_processes_train_the_same_as_one_at_equal_global_batch(way, single, tmp_path):
    start = {"torchrun": torchrun, "spawn": alone, "launch": by_launch}[way]
    flags = ["--spawn", 2] if way == "spawn" else []
    run = toy("--checkpoint-dir", tmp_path, *flags, start=start, batch_size=20)
    assert run.finish() == 0, run.stderr
    assert run.of("start")[0]["world_size"] == 2
    difference = (parameters(tmp_path) - single).norm() / single.norm()
    assert difference <= 1e-5


def test_spawn_under_a_launcher_is_refused():
    run = alone(*TRAINER, "toy", "--spawn", 2, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0)
    assert run.finish() == 2
    assert "--spawn cannot be used under a launcher, but RANK is set" in run.stderr
    assert run.events == []


def test_spawned_processes_stop_after_the_same_step_at_a_signal(tmp_path):
    run = alone(*TRAINER, "toy", "--spawn", 2, "--steps", 1_000_000, "--checkpoint-dir", tmp_path)
    run.wait_for("train", step=10)
    run.signal(signal.SIGTERM)
    assert run.finish() == 143
    (stopped,) = run.of("interrupted")
    assert torch.load(newest(tmp_path), weights_only=True)["step"] == stopped["step"]


def test_the_error_names_a_spawned_process_that_was_killed():
    run = new_python(*TRAINER, "toy", "--spawn", 2, "--steps", 1_000_000)
    run.wait_for("train", step=10)
    spawned = []
    for child in psutil.Process(run.process.pid).children():
        if "spawn_main" in "".join(child.cmdline()):
            spawned.append(child)
    # Rank 1 was started last.
    max(spawned, key=lambda child: child.pid).kill()
    assert run.finish() == 137
    assert "rank 1 was ended by SIGKILL" in run.stderr


def test_wrong_use_in_spawned_processes_ends_with_exit_code_2():
    run = alone(*TRAINER, "messages", "--spawn", 1)
    assert run.finish() == 2
    assert "messages need at least two processes" in run.stderr


def test_the_peak_memory_is_that_of_the_process_and_not_of_its_launcher():
    reported = "from ddp_trainer.run.progress import peak_memory_mib; print(peak_memory_mib())"
    launcher = f"""
import subprocess, sys
held = b"x" * (700 << 20)
subprocess.run([sys.executable, "-c", {reported!r}], check=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", launcher], capture_output=True, text=True, check=True
    )
    assert 50 < float(run.stdout) < 700


@pytest.mark.parametrize("copies", [False, True])
def test_the_option_of_the_bucket_view_reaches_ddp(monkeypatch, copies):
    class Wrapped(Exception):
        """Ends the training once the settings of DDP are known."""

    def wrap(self, model, **settings):
        raise Wrapped(settings)

    monkeypatch.setattr(Runtime, "wrap", wrap)
    with pytest.raises(Wrapped) as wrapped:
        workload.train(ToyOptions(no_bucket_view=copies), Runtime())
    assert wrapped.value.args == ({"gradient_as_bucket_view": not copies},)


@pytest.mark.slow
def test_the_bucket_view_saves_the_memory_of_the_gradients():
    command = (*TRAINER, "toy", "--model", "wide", "--steps", 3, "--batch-size", 4)
    # Both runs at the same time.
    runs = [ranks(*command), ranks(*command, "--no-bucket-view")]
    for run in runs:
        assert finish(run) == [0, 0], run[0].stderr
    with_view, without = (run[0].of("end")[0]["peak_memory_mib"] for run in runs)
    assert without - with_view >= 40, f"{with_view} MiB with the view, {without} MiB without"


def test_a_resumed_run_uses_the_learning_rate_of_its_command_line(tmp_path):
    def loss(steps, rate):
        run = alone(
            *TRAINER, "toy", "--steps", steps, "--learning-rate", rate, "--checkpoint-dir", tmp_path
        )
        assert run.finish() == 0, run.stderr
        return run.of("end")[0]["result"]["loss"]

    before = loss(50, 1e-9)
    assert loss(200, 0.05) < 0.5 * before


def test_messages_alone_are_four_spawned_processes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp_trainer", "messages"])
    monkeypatch.setattr(main, "run", lambda command: command.options.spawn)
    assert main.main() == 4
    assert "messages needs several processes; spawning 4" in capsys.readouterr().err


def test_messages_are_checked_at_four_ranks():
    run = group(*TRAINER, "messages", processes=4)
    assert run.finish() == 0, run.stderr
    sent = {entry["name"]: entry for entry in run.of("message")}
    assert len(sent) == run.of("end")[0]["result"]["checked"] == 16
    assert all(entry["right"] for entry in sent.values())
    assert sent["all_reduce SUM in [0, 2]"]["ranks"] == [[4], [2], [4], [4]]
    assert sent["all_reduce PRODUCT"]["ranks"] == [[4]] * 4
    assert sent["isend, irecv: a ring"]["ranks"] == [[4], [1], [2], [3]]
    assert run.of("speed") == []


def test_messages_are_timed_at_two_ranks():
    run = group(*TRAINER, "messages", "--largest", 1, "--repeat", 3)
    assert run.finish() == 0, run.stderr
    measured = run.of("speed")
    assert [entry["bytes"] for entry in measured] == POWERS_OF_4
    assert all(entry["message_seconds"] > 0 for entry in measured)
    assert all(entry["all_reduce_seconds"] > 0 for entry in measured)


def test_timed_sizes_end_with_the_largest():
    assert list(messages.sizes(2 * 2**20)) == [*POWERS_OF_4, 2 * 2**20]
