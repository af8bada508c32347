"""The setup of a job: a shell text, run once in a pod before the first attempt."""

import os
import sys
from zipfile import ZipFile

import pytest

from .kubelet import wait_until

# Ends as a rank that has lost its peer, so the pod waits for the next attempt.
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
        (
            "echo reads the list\necho no such package >&2\nexit 3",
            3,
            "no such package (exit code 3)",
        ),
        # The shell ends at the first failed command, and a pipe is not one.
        ("echo before\nfalse\necho after", 1, "before (exit code 1)"),
        ("no-such-program --version", 127, "no-such-program: not found (exit code 127)"),
        ("echo lasts\nkill -9 $$", 137, "lasts (exit code -9)"),
        ("exit 1", 1, "exit code 1"),
        # What pip writes after an error.
        (
            "echo ERROR: no version; echo '[notice] upgrade pip'; exit 1",
            1,
            "no version (exit code 1)",
        ),
        # A text is no option of the shell.
        ("- pip install x", 127, "not found (exit code 127)"),
        ("exec >&- 2>&-; exit 5", 5, "exit code 5"),
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
    assert found.report["exception"] == "installs (took longer than setupTimeoutSeconds=0.5)"
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


ATTEMPTS = """
import os
from pathlib import Path
for path in sorted(Path().rglob("*")):
    print("found", path, "->", os.readlink(path) if path.is_symlink() else "")
print("reads", Path("part/train.py").read_text().strip(), os.access("run.sh", os.X_OK))
Path("logs/of-attempt").touch()
Path("part/train.py").write_text("by the attempt")
os.kill(os.getpid(), 15)
"""


@pytest.mark.parametrize("in_cluster", [True, False])
def test_each_attempt_of_a_pod_begins_with_what_the_setup_has_left(pod, tmp_path, in_cluster):
    code, work = tmp_path / "code", tmp_path / "volume"
    code.mkdir()
    work.mkdir()
    with ZipFile(code / "code.zip", "w") as archive:
        archive.writestr("part/train.py", "as sent")
        archive.writestr("run.sh", "as sent")
        archive.writestr("notes.md", "as sent")
    # It adds files, links and folders, and changes and removes what was sent.
    setup = """
mkdir -p data/deep logs
touch data/deep/set part/built.so
ln -s /usr/share big
echo changed > part/train.py
chmod +x run.sh
rm notes.md
"""
    options = {"code": str(code), "work": str(work), "own_files": in_cluster}
    found = pod(ATTEMPTS, setup=setup, **options)
    found.assign(0)
    found.start()
    for attempt in range(3):
        found.wait_for("waiting for the next attempt", attempt + 1)
        found.assign(attempt + 1)
    shown = [line for line in found.log.splitlines() if line.startswith(("found", "reads"))]
    first = [
        "found big -> /usr/share",
        *(f"found {path} -> " for path in ("data", "data/deep", "data/deep/set", "logs", "part")),
        *(f"found part/{name} -> " for name in ("built.so", "train.py")),
        "found run.sh -> ",
        "reads changed True",
    ]
    assert [line.strip() for line in shown[: 3 * len(first)]] == [one.strip() for one in first] * 3


def test_temporary_files_of_a_setup_stay_for_all_attempts(pod, tmp_path):
    shows = """
import os
print("found", os.listdir(os.environ["TMPDIR"]))
os.kill(os.getpid(), 15)
"""
    found = pod(shows, setup="touch $TMPDIR/staged", work=str(tmp_path), own_files=True)
    found.assign(0)
    found.start()
    for attempt in range(2):
        found.wait_for("waiting for the next attempt", attempt + 1)
        found.assign(attempt + 1)
    assert found.log.count("found ['staged']") == 2


def test_lines_of_json_in_a_setup_are_no_figures_of_the_training(pod):
    found = pod("print('trains')", setup='echo \'{"step": 7, "loss": 1.5}\'')
    found.assign(0)
    found.start()
    assert found.end() == 0
    assert not {"steps", "total", "trained"} & set(found.report)


def test_a_setup_has_the_python_of_the_workers(pod):
    found = pod(setup='command -v python; echo "base: $PYTHONUSERBASE"', env={"PATH": "/bin"})
    found.start()
    found.wait_for("setup has ended")
    assert f"{os.path.dirname(sys.executable)}/python" in found.log
    assert "base: \n" in found.log


def test_without_a_home_folder_packages_are_installed_in_the_volume_of_the_pod(pod, tmp_path):
    env = {"HOME": str(tmp_path / "absent")}
    shows = "import os, site; print('workers:', site.getuserbase(), os.environ['PATH'])"
    setup = 'echo "base: $PYTHONUSERBASE"'
    found = pod(shows, setup=setup, env=env, work=str(tmp_path), own_files=True)
    found.assign(0)
    found.start()
    assert found.end() == 0
    assert f"base: {tmp_path}/cache/python" in found.log
    assert f"workers: {tmp_path}/cache/python {tmp_path}/cache/python/bin:" in found.log
