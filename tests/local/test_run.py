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

from ddpjob.core.readers import SpecError
from ddpjob.local import processes
from ddpjob.local.manifest import read
from ddpjob.local.processes import MARK, LocalPod
from ddpjob.local.run import LocalRun, run_folder
from ddpjob.local.run_metrics import metric
from ddpjob.local.translate import Command, Folders

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
        self.lines, self.metrics, self.reasons, self.notes = [], [], [], []

    def status(self, status) -> None:
        self.reasons.append(status.reason)

    def note(self, text) -> None:
        self.notes.append(text)

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
            {
                "apiVersion": "ddpjob.dev/v1alpha1",
                "kind": "DDPJob",
                "metadata": {"name": "j"},
                "spec": fields | spec,
            }
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
        tmp_path,
        "",
        nodes=1,
        torchrun={"command": ["no-such-launcher"]},
        failurePolicy={"maxRestarts": 0},
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
        assert (first.name, second.name) == ("j", "j.2")


def test_a_new_run_keeps_the_claims_and_clears_the_rest(tmp_path):
    (tmp_path / "j/claims/c").mkdir(parents=True)
    (tmp_path / "j/logs").mkdir()
    (tmp_path / "j/logs/old.log").touch()
    with run_folder(tmp_path, "j") as folder:
        assert (folder / "claims/c").is_dir()
        assert not (folder / "logs/old.log").exists()


def test_a_folder_that_cannot_be_written_gets_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(SpecError, match="Choose another folder with --runs"),
        run_folder(tmp_path / "file", "j"),
    ):
        pass


def a_pod() -> LocalPod:
    return LocalPod(
        {"metadata": {"name": "p"}, "spec": {}, "status": {}},
        "uid-of-" + os.urandom(4).hex(),
        lambda: None,
    )


async def run_pod(
    pod: LocalPod, folder: Path, *argv: str, log: Path | None = None, on_line=print, env=None
) -> dict:
    """How the container ended."""
    made = Command(argv=argv, env=env or {}, result=folder / "result")
    async with asyncio.timeout(30):
        await pod.run(made, log or folder / "log", on_line)
    assert pod.finished.is_set()
    return pod.body["status"]["containerStatuses"][0]["state"]["terminated"]


PRINTS_AND_STAYS = (
    sys.executable,
    "-c",
    "import time; print('x' * 100, flush=True); time.sleep(600)",
)


@pytest.mark.parametrize(
    "wrong", [{"argv": ("echo", "a\0b")}, {"argv": ("echo",), "env": {"A=B": "c"}}]
)
async def test_a_process_that_cannot_be_started_is_a_pod_that_ended(tmp_path, wrong):
    ended = await run_pod(a_pod(), tmp_path, *wrong["argv"], env=wrong.get("env"))
    assert ended["exitCode"] == 128
    assert ended["message"].startswith("echo: ")


async def test_a_log_that_cannot_be_written_ends_the_pod(tmp_path):
    ended = await run_pod(a_pod(), tmp_path, *PRINTS_AND_STAYS, log=tmp_path / "no/folder/log")
    assert (ended["exitCode"], ended["message"]) == (
        128,
        f"{tmp_path}/no/folder/log: No such file or directory",
    )


async def test_output_that_nobody_takes_ends_the_pod_and_its_process(tmp_path):
    pod = a_pod()

    def refuse(line: str) -> None:
        raise RuntimeError("no more")

    ended = await run_pod(pod, tmp_path, *PRINTS_AND_STAYS, on_line=refuse)
    assert ended["exitCode"] == 128
    assert not processes.processes_of(pod.uid)


async def test_a_pod_that_is_deleted_before_it_starts_is_asked_to_end(tmp_path):
    pod = a_pod()
    pod.terminate(grace=600)
    assert (await run_pod(pod, tmp_path, "sleep", "600"))["exitCode"] == 128 + signal.SIGTERM


CLEAN = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={}, start_new_session=%s)"


