"""`ddpjob run --local` with the real torchrun and trainer: the demo, and a killed worker."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from ddpjob.core.api.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
DEADLINE = 300
"""Seconds; generous, since other tests may share the machine."""


def ddpjob(*words: str) -> list[str]:
    return [sys.executable, "-m", "ddpjob.cli.main", *words]


def status(run: Path) -> dict:
    return load_yaml((run / "status.yaml").read_text())


def test_the_demo_trains_two_nodes_to_97_percent(tmp_path):
    done = subprocess.run(
        ddpjob("run", "--local", str(ROOT / "examples/digits.yaml"), "--runs", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "digits"
    assert float(status(run)["result"]["accuracy"]) >= 0.97
    assert status(run)["nodes"]["succeeded"] == 2
    for words in ("Result", "Time", "backward and all-reduce", f"ddpjob plot {run}"):
        assert words in done.stdout
    assert "Traceback" not in done.stdout


def test_a_killed_worker_restarts_the_gang_from_its_checkpoint(tmp_path):
    job = load_yaml((ROOT / "examples/digits.yaml").read_text())
    job["metadata"]["name"] = "killed"
    job["spec"]["checkpoint"] = {"claimName": "ckpt"}
    job["spec"]["failurePolicy"] = {"maxRestarts": 3}
    job["spec"]["args"] += ["--epochs", "8", "--checkpoint-every", "20", "--log-every", "5"]
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    run = tmp_path / "runs/killed"
    with subprocess.Popen(
        ddpjob("run", "--local", str(manifest), "--runs", str(tmp_path / "runs")),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        wait_for_event(run, "checkpoint")
        worker(rank=1).kill()
        said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    assert (status(run)["restarts"], status(run)["attempt"]["number"]) == (1, 1)
    assert status(run)["lastFailure"]["rank"] == 1
    assert status(run)["lastFailure"]["exitCode"] == -9
    assert "SIGKILL" in status(run)["lastFailure"]["message"]
    assert events(run, "start")[-1]["resumed_step"] >= 20


def test_an_example_with_data_runs_on_real_data_from_its_claim(real_data, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    real_data("mnist", data)
    job = load_yaml((ROOT / "examples/mnist.yaml").read_text())
    job["spec"]["args"] += ["--epochs", "2"]
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    command = ddpjob("run", "--local", str(manifest), "--runs", str(tmp_path))
    done = subprocess.run(
        [*command, "--claim", f"ddpjob-data={data}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (start,) = events(tmp_path / "mnist", "start")
    assert (start["train_samples"], start["test_samples"]) == (8000, 2000)
    assert float(status(tmp_path / "mnist")["result"]["accuracy"]) >= 0.9


def events(run: Path, kind: str) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_for_event(run: Path, kind: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not events(run, kind):
        assert time.monotonic() < deadline, f"no event {kind} came"
        time.sleep(0.1)


def worker(rank: int) -> psutil.Process:
    """Return the trainer process of a global rank of the job `killed`."""
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except psutil.Error:
            continue
        if env.get("DDP_JOB_NAME") == "killed" and env.get("RANK") == str(rank):
            return process
    raise AssertionError(f"no process of rank {rank}")
