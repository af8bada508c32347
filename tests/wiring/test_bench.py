"""The programs of bench that need nothing but the operator's own functions still run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--nodes=3", "--jobs=2", "--pending=2")


def test_the_work_of_the_operator_is_measured():
    command = [sys.executable, "-m", "bench.operator_work", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| the jobs of a node, 4 pods |" in done.stdout.splitlines()[-1]
