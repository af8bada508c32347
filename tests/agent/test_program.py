"""What the agent's file needs: the Python of most images, and nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import ddpjob.agent

PROGRAM = Path(ddpjob.agent.__file__).with_name("agent.py")


def test_the_agent_needs_python_3_9():
    vermin = Path(sys.executable).with_name("vermin")
    command = [vermin, "--target=3.9-", "--no-tips", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_agent_imports_only_the_standard_library():
    imported = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    # The command `launch` runs torchrun.
    assert imported - set(sys.stdlib_module_names) == {"torch"}
