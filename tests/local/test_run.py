"""Whole runs with a small program instead of torchrun: results, restarts, budgets and signals."""

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

from ddpjob.core.api.status import Status
from ddpjob.local.manifest import read
from ddpjob.local.processes import POD_UID
from ddpjob.local.run import LocalRun
from ddpjob.local.run_files import RunFiles

# torchrun's report of a failed rank.
SUMMARY = """[rank{rank}]: ValueError: bad data
E1121 15:44:57.731000 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\
 local_rank: 0 (pid: 1) of binary: python
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:44:57
  host      : localhost
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 1)
  error_file: <N/A>
  traceback : none
"""


class RecordingWatcher:
    """A watcher that keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.lines = []
        self.metrics = []
        self.reasons = []
        self.notes = []

    def status(self, status) -> None:
        self.reasons.append(status.reason)

    def note(self, text) -> None:
        self.notes.append(text)

    def metric(self, metric, *, is_printed=False) -> None:
        self.metrics.append(metric)

    def line(self, index, text) -> None:
        self.lines.append((index, text))


def write_job(folder: Path, program: str, nodes: int = 2, **spec) -> Path:
    """Write a job with a Python program as its launcher. torchrun's flags are its arguments."""
    script = folder / "launcher.py"
    script.write_text(textwrap.dedent(program))
    job = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "j"},
        "spec": {
            "image": "i",
            "nodes": nodes,
            "args": ["train.py"],
            "torchrun": {"command": [sys.executable, str(script)]},
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


async def run(path: Path, folder: Path, watcher: RecordingWatcher | None = None) -> Status:
    manifest = read(path)
    files = RunFiles(folder, config_maps=manifest.config_maps)
    files.logs.mkdir(parents=True)
    async with asyncio.timeout(60):
        return await LocalRun(manifest.job, files, watcher or RecordingWatcher()).run()


# The end of a job


async def test_a_job_ends_complete_with_its_result(tmp_path):
    program = """
        import os
        open(os.environ["DDP_RESULT_FILE"], "w").write('{"accuracy": 0.5}')
    """
    status = await run(write_job(tmp_path, program), tmp_path / "run")
    assert status.phase == "Complete"
    assert dict(status.result) == {"accuracy": "0.5"}


async def test_a_failure_restarts_the_gang_and_names_the_rank(tmp_path):
    program = f"""
        import os, sys, time
        if os.environ["DDP_ATTEMPT"] == "0":
            if os.environ["DDP_NODE_INDEX"] == "1":
                print({SUMMARY.format(rank=1)!r})
                sys.exit(1)
            time.sleep(60)
    """
    path = write_job(tmp_path, program, failurePolicy={"maxRestarts": 1})
    status = await run(path, tmp_path / "run")
    assert (status.phase, status.attempt.number, status.restarts) == ("Complete", 1, 1)
    assert status.last_failure.rank == 1
    assert "ValueError: bad data" in status.last_failure.message


async def test_a_job_that_always_fails_ends_failed_when_its_budget_is_used_up(tmp_path):
    path = write_job(tmp_path, "import sys; sys.exit(3)", nodes=1, failurePolicy={"maxRestarts": 1})
    status = await run(path, tmp_path / "run")
    assert (status.phase, status.reason, status.restarts) == ("Failed", "MaxRestartsExceeded", 1)


async def test_a_launcher_that_does_not_exist_is_a_failure_with_its_name(tmp_path):
    torchrun = {"command": ["no-such-launcher"]}
    policy = {"maxRestarts": 0}
    path = write_job(tmp_path, "", nodes=1, torchrun=torchrun, failurePolicy=policy)
    status = await run(path, tmp_path / "run")
    assert "No such file or directory: 'no-such-launcher'" in status.last_failure.message


async def test_a_worker_that_outlives_its_launcher_is_killed(tmp_path):
    program = """
        import subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        print(subprocess.Popen(sleep, start_new_session=True).pid)
    """
    watcher = RecordingWatcher()
    await run(write_job(tmp_path, program, nodes=1), tmp_path / "run", watcher)
    pid = int(watcher.lines[0][1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# Output


async def test_events_of_node_0_are_metrics(tmp_path):
    program = """
        print('{"event": "train", "step": 1, "loss": 0.5}')
        print("hello")
    """
    watcher = RecordingWatcher()
    await run(write_job(tmp_path, program), tmp_path / "run", watcher)
    assert watcher.metrics == [{"event": "train", "step": 1, "loss": 0.5}]
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["step"] == 1
    assert (0, "hello") in watcher.lines


async def test_a_line_that_looks_like_a_metric_and_is_not_does_not_end_the_run(tmp_path):
    watcher = RecordingWatcher()
    program = """print('{"event": ' + "[" * 100_000)"""
    status = await run(write_job(tmp_path, program, nodes=1), tmp_path / "run", watcher)
    assert status.phase == "Complete"
    assert watcher.metrics == []


async def test_a_line_of_any_length_is_read(tmp_path):
    watcher = RecordingWatcher()
    path = write_job(tmp_path, "print('x' * 300_000)", nodes=1)
    await run(path, tmp_path / "run", watcher)
    assert watcher.lines == [(0, "x" * 300_000)]


async def test_rank_variables_of_the_shell_do_not_reach_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "7")
    monkeypatch.setenv("RANK", "3")
    program = "import os; print('PET_NNODES' in os.environ or 'RANK' in os.environ)"
    watcher = RecordingWatcher()
    await run(write_job(tmp_path, program), tmp_path / "run", watcher)
    assert {text for _, text in watcher.lines} == {"False"}


async def test_a_watcher_that_fails_is_noted_once_and_the_run_goes_on(tmp_path):
    class FailingWatcher(RecordingWatcher):
        def line(self, index, text) -> None:
            raise ValueError("cannot show this")

    watcher = FailingWatcher()
    path = write_job(tmp_path, "print('a'); print('b')", nodes=1)
    status = await run(path, tmp_path / "run", watcher)
    assert status.phase == "Complete"
    assert len(watcher.notes) == 1
    assert "cannot show this" in watcher.notes[0]


# The command


def run_command(path: Path, folder: Path) -> list[str]:
    words = ["run", "--local", str(path), "--runs", str(folder / "runs")]
    return [sys.executable, "-m", "ddpjob.cli.main", *words]


def wait_for_lines(process: subprocess.Popen, word: str, count: int) -> None:
    """Read the output of a run until `count` lines have the word."""
    for line in process.stdout:
        count -= word in line.split()
        if count == 0:
            return
    raise AssertionError(f"the run ended before it had printed {word}")


def started_below(folder: Path) -> list[psutil.Process]:
    """Return the living processes of a run with its result file in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except psutil.Error:
            continue
        if POD_UID in env and env.get("DDP_RESULT_FILE", "").startswith(str(folder)):
            found.append(process)
    return found


def test_a_reader_that_goes_away_ends_the_run_and_all_its_processes(tmp_path):
    program = """
        import time
        while True:
            print("up", flush=True)
            time.sleep(0.05)
    """
    with subprocess.Popen(
        run_command(write_job(tmp_path, program), tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for_lines(process, "up", 1)
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
        assert process.stderr.read() == ""
    assert not started_below(tmp_path)


@pytest.mark.parametrize(
    ("policy", "is_noted"), [({}, True), ({"failurePolicy": {"maxRestarts": 0}}, False)]
)
def test_a_failed_run_says_that_it_has_no_restarts_unless_they_were_chosen(
    tmp_path, policy, is_noted
):
    path = write_job(tmp_path, "raise SystemExit(3)", nodes=1, **policy)
    done = subprocess.run(run_command(path, tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "failed with exit code 3" in done.stdout
    assert "maxRestarts=0 allows no restart" in done.stdout
    assert ("--max-restarts sets their number" in done.stdout) is is_noted
    # There is no job in a cluster to take up again.
    assert "retry" not in done.stdout
    assert "retries" not in done.stdout


def test_a_progress_bar_is_one_line(tmp_path):
    # It begins its line again with carriage returns. Only its last state is displayed.
    program = """
        import sys
        for done in range(3):
            sys.stdout.write(f"\\r{done} of 2")
            sys.stdout.flush()
        print("\\r\\ndone")
    """
    command = run_command(write_job(tmp_path, program), tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("[n0]")]
    assert lines == ["[n0] 2 of 2", "[n0] done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes_of_a_run(tmp_path, number):
    program = """
        import subprocess, sys, time
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(sleep, start_new_session=True)
        print("up", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        run_command(write_job(tmp_path, program), tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        wait_for_lines(process, "up", 2)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    deadline = time.monotonic() + 60
    while (left := started_below(tmp_path)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    assert not left


# A spec and its refusal. The first is refused by `read`, the others by `translate`.
REFUSED = {
    "misspelt field": ({"nodez": 1}, "spec.nodez: unknown field (did you mean 'nodes'?)"),
    "missing folder": (
        {
            "volumes": [{"name": "v", "hostPath": {"path": "/no/such/folder"}}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
        "volume v: hostPath /no/such/folder: does not exist on this machine",
    ),
    "missing ConfigMap": (
        {"envFrom": [{"configMapRef": {"name": "c"}}]},
        'envFrom[].configMapRef: ConfigMap "c" not found in the manifest; add it',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_manifest_exits_with_2_prints_one_line_and_changes_nothing(tmp_path, case):
    spec, message = REFUSED[case]
    earlier = tmp_path / "runs" / "j" / "claims" / "checkpoints"
    earlier.mkdir(parents=True)
    (tmp_path / "runs" / "j" / "status.yaml").write_text("phase: Complete")
    before = sorted(tmp_path.rglob("*"))
    path = write_job(tmp_path, "", **spec)
    command = [*run_command(path, tmp_path), "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    created = set(tmp_path.rglob("*")) - set(before)
    assert created == {path, tmp_path / "launcher.py"}
