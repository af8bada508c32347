"""What the agent's files need: the Python of most images, and nothing else."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddpjob.agent
from ddpjob.agent import processes, report

PROGRAMS = sorted(Path(ddpjob.agent.__file__).parent.glob("*.py"))

# These files run without -IS, beside torch.
WITH_TORCH = ("torchrun.py", "worker.py", "zygote.py")


def test_the_agent_needs_python_3_9():
    vermin = Path(sys.executable).with_name("vermin")
    command = [vermin, "--target=3.9-", "--no-tips", *map(str, PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def imports(program: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_agent_imports_only_the_standard_library(program):
    assert imports(program) <= ({"torch"} if program.name in WITH_TORCH else set())


@pytest.mark.skipif(not shutil.which("ps"), reason="ps is not installed: apt install procps")
def test_processes_are_found_with_and_without_proc():
    with subprocess.Popen(["sleep", "60"]) as child:
        found = (processes.parents(), processes.parents_by_ps())
        child.kill()
    assert [parents[child.pid] for parents in found] == [os.getpid(), os.getpid()]
    # ps itself is no process of the pod.
    assert set(found[1].values()) <= {0, *found[1]}


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ('Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in main\n', "main"),
        (
            'Thread 0x2 (most recent call first):\n  File "a.py", line 2 in other\n\n'
            'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in main\n',
            "main",
        ),
        # A process stopped outside of Python.
        (
            'Thread 0x2 (most recent call first):\n  File "a.py", line 2 in other\n\n'
            'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in main\n',
            "main",
        ),
    ],
)
def test_the_stack_is_that_of_the_main_thread(text, frame):
    assert report.stack_in(text)[0].endswith(f"in {frame}")


def test_without_a_stack_there_are_no_frames():
    assert report.stack_in("Aborted\n") == []
