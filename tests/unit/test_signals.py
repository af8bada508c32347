"""The tests set the signals for their programs, however the tests themselves were started."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The signals that tests send to their programs.
NUMBERS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in ("INT", "QUIT", "HUP", "TERM", "ABRT")
)

# A test of the signals given by pytest to the programs of tests.
IGNORED = """
def test_programs_of_tests_ignore_no_signal():
    import subprocess
    status = subprocess.check_output(["cat", "/proc/self/status"], text=True)
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    for number in %(numbers)s:
        assert not int(mask, 16) >> number - 1 & 1
"""


def test_a_run_in_the_background_of_a_shell_has_the_same_signals(tmp_path):
    path = tmp_path / "test_ignored.py"
    path.write_text(IGNORED % {"numbers": NUMBERS})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    options = [f"--rootdir={tmp_path}", f"--confcutdir={ROOT}", "-c", "/dev/null"]

    def ignore():
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    done = subprocess.run(
        [*command, *options, "-p", "conftest"],
        cwd=ROOT / "tests",
        env={"PYTHONPATH": "."},
        preexec_fn=ignore,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
