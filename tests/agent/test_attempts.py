"""The life of a pod: several attempts in a row, and their end."""

import json
import os
import re
import sys
import time

import pytest

from .kubelet import wait_until

# Runs until it is ended. Two workers at once would print OVERLAP.
WORKS = """
import fcntl, os, sys, time
lock = open(os.path.join(os.path.dirname(sys.argv[0]), "lock-" + os.environ["RANK"]), "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("OVERLAP")
print("works in attempt", os.environ["DDP_ATTEMPT"])
time.sleep(600)
"""

# In attempt 0 the worker loses its peer, in the next one it succeeds.
LOSES_ITS_PEER = """
import os
if os.environ["DDP_ATTEMPT"] == "0":
    raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
                       "peer [10.0.0.1]:1234")
print("succeeds")
"""


def waiting_after_attempt_0(pod, script):
    """Return a pod whose first attempt has ended, and which waits for the next one."""
    found = pod(script)
    found.assign(0)
    found.start()
    found.wait_for("waiting for the next attempt")
    return found


def test_a_pod_whose_workers_succeed_ends_with_the_result(pod):
    script = 'import os; open(os.environ["DDP_RESULT_FILE"], "w").write(\'{"accuracy": 0.9}\')'
    found = pod(script)
    found.assign(3)
    found.start()
    assert found.end() == 0
    expected = {"agent": 1, "attempt": 3, "cause": "Succeeded", "result": {"accuracy": 0.9}}
    assert found.report == expected
    assert "ddpjob agent: attempt 3 begins: torchrun --ranks=1\n" in found.log


def test_workers_see_what_torchrun_alone_would_show_them(pod):
    script = """
import json, os, sys
own = ("DDP_AGENT", "PYTHON_EXEC")
print(json.dumps({"orig": sys.orig_argv, "own": [n for n in os.environ if n.startswith(own)],
                  "stdin": os.read(0, 1).decode()}))
"""
    found = pod(script)
    found.assign(0)
    found.start()
    assert found.end() == 0
    (line,) = [json.loads(line) for line in found.log.splitlines() if line.startswith("{")]
    assert line["orig"] == [sys.executable, "-u", str(found.folder / "script.py")]
    assert line["own"] == []
    assert line["stdin"] == ""


def test_an_interpreter_that_the_user_chose_for_workers_is_kept(pod, tmp_path):
    chosen = tmp_path / "chosen"
    chosen.write_text(f'#!/bin/sh\necho chosen\nexec {sys.executable} "$@"\n')
    chosen.chmod(0o755)
    found = pod('import os; print(os.environ["PYTHON_EXEC"])', env={"PYTHON_EXEC": str(chosen)})
    found.assign(0)
    found.start()
    assert found.end() == 0
    assert f"chosen\n{chosen}\n" in found.log


def test_an_assignment_that_must_not_start_only_ends_the_last_attempt(pod):
    found = pod(WORKS, port=None)
    found.assign(0)
    found.start()
    found.wait_for("works in attempt 0")
    found.assign(1, start=False)
    wait_until(lambda: not found.processes())
    assert "attempt 1 begins" not in found.log
    found.assign(1)
    found.wait_for("works in attempt 1")
    assert "OVERLAP" not in found.log


def test_a_follower_waits_longer_for_an_attempt_that_must_not_start_yet(pod, port):
    found = pod(LOSES_ITS_PEER, port=port)
    found.assign(0, wait=2)
    found.start()
    found.wait_for("waiting for the next attempt")
    found.assign(1, start=False)
    waiting = re.compile(r'activity="waiting"} ([0-9.]+)')
    wait_until(lambda: float(waiting.search(found.get("/metrics")[1])[1]) > 3)
    found.assign(1)
    assert found.end() == 0


def test_a_pod_that_is_never_told_to_start_ends(pod):
    found = pod(WORKS)
    found.assign(0)
    found.start()
    found.wait_for("works in attempt 0")
    found.assign(1, start=False, wait=0.1)
    assert found.end() != 0
    assert found.report["attempt"] == 0


def test_a_follower_waits_and_takes_part_in_the_next_attempt(pod):
    found = waiting_after_attempt_0(pod, LOSES_ITS_PEER)
    assert not found.processes()
    found.assign(1)
    assert found.end() == 0
    assert found.report["attempt"] == 1
    assert found.log.index("attempt 1 begins") < found.log.index("succeeds")


def test_a_follower_that_gets_no_assignment_ends_by_itself(pod):
    found = pod(LOSES_ITS_PEER)
    found.assign(0, wait=0.5)
    found.start()
    assert found.end() == 1
    assert found.report["cause"] == "Follower"
    assert "Connection closed by peer" in found.report["exception"]


def test_a_process_that_was_told_to_stop_is_a_follower(pod):
    found = pod("import os; os.kill(os.getpid(), 15)")
    found.assign(0)
    found.start()
    found.wait_for("waiting for the next attempt")


def test_a_newer_assignment_replaces_the_running_attempt(pod):
    found = pod(WORKS)
    found.assign(0, ranks=2)
    found.start()
    found.wait_for("works in attempt 0", times=2)
    found.assign(1, ranks=2)
    found.wait_for("works in attempt 1", times=2)
    assert "OVERLAP" not in found.log


def test_of_two_assignments_in_a_row_only_the_newest_runs_in_the_end(pod):
    found = pod(WORKS)
    found.assign(0)
    found.start()
    found.wait_for("works in attempt 0")
    found.assign(1)
    found.assign(2)
    found.wait_for("works in attempt 2")
    assert "works in attempt 1" not in found.log
    assert "OVERLAP" not in found.log


