"""The agent with the real torchrun and a zygote, through the life of a pod."""

import os
import signal
import sys
from pathlib import Path

import pytest

from .kubelet import Pod, wait_until
from .test_torchrun import SUMS, flags

pytest.importorskip("torch")

if sys.platform != "linux":
    pytest.skip("a zygote needs Linux", allow_module_level=True)

# Prints that a rank trains, whether it is a fork, and how it was told to stop.
TRAIN = """
import os, signal, sys, time
import torch
from pathlib import Path
def stop(number, frame):
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
kind = "fork" if "ddpjob_agent" in sys.modules else "new"
print(f"rank {os.environ['RANK']} of attempt {os.environ['DDP_ATTEMPT']} is {kind}")
Path(os.environ["DDP_HEARTBEAT_FILE"]).touch()
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def fast(pod, port):
    """Return a function for starting a pod with two ranks and a zygote."""

    def start(script: str = TRAIN, **options: object) -> Pod:
        settings = {"OMP_NUM_THREADS": "1", **options.pop("env", {})}
        found = pod(script, command=[], fast_start=True, env=settings, **options)
        found.assign(0, ranks=2, flags=flags(port))
        return found.start()

    return start


def wait_for_ranks(pod: Pod, attempt: int, kind: str = "fork") -> None:
    for rank in range(2):
        pod.wait_for(f"[rank{rank}]: rank {rank} of attempt {attempt} is {kind}\n")


def zygote_of(pod: Pod) -> int:
    """Return the process of the zygote: a child of the agent, with its own arguments."""
    found = [process for process in pod.processes() if b"\0zygote\0" in command_line(process)]
    return min(found)


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_all_attempts_use_one_zygote_and_a_deleted_pod_saves_and_leaves_no_process(fast, port):
    found = fast()
    wait_for_ranks(found, 0)
    zygote = zygote_of(found)
    found.assign(1, ranks=2, flags=flags(port))
    wait_for_ranks(found, 1)
    assert zygote_of(found) == zygote
    # The ranks of attempt 0 got their SIGTERM.
    assert found.log.count("saved\n") == 2
    found.terminate()
    assert found.end() != 0
    assert found.report["cause"] == "Stopped"
    assert found.log.count("saved\n") == 4
    wait_until(lambda: not found.processes())


def test_sent_code_has_a_fast_start_in_each_attempt(fast, port, tmp_path):
    work, code = tmp_path / "ddpjob", tmp_path / "code"
    work.mkdir()
    code.mkdir()
    (code / "config.json").touch()
    script = TRAIN.replace("kind =", "print(os.listdir())\nkind =")
    found = fast(script, work=str(work), code=str(code))
    wait_for_ranks(found, 0)
    found.assign(1, ranks=2, flags=flags(port))
    wait_for_ranks(found, 1)
    assert found.log.count("['config.json']\n") == 4


def test_an_attempt_ended_in_the_import_leaves_nothing_and_a_dead_zygote_ends_the_pod(fast, port):
    found = fast()
    found.wait_for("attempt 0 begins")
    found.assign(1, ranks=2, flags=flags(port), grace=0)
    wait_for_ranks(found, 1)
    assert "of attempt 0" not in found.log
    os.kill(zygote_of(found), signal.SIGKILL)
    assert found.end() != 0
    assert (found.report["cause"], found.report["exception"]) == ("Failure", "SIGKILL")
    wait_until(lambda: not found.processes())


def test_the_rank_that_was_killed_is_reported(fast):
    found = fast(
        TRAIN.replace("Path(os", "os.getenv('RANK') == '1' and os.kill(os.getpid(), 9)\nPath(os")
    )
    assert found.end() == 1
    report = found.report
    assert (report["cause"], report["rank"], report["exitCode"]) == ("Failure", 1, -9)


def test_an_exception_is_reported_with_its_rank(fast):
    found = fast(SUMS)
    assert found.end() == 1
    report = found.report
    assert (report["cause"], report["rank"]) == ("Failure", 1)
    assert report["exception"] == "ValueError: bad batch"


def test_a_hang_shows_the_stack_of_each_rank(fast):
    found = fast(hang_seconds=1.0)
    assert found.end() == 1
    report = found.report
    assert report["cause"] == "Hang"
    # Both ranks have the same stack.
    assert any("ranks 0-1: File" in line and "script.py" in line for line in report["lines"])


def test_a_pod_without_torch_says_so(fast, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so not found')\n")
    found = fast(env={"PYTHONPATH": str(tmp_path)})
    assert found.end() == 1
    assert found.report["exception"] == "ImportError: libtorch.so not found"
