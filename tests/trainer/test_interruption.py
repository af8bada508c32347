"""A run killed or stopped at any moment resumes and ends as an unbroken one.

The network has several DDP buckets and BatchNorm. With 72 images in batches of 16, the last batch
of each epoch has eight images, so one of the two ranks gets none. One run with three interruptions
serves all tests of the result.
"""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .launch import alone, environment, finish, newest, ranks, torchrun

FLAGS = "--epochs 4 --limit-train 72 --batch-size 8 --learning-rate 0.01 --checkpoint-every 3"
STEPS = 4 * 5


@pytest.fixture(scope="module")
def story(tmp_path_factory, tiny_cifar10):
    folder = tmp_path_factory.mktemp("story")
    flags = ("--data", tiny_cifar10, *FLAGS.split(), "--checkpoint-dir")
    command = ("-m", "trainer.narrow", "cifar10", *flags)
    tests = {"PYTHONPATH": Path(__file__).parents[1]}
    # Each step of a run to be interrupted takes this time.
    slow = {**tests, "DDP_TEST_PAUSE": 0.3}

    # Uninterrupted runs need few checkpoints.
    unbroken = ranks(*command, folder / "unbroken", "--checkpoint-every", 100, **tests)
    assert finish(unbroken) == [0, 0], unbroken[0].stderr

    # A new Python shows how a process ends after the loss of its peer.
    killed = ranks(*command, folder / "broken", new=0, **slow)
    killed[0].wait_for("checkpoint", step=3)
    killed[1].kill()
    killed_codes = finish(killed)

    told = ranks(*command, folder / "broken", **slow)
    told[0].wait_for("checkpoint", step=6)
    told[1].signal(signal.SIGTERM)
    told_codes = finish(told)

    launched = torchrun(
        *command, folder / "broken", DDP_RESULT_FILE=folder / "result of the interrupted", **slow
    )
    launched.wait_for("checkpoint", step=12)
    launched.signal(signal.SIGTERM)
    launched_code = launched.finish()

    last = ranks(*command, folder / "broken", "--checkpoint-every", 100, **tests)
    assert finish(last) == [0, 0], last[0].stderr
    return SimpleNamespace(**locals())


def differences(one, other, at="checkpoint"):
    """List the places where two nested structures differ. Tensors are compared bit by bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [at]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [where for key in one for where in differences(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list):
        assert len(one) == len(other)
        return [
            where
            for row, item in enumerate(one)
            for where in differences(item, other[row], f"{at}[{row}]")
        ]
    return [] if one == other else [at]


def test_a_run_broken_three_times_ends_bit_equal_to_the_unbroken_one(story):
    unbroken, broken = (
        torch.load(newest(story.folder / name), weights_only=True)
        for name in ("unbroken", "broken")
    )
    assert unbroken["step"] == STEPS
    assert all(tensor.isfinite().all() for tensor in unbroken["parts"]["model"].values())
    assert differences(unbroken, broken) == []


def test_the_reported_losses_and_the_result_are_the_same_too(story):
    evaluations = {
        entry["step"]: (entry["accuracy"], entry["loss"]) for entry in story.unbroken[0].of("eval")
    }
    for entry in story.last[0].of("eval"):
        assert (entry["accuracy"], entry["loss"]) == evaluations[entry["step"]]
    assert story.last[0].of("end")[0]["result"] == story.unbroken[0].of("end")[0]["result"]


def test_a_rank_whose_peer_was_killed_ends_with_an_error_instead_of_hanging(story):
    code, killed_code = story.killed_codes
    assert killed_code == -signal.SIGKILL
    assert code not in (0, 143)
    assert story.killed[0].of("end") == story.killed[0].of("interrupted") == []


def test_each_attempt_resumes_at_the_newest_checkpoint(story):
    assert story.unbroken[0].of("start")[0]["resumed_step"] == 0
    assert (
        story.told[0].of("start")[0]["resumed_step"] == story.killed[0].of("checkpoint")[-1]["step"]
    )
    assert (
        story.launched.of("start")[0]["resumed_step"] == story.told[0].of("interrupted")[0]["step"]
    )
    assert (
        story.last[0].of("start")[0]["resumed_step"] == story.launched.of("interrupted")[0]["step"]
    )
    assert all(
        run.of("start")[0]["steps"] == STEPS
        for run in (story.unbroken[0], story.told[0], story.last[0])
    )


def test_sigterm_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(story):
    assert story.told_codes == [143, 143]
    (stop,) = story.told[0].of("interrupted")
    assert stop["signal"] == "SIGTERM"
    assert stop["path"].endswith(f"-{stop['step']:010d}.pt")
    assert story.told[0].events[-1] == stop


def test_sigterm_to_torchrun_leads_to_a_checkpoint_and_no_success(story):
    assert story.launched_code != 0
    (stop,) = story.launched.of("interrupted")
    assert stop["step"] < STEPS
    assert story.launched.of("end") == []
    assert not (story.folder / "result of the interrupted").exists()


def run_script(script):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)


def test_child_processes_have_their_own_signals():
    """Neither the SIGCHLD of a DataLoader nor a SIGTERM to a forked child stops the parent."""
    script = """
