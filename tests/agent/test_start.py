"""start.sh: the agent runs with the Python that the image's torchrun has."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

START = Path(__file__).parents[2] / "operator/ddpjob/agent/start.sh"
SHELL = shutil.which("sh")
assert SHELL


def a_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def a_python(path: Path) -> Path:
    """Write a program that prints its path and its arguments."""
    return a_program(path, f'#!{SHELL}\necho "{path}" "$@"\n')


def start(folder: Path, word: str) -> subprocess.CompletedProcess[str]:
    """Start the agent in an image whose only programs are in `folder/bin`."""
    command = [SHELL, str(START), word, "/agent", '{"port": 1}', "train.py", "a b"]
    env = {"PATH": str(folder / "bin")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=10)


SHEBANGS = {
    "a path": "#!{python}\n",
    "a path after a space": "#! {python}\n",
    "a path with a flag": "#!{python} -s\n",
    "the second line, as pip writes a long path": "#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n",
    "the second line, in quotes": '#!/bin/sh\n\'\'\'exec\' "{python}" "$0" "$@"\n',
}


@pytest.mark.parametrize("shebang", SHEBANGS.values(), ids=SHEBANGS)
def test_the_interpreter_of_torchrun_is_used(tmp_path, shebang):
    python = a_python(tmp_path / "opt/conda/bin/python3.11")
    a_python(tmp_path / "bin/python3")
    a_program(tmp_path / "bin/torchrun", shebang.format(python=python) + "import torch\n")
    done = start(tmp_path, "torchrun")
    assert done.stdout == f'{python} -IS /agent agent {{"port": 1}} train.py a b\n'


def test_an_interpreter_in_a_folder_with_a_space_is_used(tmp_path):
    python = a_python(tmp_path / "my env/bin/python")
    text = f'#!/bin/sh\n\'\'\'exec\' "{python}" "$0" "$@"\n'
    a_program(tmp_path / "bin/torchrun", text)
    assert start(tmp_path, "torchrun").stdout.startswith(f"{python} -IS")


def test_env_in_the_first_line_finds_the_interpreter_on_the_path(tmp_path):
    python = a_python(tmp_path / "bin/python3")
    a_program(tmp_path / "bin/torchrun", "#!/usr/bin/env python3\n")
    assert start(tmp_path, "torchrun").stdout.startswith(f"{python} -IS")


def test_a_command_that_is_python_runs_the_agent_itself(tmp_path):
    python = a_python(tmp_path / "bin/python3.12")
    a_python(tmp_path / "bin/python3")
    assert start(tmp_path, "python3.12").stdout.startswith(f"{python} -IS")
    assert start(tmp_path, str(python)).stdout.startswith(f"{python} -IS")


@pytest.mark.parametrize("name", ["python3", "python"])
@pytest.mark.parametrize(
    "first_line",
    [None, "\x7fELF", "#!/missing/python3", "#!/bin/bash", "", "#!/bin/sh\nexec sleep torchrun\n"],
)
def test_without_an_interpreter_that_exists_any_python_is_used(tmp_path, name, first_line):
    python = a_python(tmp_path / "bin" / name)
    if first_line is not None:
        a_program(tmp_path / "bin/torchrun", first_line)
    assert start(tmp_path, "torchrun").stdout.startswith(f"{python} -IS")


def test_an_image_without_python_gets_a_sentence(tmp_path):
    done = start(tmp_path, "torchrun")
    assert done.returncode == 127
    assert done.stderr == (
        "ddpjob: the image has no Python: found neither torchrun, python3 nor python. Use an image "
        "with PyTorch, or set spec.torchrun.python to the path of its Python.\n"
    )


def test_the_agent_takes_the_place_of_the_shell(tmp_path):
    a_program(tmp_path / "bin/python3", f"#!{SHELL}\necho $$\n")
    process = subprocess.Popen(
        [SHELL, str(START), "torchrun", "/agent"],
        env={"PATH": str(tmp_path / "bin")},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=10)
    assert int(output) == process.pid
    assert os.path.exists(START)
