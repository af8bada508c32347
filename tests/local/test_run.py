"""Whole runs on this machine, with a small program in torchrun's place: restarts, budgets, and nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import yaml

from ddpjob.local.manifest import read
from ddpjob.local.processes import MARK
from ddpjob.local.run import LocalRun, run_folder
from ddpjob.local.translate import Folders

SUMMARY = """[rank{rank}]: ValueError: bad data
E1121 15:44:57.731000 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 1) of binary: python
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:44:57
  host      : localhost
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 1)
  error_file: <N/A>
  traceback : none
"""


class Quiet:
    """A watcher that keeps what it was told."""

    def __init__(self) -> None:
        self.lines, self.metrics, self.reasons = [], [], []

    def status(self, status) -> None:
        self.reasons.append(status.reason)

    def event(self, event) -> None: ...

    def metric(self, metric) -> None:
        self.metrics.append(metric)

    def line(self, index, text) -> None:
        self.lines.append((index, text))


def write_job(folder: Path, program: str, nodes: int = 2, **spec) -> Path:
    """A job whose launcher is `program`, a Python script that torchrun's flags are passed to."""
    script = folder / "launcher.py"
    script.write_text(textwrap.dedent(program))
    fields = {
        "image": "i",
        "nodes": nodes,
        "args": ["train.py"],
        "torchrun": {"command": [sys.executable, str(script)]},
    }
    path = folder / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "metadata": {"name": "j"}, "spec": fields | spec}
        )
    )
    return path


async def run(path: Path, folder: Path, watcher=None):
    (folder / "logs").mkdir(parents=True)
    job = LocalRun(read(path), Folders(folder), watcher or Quiet())
    async with asyncio.timeout(60):
        return await job.run()


async def test_a_job_ends_complete_with_its_result(tmp_path):
    program = """
        import os
        open(os.environ["DDP_RESULT_FILE"], "w").write('{"accuracy": 0.5}')
    """
    status = await run(write_job(tmp_path, program), tmp_path / "run")
    assert (status.phase, dict(status.result)) == ("Complete", {"accuracy": "0.5"})


async def test_a_failure_restarts_the_gang_and_names_the_rank(tmp_path):
    program = f"""
        import os, sys, time
        if os.environ["DDP_ATTEMPT"] == "0":
            if os.environ["DDP_NODE_INDEX"] == "1":
                print({SUMMARY.format(rank=1)!r})
                sys.exit(1)
            time.sleep(60)
    """
    status = await run(write_job(tmp_path, program), tmp_path / "run")
    assert (status.phase, status.attempt, status.restarts) == ("Complete", 1, 1)
    assert status.last_failure["rank"] == 1
    assert "ValueError: bad data" in status.last_failure["message"]


async def test_a_job_that_always_fails_ends_failed_when_its_budget_is_spent(tmp_path):
    path = write_job(tmp_path, "import sys; sys.exit(3)", nodes=1, failurePolicy={"maxRestarts": 1})
    status = await run(path, tmp_path / "run")
    assert (status.phase, status.reason, status.restarts) == ("Failed", "MaxRestartsExceeded", 1)


async def test_a_launcher_that_is_not_there_is_a_failure_with_its_name(tmp_path):
    path = write_job(
        tmp_path, "", nodes=1, torchrun={"command": ["no-such-launcher"]}, failurePolicy={"maxRestarts": 0}
    )
    status = await run(path, tmp_path / "run")
    assert "no-such-launcher: No such file or directory" in status.last_failure["message"]


async def test_what_a_launcher_leaves_behind_is_ended(tmp_path):
    program = """
        import subprocess, sys
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(worker.pid)
    """
    watcher = Quiet()
    await run(write_job(tmp_path, program, nodes=1), tmp_path / "run", watcher)
    pid = int(watcher.lines[0][1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_progress_lines_of_node_0_are_metrics(tmp_path):
    program = """
        print('{"event": "train", "step": 1, "loss": 0.5}')
        print("hello")
    """
    watcher = Quiet()
    await run(write_job(tmp_path, program), tmp_path / "run", watcher)
    assert watcher.metrics == [{"event": "train", "step": 1, "loss": 0.5}]
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["step"] == 1
    assert (0, "hello") in watcher.lines


async def test_a_line_of_any_length_is_read(tmp_path):
    watcher = Quiet()
    await run(write_job(tmp_path, "print('x' * 300_000)", nodes=1), tmp_path / "run", watcher)
    assert watcher.lines == [(0, "x" * 300_000)]


async def test_the_shells_own_rank_variables_do_not_reach_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "7")
    monkeypatch.setenv("RANK", "3")
    watcher = Quiet()
    await run(
        write_job(tmp_path, "import os; print('PET_NNODES' in os.environ or 'RANK' in os.environ)"),
        tmp_path / "r",
        watcher,
    )
    assert {text for _, text in watcher.lines} == {"False"}


def test_two_runs_at_once_have_folders_of_their_own(tmp_path):
    with run_folder(tmp_path, "j") as first, run_folder(tmp_path, "j") as second:
        assert (first.name, second.name) == ("j", "j-2")


def test_a_new_run_keeps_the_claims_and_clears_the_rest(tmp_path):
    (tmp_path / "j/claims/c").mkdir(parents=True)
    (tmp_path / "j/logs").mkdir()
    (tmp_path / "j/logs/old.log").touch()
    with run_folder(tmp_path, "j") as folder:
        assert (folder / "claims/c").is_dir()
        assert not (folder / "logs/old.log").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_that_was_started(tmp_path, number):
    program = """
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("up", flush=True)
        time.sleep(600)
    """
    path = write_job(tmp_path, program)
    command = [sys.executable, "-m", "ddpjob.cli.main", "run", "--local", str(path), "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        up = 0
        for line in process.stdout:
            up += "up" in line.split()
            if up == 2:
                break
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    deadline = time.monotonic() + 10
    while (left := started_below(tmp_path)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    assert not left


def started_below(folder: Path) -> list[psutil.Process]:
    """Living processes of a run whose result file would be in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except psutil.Error:
            continue
        if MARK in env and env.get("DDP_RESULT_FILE", "").startswith(str(folder)):
            found.append(process)
    return found


def test_a_refused_manifest_exits_with_2_and_starts_nothing(tmp_path):
    path = write_job(tmp_path, "", nodez=1)
    command = [sys.executable, "-m", "ddpjob.cli.main", "run", "--local", str(path), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no field 'nodez'" in done.stderr
    assert not (tmp_path / "runs").exists()
