"""Start the examples under torchrun and as jobs of this machine, and kill their ranks."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil

from trainer import launch

EXAMPLES = Path(__file__).parents[2] / "examples"

# Epochs of each script, which then has more than 100 steps.
EPOCHS = 12

DEADLINE = 300.0


def why_skipped(*packages):
    """Return the reason to skip a test, or an empty text."""
    missing = [name for name in packages if not find_spec(name)]
    return f"{', '.join(missing)} not found: make test-frameworks installs it" if missing else ""


def start(script, folder):
    """Start an example on two processes under torchrun."""
    command = (script, "--checkpoint-dir", folder, "--epochs", EPOCHS)
    return launch.torchrun(*command, start=launch.new_python)


def finished_once(start, factory):
    """Return a function to run a script to its end, once: it returns the run and its folder."""

    @cache
    def finished(name):
        folder = factory.mktemp(name)
        run = start(name, folder)
        assert run.finish() == 0, run.stderr
        return run, folder

    return finished


@contextmanager
def started_job(*words: object):
    """Run a job on this machine. It is ended if the block fails."""
    command = [sys.executable, "-m", "ddpjob.cli.main", "run", "--local", *words]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def finish_after_a_kill(run, words: Sequence[object], step=25):
    """Run a job, kill its rank 1 once `step` is reached, and wait until the job is Complete."""
    with started_job(*words) as process:
        wait_for_step(run, step, process)
        rank(1, run.name).kill()
        said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said


def steps_of(run):
    """Return the steps of all attempts of a job, in the order in which they were made."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event["step"] for event in map(json.loads, lines) if event["event"] == "train"]


def wait_for_step(run, step, process):
    deadline = time.monotonic() + DEADLINE
    while not any(made >= step for made in steps_of(run)):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def rank(number, job):
    """Return the process of a rank of a job on this machine."""
    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except psutil.Error:
            continue
        if variables.get("DDP_JOB_NAME") == job and variables.get("RANK") == str(number):
            return process
    raise AssertionError(f"no process of rank {number}")
