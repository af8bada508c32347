"""The script of the tutorial, taken from its page, as a job of this machine."""

import re
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from ddpjob import DDPJob, LocalClient

PAGE = Path(__file__).parents[2] / "docs" / "users" / "own-script.md"
SCRIPT = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def client(tmp_path):
    return LocalClient(tmp_path / "runs")


def submit(client, folder, steps, nodes=2, **spec):
    (folder / "train.py").write_text(SCRIPT)
    args = [str(folder / "train.py"), str(steps)]
    client.submit(DDPJob.create("train", image="i", args=args, nodes=nodes, **spec))
    return client.wait("train", timeout=120)


def test_the_script_trains_on_two_nodes_and_resumes(client, tmp_path):
    claim = {"checkpoint": {"claimName": "ckpt"}}
    job = submit(client, tmp_path, 60, **claim)
    assert job.succeeded, job.message
    steps, losses = client.metrics("train").curve("train", "loss")
    assert steps == [0, 50]
    assert losses[1] < losses[0]
    # A longer run goes on after the checkpoint of step 50.
    job = submit(client, tmp_path, 120, **claim)
    assert job.succeeded, job.message
    assert client.metrics("train").curve("train", "loss")[0] == [100]


def test_without_a_claim_nothing_is_written(client, tmp_path):
    job = submit(client, tmp_path, 60, nodes=1)
    assert job.succeeded, job.message
    assert not list(tmp_path.rglob("*.pt"))


IN_A_FOLDER = """
import json
import os
import sys

from lib import model

os.makedirs("out", exist_ok=True)
print("found", json.load(open("config.json")), model.SIZE, sys.argv[1:], os.getcwd(), flush=True)
"""


@pytest.mark.parametrize("way", ["where it is", "from its archive"])
def test_a_script_finds_the_files_of_its_folder(tmp_path, way):
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "train.py").write_text(IN_A_FOLDER)
    (project / "config.json").write_text("[1]")
    (project / "lib" / "model.py").write_text("SIZE = 7\n")
    script = ["--script", str(project / "train.py"), "--code", str(project), "--nodes", "1"]
    runs = ["--runs", str(tmp_path / "runs")]
    if way == "where it is":
        done = ddpjob("run", "--local", *script, *runs, "--", "--epochs", "3")
        folder = project
    else:
        manifest = ddpjob("init", *script, "--image", "i")
        (tmp_path / "job.yaml").write_text(manifest)
        done = ddpjob("run", "--local", str(tmp_path / "job.yaml"), *runs)
        folder = tmp_path / "runs/train/pods/train-0-0/volumes/ddpjob-work/work"
    words = ["--epochs", "3"] if way == "where it is" else []
    assert f"found [1] 7 {words} {folder}" in done
    assert (folder / "out").is_dir()


# pip needs no index of packages for a wheel. The test has written it beside the script.
WHEEL = "installed-1-py3-none-any.whl"
SETUP = f"""
pip install --no-index {WHEEL}
pip --version
"""

IN_AN_ENVIRONMENT = """
import sys

import installed
import torch

print("found", installed.SIZE, torch.__name__, sys.prefix, flush=True)
"""


def write_wheel(path, module):
    """Write the wheel of a package with one module, `installed`."""
    files = {
        "installed.py": module,
        "installed-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: installed\nVersion: 1\n",
        "installed-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
    }
    record = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr("installed-1.dist-info/RECORD", record)


def test_a_setup_installs_into_an_environment_of_the_run(tmp_path):
    project = tmp_path / "my project"
    project.mkdir()
    (project / "train.py").write_text(IN_AN_ENVIRONMENT)
    write_wheel(project / WHEEL, "SIZE = 7\n")
    script = ["--script", str(project / "train.py"), "--code", str(project), "--nodes", "2"]
    manifest = project / "job.yaml"
    # The setup lasts until the status has shown it as running.
    waits = f"until [ -f '{tmp_path}/seen' ]; do sleep 0.1; done"
    manifest.write_text(ddpjob("init", *script, "--image", "i", "--setup", SETUP + waits))
    runs = ["--runs", str(tmp_path / "my runs")]
    done = ""
    with started("run", "--local", "--setup", str(manifest), *runs) as run:
        for line in run.stdout:
            done += line
            # One pod or both may be named.
            if re.match(
                r"Starting +\d of 2 nodes are ready; pod train-0-\d .*runs? spec.setup", line
            ):
                (tmp_path / "seen").touch()
    assert run.returncode == 0, done
    for pod in ("train-0-0", "train-0-1"):
        environment = tmp_path / "my runs" / "train" / "pods" / pod / "environment"
        assert f"found 7 torch {environment}" in done
        assert list(environment.glob("lib/python*/site-packages/installed.py"))


def test_a_setup_runs_on_this_machine_only_if_that_is_asked_for(tmp_path):
    (tmp_path / "train.py").write_text("print('trains', flush=True)\n")
    script = ["--script", str(tmp_path / "train.py"), "--nodes", "1", "--image", "i"]
    manifest = tmp_path / "job.yaml"
    manifest.write_text(ddpjob("init", *script, "--setup", "exit 3"))
    done = ddpjob("run", "--local", str(manifest), "--runs", str(tmp_path / "runs"))
    assert "spec.setup: not run" in done
    assert "trains" in done


COMMAND = [sys.executable, "-m", "ddpjob.cli.main"]


def ddpjob(*words):
    """Return what a command prints."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def started(*words):
    """Start a command, wait for its end, and end it after two minutes."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*COMMAND, *words], text=True, **streams) as process:
        limit = Timer(120, process.terminate)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
