"""A pod of this machine: how its process starts and ends, and leaves no process behind."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from ddpjob.local import local_pod
from ddpjob.local.local_pod import LocalPod
from ddpjob.local.output import Output
from ddpjob.local.processes import find_processes
from ddpjob.local.translate import Command

SLEEP = "import time; time.sleep(600)"

# Writes a line and then goes on.
PRINT_AND_SLEEP = (sys.executable, "-c", f"print('x' * 100, flush=True); {SLEEP}")


def spawn_with_clean_environment(own_session: bool) -> str:
    """Return a program to print the id of a child without any variable."""
    child = f"[sys.executable, '-c', '{SLEEP}'], env={{}}, start_new_session={own_session}"
    return f"import subprocess, sys, time; print(subprocess.Popen({child}).pid, flush=True)"


def make_pod() -> LocalPod:
    body = {"metadata": {"name": "p", "uid": str(uuid.uuid4())}, "spec": {}, "status": {}}
    return LocalPod(body, lambda: None)


async def run_pod(
    pod: LocalPod,
    folder: Path,
    *argv: str,
    on_line: Callable[[str], None] = print,
    env: Mapping[str, str] = {},
) -> dict:
    """Run a pod and return how its container ended. The log is `folder/log`."""
    files = {"message": folder.parent / "message", "assignment": folder.parent / "assignment"}
    command = Command(argv=argv, env=env, **files)
    async with asyncio.timeout(30):
        await pod.run(command, Output(folder / "log", on_line))
    assert pod.finished.is_set()
    return pod.body["status"]["containerStatuses"][0]["state"]["terminated"]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# Errors


@pytest.mark.parametrize(
    ("argv", "env"), [(("echo", "a\0b"), {}), (("echo",), {"A=B": "c"})], ids=["argument", "name"]
)
async def test_a_process_that_cannot_be_started_is_a_pod_that_failed(tmp_path, argv, env):
    ended = await run_pod(make_pod(), tmp_path, *argv, env=env)
    assert ended["exitCode"] == 128
    assert ended["message"].startswith("echo: ")


async def test_a_log_that_cannot_be_written_ends_the_pod(tmp_path):
    ended = await run_pod(make_pod(), tmp_path / "missing", *PRINT_AND_SLEEP)
    assert ended["exitCode"] == 128
    assert ended["message"] == f"{tmp_path}/missing/log: No such file or directory"


async def test_output_that_cannot_be_handled_ends_the_pod_and_its_process(tmp_path):
    pod = make_pod()

    def refuse(line: str) -> None:
        raise RuntimeError("no more")

    ended = await run_pod(pod, tmp_path, *PRINT_AND_SLEEP, on_line=refuse)
    assert ended["exitCode"] == 128
    assert not find_processes(pod.uid)


# Deletion and leftover processes


async def test_a_pod_that_is_deleted_before_its_start_gets_the_signal(tmp_path):
    pod = make_pod()
    pod.terminate(grace=600)
    ended = await run_pod(pod, tmp_path, "sleep", "600")
    assert ended["exitCode"] == 128 + signal.SIGTERM


async def test_a_process_with_a_clean_environment_ends_with_its_agent(tmp_path):
    lines = []
    program = spawn_with_clean_environment(own_session=False)
    await run_pod(make_pod(), tmp_path, sys.executable, "-c", program, on_line=lines.append)
    assert not is_alive(int(lines[0]))


async def test_a_process_in_a_session_of_its_own_ends_with_a_deleted_pod(tmp_path):
    pod = make_pod()
    lines = []

    def delete(line: str) -> None:
        lines.append(line)
        pod.terminate(grace=600)

    program = f"{spawn_with_clean_environment(own_session=True)}; time.sleep(600)"
    await run_pod(pod, tmp_path, sys.executable, "-c", program, on_line=delete)
    assert not is_alive(int(lines[0]))


async def test_a_process_that_escaped_does_not_keep_a_pod_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(local_pod, "DRAIN_SECONDS", 0.5)
    lines = []
    program = spawn_with_clean_environment(own_session=True)
    argv = (sys.executable, "-c", program)
    try:
        ended = await run_pod(make_pod(), tmp_path, *argv, on_line=lines.append)
        assert ended["exitCode"] == 0
    finally:
        psutil.Process(int(lines[0])).kill()


# Environment


async def test_the_users_path_follows_the_folder_of_this_python(tmp_path):
    lines = []
    argv = (sys.executable, "-c", "import os; print(os.environ['PATH'])")
    env = {"PATH": "/opt/mine"}
    await run_pod(make_pod(), tmp_path, *argv, env=env, on_line=lines.append)
    assert lines == [f"{Path(sys.executable).parent}{os.pathsep}/opt/mine"]
