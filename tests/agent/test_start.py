"""start.sh: the agent runs with the Python of the image's torchrun."""

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
    """Write a program which prints its path and its arguments."""
    return a_program(path, f'#!{SHELL}\necho "{path}" "$@"\n')


def start(folder: Path, word: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Start the agent in an image with only the programs in `folder/bin`."""
    command = [SHELL, str(START), word, "/agent", '{"port": 1}', "train.py", "a b"]
    env = {"PATH": path or str(folder / "bin")}
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


@pytest.mark.parametrize(
    "words",
    [
        "python3.11",
        " python3.11",
        "-S python3.11 -E",
        "-Spython3.11 -E",
        "-S A=1 python3.11 -m python3",
        "-i * python3.11",
    ],
)
def test_env_in_the_first_line_finds_the_interpreter_on_the_path(tmp_path, words):
    python = a_python(tmp_path / "bin/python3.11")
    a_python(tmp_path / "bin/python3")
    a_program(tmp_path / "bin/torchrun", f"#!/usr/bin/env {words}\n")
    done = start(tmp_path, "torchrun")
    assert (done.stdout.split(" -IS")[0], done.stderr) == (str(python), "")


NO_PYTHON = {
    "env with bash, as a shim of pyenv has": "#!/usr/bin/env bash\n",
    "env with a path": "#!/usr/bin/env {bin}/bash\n",
    "env with options": "#!/usr/bin/env -S bash -e\n",
    "a path": "#!{bin}/bash\n",
    "a folder with the name of Python": "#!{python_folder}/bash\n",
    "the second line": '#!/bin/sh\n\'\'\'exec\' "{bin}/bash" "$0" "$@"\n',
}


@pytest.mark.parametrize("text", NO_PYTHON.values(), ids=NO_PYTHON)
def test_only_a_python_is_taken_for_python(tmp_path, text):
    python = a_python(tmp_path / "bin/python3")
    a_python(tmp_path / "bin/bash")
    other = a_python(tmp_path / "python/bash").parent
    a_program(tmp_path / "bin/torchrun", text.format(bin=python.parent, python_folder=other))
    done = start(tmp_path, "torchrun")
    assert (done.stdout.split(" -IS")[0], done.stderr) == (str(python), "")


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
        "ddpjob: found no Python: neither torchrun, python3 nor python is on the PATH. Use an "
        "image with PyTorch, or set spec.torchrun.python to the path of its Python. "
        f"PATH={tmp_path}/bin\n"
    )


def test_a_path_that_kubernetes_does_not_expand_is_named(tmp_path):
    done = start(tmp_path, "torchrun", "/opt/conda/bin:$(PATH)")
    assert done.returncode == 127
    assert done.stderr == (
        "ddpjob: found no Python: neither torchrun, python3 nor python is on the PATH. Kubernetes "
        "does not expand $(PATH): give the whole path in env. PATH=/opt/conda/bin:$(PATH)\n"
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
