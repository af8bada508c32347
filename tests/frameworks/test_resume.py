"""Loops of transformers, Lightning and Accelerate are killed or stopped, and resume exactly.

`make test-frameworks` sets up their environment.
"""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from trainer import launch

missing = [name for name in ("transformers", "accelerate", "lightning") if not find_spec(name)]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not found: make test-frameworks installs them"
)

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = ("hf", "lightning")
SCRIPTS = {
    "hf": EXAMPLES / "hf" / "train.py",
    "lightning": EXAMPLES / "lightning" / "train.py",
    "accelerate": Path(__file__).with_name("accelerate_loop.py"),
}

# Epochs of each script, for more than 100 steps.
EPOCHS = 12

DEADLINE = 300.0


def start(name, folder):
    command = (SCRIPTS[name], "--checkpoint-dir", folder, "--epochs", EPOCHS)
    return launch.torchrun(*command, start=launch.new_python)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function to get the last checkpoint of an undisturbed script."""
    found = {}

    def train(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            run = start(name, folder)
            assert run.finish() == 0, run.stderr
            found[name] = last_checkpoint(folder)
        return found[name]

    return train


def last_checkpoint(folder):
    return torch.load(launch.newest(folder), weights_only=True)


def assert_equal(found, expected):
    """Compare two checkpoints bit by bit: steps, weights, and the state of the optimizer."""
    assert found["step"] == expected["step"]
    weights, expected_weights = found["parts"]["model"], expected["parts"]["model"]
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert torch.equal(weights[name], tensor), name
    moments = found["parts"]["optimizer"]["state"]
    for number, state in expected["parts"]["optimizer"]["state"].items():
        assert torch.equal(moments[number]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_stops_at_a_signal_and_resumes_bit_by_bit(name, whole, tmp_path):
    run = start(name, tmp_path)
    run.wait_for("train", step=13)
    # torchrun passes it on to all ranks.
    run.signal(signal.SIGTERM)
    assert run.finish() != 0
    assert "stopped by SIGTERM after step" in run.stderr
    stopped = last_checkpoint(tmp_path)["step"]
    assert 13 <= stopped < whole(name)["step"]
    resumed = start(name, tmp_path)
    assert resumed.finish() == 0, resumed.stderr
    assert resumed.of("train")[0]["step"] == stopped + 1
    assert_equal(last_checkpoint(tmp_path), whole(name))
    # A start after the end takes no further step.
    again = start(name, tmp_path)
    assert again.finish() == 0, again.stderr
    assert again.of("train") == []


@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_rank_is_killed_restarts_and_ends_bit_by_bit_equal(name, whole, tmp_path):
    claim = tmp_path / "claim"
    claim.mkdir()
    manifest = tmp_path / "job.yaml"
    text = (EXAMPLES / name / "job.yaml").read_text()
    manifest.write_text(text.replace('train.py"]', f'train.py", "--epochs", "{EPOCHS}"]'))
    command = [
        *(sys.executable, "-m", "ddpjob.cli.main", "run", "--local", manifest),
        *("--runs", tmp_path / "runs", "--max-restarts", "3"),
        *("--config-map", f"{name}={SCRIPTS[name]}", "--claim", f"ddpjob-checkpoints={claim}"),
    ]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for_step(tmp_path / "runs" / name, 25, process)
        rank(1, name).kill()
        said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    steps = [event["step"] for event in events(tmp_path / "runs" / name)]
    assert any(later <= earlier for earlier, later in pairwise(steps))
    (folder,) = {path.parent for path in claim.rglob("step-*.pt")}
    assert_equal(last_checkpoint(folder), whole(name))


def events(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "train"]


def wait_for_step(run, step, process):
    deadline = time.monotonic() + DEADLINE
    while not any(event["step"] >= step for event in events(run)):
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
