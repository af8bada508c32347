"""Hangs: found by an old heartbeat, and reported with the stack of each rank."""

import json
import os
import signal
import time

import pytest

from ddpjob.agent import suspicion
from ddpjob.agent.files import stat_fields
from ddpjob.agent.stacks import stack_lines

from .kubelet import wait_until

# Rank 0 waits in `receive`, rank 1 in `compute`.
HANGS = """
import os, time
def receive():
    time.sleep(600)
def compute():
    time.sleep(600)
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
print("beats")
receive() if os.environ["RANK"] == "0" else compute()
"""


def test_a_hang_is_reported_with_the_stack_of_each_rank(pod):
    found = pod(HANGS, hang_seconds=1.0)
    found.assign(0, ranks=2)
    found.start()
    assert found.end() == 1
    report = found.report
    assert report["cause"] == "Hang"
    assert report["exception"].startswith("no heartbeat for ")
    stacks = "\n".join(report["lines"])
    assert 'script.py", line 4 in receive' in stacks
    assert 'script.py", line 6 in compute' in stacks
    assert report["lines"][0].startswith("rank 0: File ")
    assert not found.processes()
    assert not [name for name in os.listdir(found.folder) if name.startswith("core")]


def test_the_rank_that_is_furthest_behind_is_named_if_a_rank_has_written_it(pod):
    words = "rank 7 on node 3 (n0003-a0) is slow or stuck: it was last seen in step 4, 9 s ago"
    found = pod(HANGS.replace('"beats"', f'"SlowRankError: {words}"'), hang_seconds=1.0)
    found.assign(0)
    found.start()
    assert found.end() == 1
    expected = "; rank 7 on node 3 (n0003-a0) is slow or stuck: it was last seen in step 4"
    assert found.report["exception"].endswith(expected)


def test_a_stopped_process_shows_its_stack_too(pod):
    script = HANGS + "\n"
    found = pod(script.replace('print("beats")', 'print("beats", os.getpid())'), hang_seconds=2.0)
    found.assign(0)
    found.start()
    found.wait_for("beats")
    worker = int(found.log.partition("beats ")[2].split()[0])
    # It sleeps in `receive`.
    wait_until(lambda: stat_fields(worker)[0] == b"S")
    os.kill(worker, signal.SIGSTOP)
    assert found.end() == 1
    assert found.report["cause"] == "Hang"
    assert "receive" in "\n".join(found.report["lines"])


def test_there_is_no_limit_before_the_first_heartbeat(pod):
    script = """
import os, time
time.sleep(1.5)
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
"""
    found = pod(script, hang_seconds=0.5)
    found.assign(0)
    found.start()
    assert found.end() == 0


def test_a_heartbeat_of_an_earlier_attempt_does_not_count(pod, tmp_path):
    script = """
import os, time
if os.environ["DDP_ATTEMPT"] == "0":
    open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
    os.kill(os.getpid(), 15)
time.sleep(1.5)
"""
    found = pod(script, hang_seconds=0.5, env={"DDP_HEARTBEAT_FILE": str(tmp_path / "beat")})
    found.assign(0)
    found.start()
    found.wait_for("waiting for the next attempt")
    found.assign(1)
    assert found.end() == 0


WRITES = """
import time
for _ in range(LINES):
    print("step", flush=True)
    time.sleep(0.25)
print("stuck")
time.sleep(600)
"""


def test_a_rank_that_stops_to_write_is_not_ready_until_the_operator_decides(pod, port):
    script = WRITES.replace("LINES", "16")
    found = pod(script, hang_seconds=1.0, heartbeat="Log", port=port)
    found.assign(0)
    found.start()
    wait_until(found.is_up)
    assert not found.is_ready()
    wait_until(found.is_ready)
    found.wait_for("stuck")
    wait_until(lambda: not found.is_ready())
    assert found.process.poll() is None
    assert json.loads(found.get("/state")[1])["heartbeat"] >= 1.0

    found.assign(0, dump=True)
    assert found.end() == 1
    assert found.report["cause"] == "Hang"
    assert "line 7 in <module>" in found.report["lines"][0]
    assert found.report["exception"].startswith("no heartbeat for ")


def test_a_rank_that_has_only_written_at_its_start_need_not_write(pod, port):
    found = pod(WRITES.replace("LINES", "1"), hang_seconds=0.5, heartbeat="Log", port=port)
    found.assign(0)
    found.start()
    wait_until(found.is_up)
    found.is_ready()
    wait_until(lambda: (json.loads(found.get("/state")[1])["heartbeat"] or 0.0) > 2.0)
    wait_until(found.is_ready)


def test_a_rank_that_has_given_no_heartbeat_writes_its_stack_too(pod):
    found = pod("import time\nprint('trains')\ntime.sleep(600)", hang_seconds=600.0)
    found.assign(0)
    found.start()
    found.wait_for("trains")
    # The order for another attempt is none.
    found.assign(-1, dump=True)
    found.assign(0, dump=True)
    assert found.end() == 1
    assert (found.report["cause"], found.report["exception"]) == ("Hang", "no heartbeat")
    assert "line 3 in <module>" in found.report["lines"][0]