import multiprocessing, os, signal, threading
from torch.utils.data import DataLoader
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.ranks.runtime import Runtime
StopVote(Runtime(), grace=0.5)
assert sum(map(len, DataLoader(list(range(8)), num_workers=1))) == 8
child = multiprocessing.get_context("fork").Process(target=signal.pause)
child.start()
child.terminate()
child.join()
print("child", child.exitcode, flush=True)
os.kill(os.getpid(), signal.SIGINT)
threading.Event().wait(60)  # as in a collective whose peers are gone
"""
    run = run_script(script)
    assert run.stdout == "child -15\n"
    assert run.returncode == 130, run.stderr
    assert "no step ended within 0.5 s after SIGINT" in run.stderr


def test_a_rank_stuck_in_a_collective_leaves_on_its_own_after_the_grace():
    script = """
import os, signal, tempfile, time
from ddp_trainer import Checkpoints, Runtime, StopVote
runtime = Runtime()
checkpoints = Checkpoints(tempfile.mkdtemp(), runtime, {})
checkpoints.save(7)
StopVote(runtime, checkpoints, grace=0.2)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    run = run_script(script)
    assert run.returncode == 143
    assert "no step ended within 0.2 s after SIGTERM; exiting without a checkpoint" in run.stderr
    assert "of the last steps; the newest is /" in run.stderr
    assert "step-g0001-0000000007.pt" in run.stderr


LEAVING = """
import os, signal, tempfile
from ddp_trainer import Checkpoints, Progress, Runtime, StopVote
from ddp_trainer.run.interrupt import leave
runtime = Runtime()
checkpoints = Checkpoints(tempfile.mkdtemp(), runtime, {})
"""


@pytest.mark.parametrize(
    ("stop", "sentence"),
    [
        ("StopVote(runtime, checkpoints)", "its checkpoint is /"),
        ("StopVote(runtime)", "no checkpoint is written"),
    ],
)
def test_a_clean_end_says_what_was_saved(stop, sentence):
    steps = f"stop = {stop}; os.kill(os.getpid(), signal.SIGINT); stop.after_step(1)"
    run = alone("-c", LEAVING + steps)
    assert run.finish() == 130
    assert f"stopped by SIGINT after step 1; {sentence}" in run.stderr


def test_the_former_call_leaves_too():
    script = """
vote = StopVote(runtime)
os.kill(os.getpid(), signal.SIGTERM)
progress = Progress(runtime)
if number := vote.at_step_boundary():
    leave(number, 5, vote=vote, checkpoints=checkpoints, progress=progress)
"""
    run = alone("-c", LEAVING + script)
    assert run.finish() == 143, run.stderr
    (stop,) = run.of("interrupted")
    assert stop["path"].endswith("step-g0001-0000000005.pt")


def test_a_process_that_writes_a_checkpoint_is_not_ended_meanwhile():
    script = """
import os, signal, time
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.ranks.runtime import Runtime
end = time.monotonic() + 1.5
vote = StopVote(Runtime(is_writing=[lambda: time.monotonic() < end]), grace=0.2)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print(vote.at_step_boundary().name)
time.sleep(1)
"""
    run = run_script(script)
    assert (run.returncode, run.stdout) == (0, "SIGTERM\n"), run.stderr