def ends_slowly(pod):
    """Return a pod that has got attempt 1 while a torchrun without SIGTERM runs attempt 0."""
    found = pod(WORKS)
    found.assign(0, flags=["--ranks=1", "--ignore-sigterm"], grace=1.0)
    found.start()
    found.wait_for("works in attempt 0")
    found.assign(1, grace=1.0)
    found.wait_for("torchrun ignores SIGTERM")
    return found


def test_an_assignment_that_comes_while_the_last_attempt_is_ended_is_not_lost(pod):
    found = ends_slowly(pod)
    found.assign(2)
    found.wait_for("works in attempt 2")
    assert "attempt 1 begins" not in found.log
    assert "OVERLAP" not in found.log


def test_an_older_assignment_changes_nothing(pod, port):
    found = pod(WORKS, port=port)
    found.assign(5)
    found.start()
    found.wait_for("works in attempt 5")
    found.assign(4)
    found.wait_for_looks()
    found.assign(5)
    found.wait_for_looks()
    found.assign(6)
    found.wait_for("works in attempt 6")
    assert found.log.count("begins") == 2


@pytest.mark.parametrize(
    "changes", [{"attempt": None}, {"flags": "--nnodes=1"}, {"env": None}, {"wait": "soon"}]
)
def test_an_assignment_that_cannot_be_read_changes_nothing(pod, port, changes):
    found = pod(WORKS, port=port)
    found.assign(0)
    found.start()
    found.wait_for("works in attempt 0")
    found.assign(1, **{"attempt": 1, **changes})
    found.wait_for_looks()
    found.assign(2)
    found.wait_for("works in attempt 2")
    assert found.log.count("begins") == 2


def test_torchrun_that_ignores_sigterm_is_killed_after_its_grace(pod):
    found = pod(WORKS)
    found.assign(0, flags=["--ranks=1", "--ignore-sigterm"])
    found.start()
    found.wait_for("works in attempt 0")
    began = time.monotonic()
    found.assign(1, grace=0.5)
    found.wait_for("works in attempt 1")
    assert time.monotonic() - began > 0.4
    assert "OVERLAP" not in found.log


def test_processes_that_workers_leave_behind_end_with_their_attempt(pod):
    # This process has left its parent, its session and its output.
    script = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
if os.environ["DDP_ATTEMPT"] == "0":
    os.kill(os.getpid(), 15)
"""
    found = waiting_after_attempt_0(pod, script)
    assert not found.processes()
    found.assign(1)
    assert found.end() == 0
    assert not found.processes()


def test_processes_without_a_parent_do_not_become_zombies(pod):
    script = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
print("forked")
time.sleep(600)
"""
    found = pod(script)
    found.assign(0)
    found.start()
    found.wait_for("forked")

    def zombies():
        out = os.popen(f"ps -o stat= --ppid {found.process.pid}").read()
        return [state for state in out.split() if state.startswith("Z")]

    wait_until(lambda: not zombies(), zombies)


def test_the_memory_of_a_pod_is_emptied_between_two_attempts(pod, tmp_path):
    memory = tmp_path / "shm"
    memory.mkdir()
    # An init container has written this.
    (memory / "prepared").touch()
    script = f"""
import os, pathlib
folder = pathlib.Path({str(memory)!r})
print("found", sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
(folder / "a").touch(); (folder / "deeper").mkdir(); (folder / "deeper" / "b").touch()
(folder / "link").symlink_to({str(tmp_path)!r})
os.kill(os.getpid(), 15)
"""
    found = pod(script, clear=str(memory))
    found.assign(0)
    found.start()
    found.wait_for("found ['prepared']")
    found.wait_for("waiting for the next attempt")
    found.assign(1)
    found.wait_for("found []")
    assert (tmp_path / "pod0" / "script.py").exists()


def test_sigterm_is_passed_on_to_the_workers(pod):
    script = """
import signal, sys, time
def stop(number, frame):
    print("saves a checkpoint", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("works", flush=True)
while True:
    time.sleep(0.05)
"""
    found = pod(script)
    found.assign(0)
    found.start()
    found.wait_for("works")
    found.terminate()
    assert found.end() == 1
    assert "saves a checkpoint" in found.log
    assert found.report["cause"] == "Stopped"


def test_a_pod_that_is_deleted_begins_no_attempt(pod):
    found = ends_slowly(pod)
    found.terminate()
    assert found.end() != 0
    assert found.report["cause"] == "Stopped"
    assert "attempt 1 begins" not in found.log
    assert not found.processes()


def test_a_follower_that_waits_ends_at_once_when_its_pod_is_deleted(pod):
    found = waiting_after_attempt_0(pod, LOSES_ITS_PEER)
    found.terminate()
    assert found.end() == 1
    assert found.report["cause"] == "Follower"


def test_a_program_that_does_not_exist_is_named(pod):
    found = pod(command=["/no/such/torchrun"])
    found.assign(0)
    found.start()
    assert found.end() == 1
    assert "/no/such/torchrun" in found.report["exception"]


def test_the_agent_starts_with_closed_standard_input(pod):
    found = pod("print('succeeds')")
    found.assign(0)
    found.start("sh", "-c", 'exec "$@" <&-', "sh")
    assert found.end() == 0
    assert "succeeds" in found.log


def test_a_full_disk_is_reported(pod):
    # Files may have no bytes. A write to a full disk fails in the same way.
    found = pod("print('succeeds')")
    found.assign(0)
    found.start("sh", "-c", '(ulimit -f 0; exec "$@") 2>&1 | cat', "sh")
    found.end()
    assert "File too large" in found.log


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace of its own needs root")
def test_the_agent_is_process_1_of_a_container(pod):
    found = pod("import os; os.kill(1, 15); import time; time.sleep(600)")
    found.assign(0)
    found.start("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    assert found.end() == 1
    assert found.report["cause"] == "Stopped"