async def test_a_process_with_a_clean_environment_ends_with_its_agent(tmp_path):
    lines = []
    program = f"import subprocess, sys; print({CLEAN % False}.pid)"
    await run_pod(a_pod(), tmp_path, sys.executable, "-c", program, on_line=lines.append)
    assert not is_alive(int(lines[0]))


async def test_a_process_in_a_session_of_its_own_ends_with_a_deleted_pod(tmp_path):
    pod, lines = a_pod(), []

    def delete(line: str) -> None:
        lines.append(line)
        pod.terminate(grace=600)

    program = f"import subprocess, sys, time; print({CLEAN % True}.pid); time.sleep(600)"
    await run_pod(pod, tmp_path, sys.executable, "-c", program, on_line=delete)
    assert not is_alive(int(lines[0]))


async def test_a_process_that_escaped_does_not_keep_a_pod_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "DRAIN_SECONDS", 0.5)
    lines = []
    program = f"import subprocess, sys; print({CLEAN % True}.pid)"
    try:
        ended = await run_pod(
            a_pod(), tmp_path, sys.executable, "-c", program, on_line=lines.append
        )
        assert ended["exitCode"] == 0
    finally:
        psutil.Process(int(lines[0])).kill()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_the_users_path_is_kept_behind_ours(tmp_path):
    lines = []
    program = (sys.executable, "-c", "import os; print(os.environ['PATH'])")
    await run_pod(a_pod(), tmp_path, *program, env={"PATH": "/opt/mine"}, on_line=lines.append)
    assert lines == [f"{Path(sys.executable).parent}{os.pathsep}/opt/mine"]


async def test_a_watcher_that_fails_is_noted_once_and_the_run_goes_on(tmp_path):
    class Failing(Quiet):
        def line(self, index, text) -> None:
            raise ValueError("cannot show this")

    watcher = Failing()
    status = await run(
        write_job(tmp_path, "print('a'); print('b')", nodes=1), tmp_path / "run", watcher
    )
    assert status.phase == "Complete"
    assert len(watcher.notes) == 1
    assert "cannot show this" in watcher.notes[0]


@pytest.mark.parametrize(
    "line", ['{"event": "request_finished", "took": 3}', '{"event": ["train"]}', '{"event": 1', "x"]
)
def test_lines_of_other_programs_are_no_metrics(line):
    assert metric(line) is None


def test_a_shape_that_no_api_server_would_take_gets_a_sentence(tmp_path):
    volumes = {
        "volumes": [{"name": "v", "configMap": {"name": "c", "items": [{"key": "k"}]}}],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    }
    path = write_job(tmp_path, "", **volumes)
    with path.open("a") as more:
        more.write("---\nkind: ConfigMap\nmetadata: {name: c}\ndata: {k: text}\n")
    with pytest.raises(SpecError, match="No pod can be made of this manifest"):
        LocalRun(read(path), Folders(tmp_path), Quiet())


def test_a_reader_that_goes_away_ends_the_run_and_leaves_nothing(tmp_path):
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
        for line in process.stdout:
            if "up" in line.split():
                break
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
        assert process.stderr.read() == ""
    assert not started_below(tmp_path)


def test_a_progress_bar_is_one_line(tmp_path):
    """It begins its line anew by carriage returns; a log has what a terminal shows in the end."""
    program = """
        import sys
        for done in range(3):
            sys.stdout.write(f"\\r{done} of 2")
            sys.stdout.flush()
        print("\\r\\ndone")
    """
    run = subprocess.run(
        run_command(write_job(tmp_path, program), tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.strip() for line in run.stdout.splitlines() if line.startswith("[n0]")]
    assert lines == ["[n0] 2 of 2", "[n0] done"]


def run_command(path: Path, folder: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ddpjob.cli.main",
        "run",
        "--local",
        str(path),
        "--runs",
        str(folder / "runs"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_that_was_started(tmp_path, number):
    program = """
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("up", flush=True)
        time.sleep(600)
    """
    path = write_job(tmp_path, program)
    with subprocess.Popen(
        run_command(path, tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
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
    done = subprocess.run(run_command(path, tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no field 'nodez'" in done.stderr
    assert not (tmp_path / "runs").exists()
