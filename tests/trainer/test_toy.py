"""The toy, however it is started: by torchrun, by --spawn, by torch.distributed.launch, alone."""

import signal
import sys

import psutil
import pytest
import torch

from ddp_trainer.workloads import messages

from .launch import TRAINER, Run, alone, environment, free_port, newest, torchrun

STEPS = 100


def parameters(folder):
    state = torch.load(newest(folder), weights_only=True)["parts"]["model"]
    return torch.cat([tensor.flatten() for tensor in state.values()])


def toy(*flags, start, batch_size, **more):
    return start(
        *TRAINER,
        "toy",
        "--steps",
        STEPS,
        "--learning-rate",
        0.05,
        "--batch-size",
        batch_size,
        *flags,
        **more,
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The parameters of one process, and its run."""
    folder = tmp_path_factory.mktemp("single")
    run = toy("--checkpoint-dir", folder, start=alone, batch_size=40)
    assert run.finish() == 0, run.stderr
    return parameters(folder)


def by_launch(*arguments, **variables):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node",
        2,
        "--master-port",
        free_port(),
    ]
    return Run([*command, "--module", *arguments[1:]], environment(**variables))


@pytest.mark.parametrize("way", ["torchrun", "spawn", "launch"])
def test_two_processes_train_what_one_does_at_equal_global_batch(way, single, tmp_path):
    start = {"torchrun": torchrun, "spawn": alone, "launch": by_launch}[way]
    flags = ["--spawn", 2] if way == "spawn" else []
    run = toy("--checkpoint-dir", tmp_path, *flags, start=start, batch_size=20)
    assert run.finish() == 0, run.stderr
    assert run.of("start")[0]["world_size"] == 2
    difference = (parameters(tmp_path) - single).norm() / single.norm()
    assert difference <= 1e-5


def test_spawn_under_a_launcher_is_refused_with_the_reason():
    run = alone(*TRAINER, "toy", "--spawn", 2, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0)
    assert run.finish() == 2
    assert "--spawn starts the processes itself, but RANK is set" in run.stderr
    assert "each of them would start as many again, all with the same ranks" in run.stderr
    assert run.events == []


def test_spawned_processes_stop_together_at_a_signal(tmp_path):
    run = alone(*TRAINER, "toy", "--spawn", 2, "--steps", 1_000_000, "--checkpoint-dir", tmp_path)
    run.wait_for("train", step=10)
    run.signal(signal.SIGTERM)
    assert run.finish() == 143
    (stopped,) = run.of("interrupted")
    assert torch.load(newest(tmp_path), weights_only=True)["step"] == stopped["step"]


def test_a_spawned_process_that_is_killed_is_named():
    run = alone(*TRAINER, "toy", "--spawn", 2, "--steps", 1_000_000)
    run.wait_for("train", step=10)
    children = [
        child
        for child in psutil.Process(run.process.pid).children()
        if "spawn_main" in "".join(child.cmdline())
    ]
    victim = max(children, key=lambda child: child.pid)  # started last
    victim.kill()
    assert run.finish() == 137
    assert "rank 1 was ended by SIGKILL" in run.stderr


def test_wrong_use_in_spawned_processes_keeps_its_exit_code():
    run = alone(*TRAINER, "messages", "--spawn", 1)
    assert run.finish() == 2
    assert "messages need at least two processes" in run.stderr


def test_a_bucket_view_saves_the_memory_of_the_gradients():
    peaks = []
    for flags in ([], ["--no-bucket-view"]):
        run = torchrun(*TRAINER, "toy", "--model", "wide", "--steps", 3, "--batch-size", 4, *flags)
        assert run.finish() == 0, run.stderr
        peaks.append(run.of("end")[0]["peak_memory_mib"])
    assert peaks[1] - peaks[0] >= 40, f"with and without: {peaks} MiB"


def test_a_resumed_run_learns_at_the_rate_that_it_was_given(tmp_path):
    def loss(steps, rate):
        run = alone(
            *TRAINER, "toy", "--steps", steps, "--learning-rate", rate, "--checkpoint-dir", tmp_path
        )
        assert run.finish() == 0, run.stderr
        return run.of("end")[0]["result"]["loss"]

    before = loss(50, 1e-9)
    assert loss(200, 0.05) < 0.5 * before


def test_messages_are_all_checked_at_four_ranks_and_timed_at_two():
    run = alone(*TRAINER, "messages")
    assert run.finish() == 0, run.stderr
    sent = {entry["name"]: entry for entry in run.of("message")}
    assert "started alone; messages needs several processes and spawns 4" in run.stderr
    assert len(sent) == run.of("end")[0]["result"]["checked"] == 16
    assert all(entry["right"] for entry in sent.values())
    assert sent["all_reduce SUM in [0, 2]"]["ranks"] == [[4], [2], [4], [4]]
    assert sent["all_reduce PRODUCT"]["ranks"] == [[4]] * 4
    assert sent["isend, irecv: a ring"]["ranks"] == [[4], [1], [2], [3]]
    assert run.of("speed") == []

    run = torchrun(*TRAINER, "messages", "--largest", 1, "--repeat", 3)
    assert run.finish() == 0, run.stderr
    sizes = [entry["bytes"] for entry in run.of("speed")]
    assert sizes == [2**power for power in range(10, 21, 2)]
    assert list(messages.sizes(2 * 2**20)) == [*sizes, 2 * 2**20]
    assert all(
        entry["message_seconds"] > 0 and entry["all_reduce_seconds"] > 0
        for entry in run.of("speed")
    )
