"""The setup of a job: a shell text that runs once in a pod, before the first attempt."""

import os
import sys
from zipfile import ZipFile

import pytest

from .kubelet import wait_until

# Ends as a rank that has lost its peer, so that the pod waits for the next attempt.
LOSES_PEER = """
import os
from pathlib import Path
print("found", sorted(str(path) for path in Path().rglob("*")))
os.kill(os.getpid(), 15)
"""


def test_a_setup_runs_once_in_a_pod_before_its_attempts(pod, tmp_path):
    found = pod(LOSES_PEER, setup=f"echo one line >> {tmp_path}/setups\necho ends")
    found.assign(0)
    found.start()
    found.wait_for("waiting for the next attempt")
    found.assign(1)
    found.wait_for("waiting for the next attempt", 2)
    assert (tmp_path / "setups").read_text() == "one line\n"
    lines = found.log.splitlines()
    assert lines.index("ends") < lines.index("ddpjob agent: setup has ended")
    begins = next(line for line in lines if "attempt 0 begins" in line)
    assert lines.index("ddpjob agent: setup has ended") < lines.index(begins)


def test_a_pod_has_started_when_its_setup_has_ended(pod, port, tmp_path):
    wait = f"while ! test -e {tmp_path}/go; do sleep 0.02; done"
    found = pod("import time; time.sleep(600)", setup=wait, port=port)
    found.assign(0)
    found.start()
    wait_until(found.is_up)
    assert found.get("/started")[0] == 503
    assert '"activity": "setup"' in found.get("/state")[1]
    (tmp_path / "go").touch()
    wait_until(lambda: found.get("/started")[0] == 200)
    wait_until(found.is_ready)


def test_a_pod_without_a_setup_has_started_at_once(pod, port):
    found = pod("import time; time.sleep(600)", port=port)
    found.start()
    wait_until(found.is_up)
    assert found.get("/started")[0] == 200


@pytest.mark.parametrize(
    ("setup", "code", "words"),
    [
        ("echo reads the list\necho no such package >&2\nexit 3", 3, "no such package"),
        # The shell ends at the first command that fails, and a pipe is not one.
        ("echo before\nfalse\necho after", 1, "before"),
        ("no-such-program --version", 127, "no-such-program: not found"),
        ("echo lasts\nkill -9 $$", 137, "lasts"),
        ("exit 1", 1, ""),
    ],
)
def test_a_setup_that_fails_ends_the_pod_with_its_last_line(pod, setup, code, words):
    found = pod("print('trains')", setup=setup)
    found.assign(0)
    found.start()
    assert found.end() == code
    assert found.report["cause"] == "SetupFailed"
    assert found.report["exception"].endswith(words)
    assert "trains" not in found.log
    assert "after" not in found.log.splitlines()


def test_a_setup_that_lasts_too_long_is_killed_with_all_that_it_has_started(pod):
    found = pod(setup="echo installs; sleep 600 & sleep 600", setup_seconds=0.5)
    found.start()
    assert found.end() == 137
    assert found.report["exception"] == "not over after 0 s; its last line: installs"
    assert not found.processes()


def test_a_request_to_stop_ends_a_setup(pod):
    found = pod(setup="echo installs; sleep 600")
    found.assign(0)
    found.start()
    found.wait_for("installs")
    found.terminate()
    found.end()
    assert found.report["cause"] == "Stopped"
    assert not found.processes()


def test_what_a_setup_has_started_does_not_go_on(pod):
    found = pod("print('trains')", setup="sleep 600 &")
    found.assign(0)
    found.start()
    assert found.end() == 0
    assert not found.processes()


@pytest.mark.parametrize("in_cluster", [True, False])
def test_what_a_setup_adds_beside_the_code_stays_for_all_attempts(pod, tmp_path, in_cluster):
    code, work = tmp_path / "code", tmp_path / "volume"
    code.mkdir()
    work.mkdir()
    with ZipFile(code / "code.zip", "w") as archive:
        archive.writestr("part/train.py", "as sent")
    setup = "mkdir -p data/deep; touch data/deep/set part/built.so; echo changed > part/train.py"
    options = {"code": str(code), "place": str(work / "work")}
    script = LOSES_PEER.replace("os.kill", "Path('of-attempt').touch(); os.kill")
    found = pod(script, setup=setup, work=str(work) if in_cluster else None, **options)
    found.assign(0)
    found.start()
    paths = ["data", "data/deep", "data/deep/set", "part", "part/built.so", "part/train.py"]
    found.wait_for("waiting for the next attempt")
    # The first attempt has what the setup has changed; the others have the code as it was sent.
    assert (work / "work" / "part" / "train.py").read_text() == "changed\n"
    for attempt in (1, 2):
        found.assign(attempt)
        found.wait_for("waiting for the next attempt", attempt + 1)
        assert (work / "work" / "part" / "train.py").read_text() == "as sent"
    assert found.log.count(f"found {paths}") == 3


def test_a_setup_has_the_python_of_the_workers(pod):
    shows = 'command -v python; echo "base: $PYTHONUSERBASE, $PIP_DISABLE_PIP_VERSION_CHECK"'
    found = pod(setup=shows, env={"PATH": "/bin"})
    found.start()
    found.wait_for("setup has ended")
    assert f"{os.path.dirname(sys.executable)}/python" in found.log
    assert "base: , 1\n" in found.log


def test_without_a_home_folder_packages_are_installed_in_the_volume_of_the_pod(pod, tmp_path):
    env = {"HOME": str(tmp_path / "absent")}
    shows = "import site; print('workers:', site.getuserbase())"
    found = pod(shows, setup='echo "base: $PYTHONUSERBASE"', env=env, work=str(tmp_path))
    found.assign(0)
    found.start()
    assert found.end() == 0
    assert f"base: {tmp_path}/cache/python" in found.log
    assert f"workers: {tmp_path}/cache/python" in found.log