@pytest.mark.parametrize(("ranks", "whose"), [(1, "rank 0"), (8, "ranks 0-7")])
def test_a_worker_that_cannot_show_its_stack_is_ended_too(pod, ranks, whose):
    script = """
import os, signal, time
signal.signal(signal.SIGABRT, signal.SIG_IGN)
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
time.sleep(600)
"""
    found = pod(script, hang_seconds=0.5)
    found.assign(0, ranks=ranks)
    found.start()
    assert found.end() == 1
    assert found.report["lines"] == [f"{whose}: no stack"]
    wait_until(lambda: not found.processes())


def test_a_rank_that_has_redirected_its_output_can_hang(pod):
    script = """
import os, time
file = os.open(os.devnull, os.O_WRONLY)
os.dup2(file, 1)
os.dup2(file, 2)
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
time.sleep(600)
"""
    found = pod(script, hang_seconds=1.0)
    found.assign(0)
    found.start()
    assert found.end() == 1
    assert found.report["cause"] == "Hang"


class Pod:
    """A suspicion with a clock of the test. `stopped_at` are the seconds of the stops."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        self.stopped_at = []
        monkeypatch.setattr(suspicion.time, "monotonic", lambda: 100.0 + self.seconds)
        monkeypatch.setattr(suspicion, "stop", lambda _: self.stopped_at.append(self.seconds))
        self.suspicion = suspicion.Suspicion()

    def is_due(self, seconds, *, is_ordered=False, is_silent=False):
        self.seconds = seconds
        return self.suspicion.is_due(is_ordered, is_silent)


def test_an_order_lets_the_other_pods_get_it_too_and_silence_waits_for_one(monkeypatch):
    pod = Pod(monkeypatch)
    assert not pod.is_due(0, is_silent=True)
    assert not pod.is_due(9, is_silent=True)
    # The order is newer than the silence, and counts.
    assert not pod.is_due(9.5, is_ordered=True, is_silent=True)
    assert not pod.is_due(19, is_ordered=True, is_silent=True)
    assert pod.is_due(19.5, is_ordered=True, is_silent=True)
    # All processes are stopped at once, so no rank ends because of a peer's end.
    assert pod.stopped_at == [9.5]


def test_without_an_order_a_silent_pod_stops_and_waits_for_pods_that_are_silent_later(monkeypatch):
    pod = Pod(monkeypatch)
    assert not pod.is_due(0, is_silent=True)
    # A heartbeat has come.
    assert not pod.is_due(5)
    assert not pod.is_due(6, is_silent=True)
    assert not pod.is_due(15.9, is_silent=True)
    assert pod.stopped_at == []
    assert not pod.is_due(16, is_silent=True)
    # Stopped processes are ended, also if they wrote a heartbeat at the last moment.
    assert not pod.is_due(25.9)
    assert pod.is_due(26)
    assert pod.stopped_at == [16]


def test_the_report_has_the_time_of_the_first_heartbeat(pod):
    script = """
import os, time
time.sleep(0.5)
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
time.sleep(0.5)
"""
    found = pod(script)
    found.assign(0)
    began = time.time()
    found.start()
    assert found.end() == 0
    assert began + 0.4 < found.report["trained"]["0"] < time.time() - 0.4


@pytest.mark.parametrize("heartbeat", ["File", "Log"])
def test_before_the_first_heartbeat_there_is_a_limit_of_its_own(pod, port, heartbeat):
    found = pod("import time; time.sleep(600)", heartbeat=heartbeat, first_seconds=1.0, port=port)
    found.assign(0)
    found.start()
    wait_until(found.is_up)
    found.is_ready()
    if heartbeat == "Log":
        # The operator asks the others first.
        wait_until(found.is_ready)
        wait_until(lambda: not found.is_ready())
        found.assign(0, dump=True)
    assert found.end() == 1
    assert (found.report["cause"], found.report["exception"]) == ("Hang", "no heartbeat")


def test_the_limit_before_the_first_heartbeat_does_not_count_after_it(pod):
    script = """
import os, time
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
time.sleep(1.5)
"""
    found = pod(script, first_seconds=0.5)
    found.assign(0)
    found.start()
    assert found.end() == 0


def test_the_smallest_group_of_equal_stacks_comes_first_and_no_rank_is_left_out():
    waits = ('File "/venv/torch/all_reduce.py", line 9 in wait', 'File "/train.py", line 7 in step')
    computes = ('File "/train.py", line 3 in compute',)
    others = [rank for rank in range(32) if rank != 13]
    assert stack_lines({waits: others, computes: [13]}) == [
        'rank 13: File "/train.py", line 3 in compute',
        'ranks 0-12,14-31: File "/venv/torch/all_reduce.py", line 9 in wait',
        'ranks 0-12,14-31: File "/train.py", line 7 in step',
    ]


def test_a_long_path_is_complete():
    """A local run may be deep in folders."""
    frame = f'File "/{"folder/" * 25}train.py", line 12 in forward'
    assert stack_lines({(frame,): [3]}) == [f"rank 3: {frame}"]
