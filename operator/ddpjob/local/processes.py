"""Plays the kubelet: one process group for each pod, its output, its end, and nothing left behind.

torchrun puts each worker into a session of its own, and a killed agent orphans its workers; so the processes of a pod
are found by a variable in their environment, as a container's are by their cgroup.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ddpjob.core import names
from ddpjob.core.api import time_to_text
from ddpjob.local.translate import Command

MARK = "DDPJOB_POD_UID"
TAIL_BYTES = 2048
"""What a kubelet keeps of the log as termination message."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(uid: str) -> list[psutil.Process]:
    """Every living process that was started in the pod `uid`, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == uid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_all(uid: str) -> None:
    """SIGKILL to what is left of a pod, until nothing is."""
    for _ in range(10):
        left = processes_of(uid)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


class LocalPod:
    """A pod of this machine. `body` is what a cluster would show of it; `changed` is called when that changes."""

    def __init__(self, body: dict[str, Any], uid: str, changed: Callable[[], None]) -> None:
        self.body, self.uid = body, uid
        body["metadata"]["uid"] = uid
        body["spec"]["nodeName"] = socket.gethostname()
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""
        self.finished = asyncio.Event()

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    async def run(self, command: Command, log: Path, on_line: Callable[[str], None]) -> None:
        """From start to end; every line of output goes to `log` and to `on_line`."""
        output, sink = os.pipe()
        try:
            self._process = await self._start(command, sink)
        except OSError as error:
            os.close(output)
            self._end(128, f"{command.argv[0]}: {error.strerror}")
            return
        finally:
            os.close(sink)
        self._set_state({"running": {"startedAt": _now()}}, "Running")
        reading = asyncio.create_task(self._read(output, log, on_line))
        code = await self._process.wait()
        await asyncio.to_thread(kill_all, self.uid)  # which also closes the last writing end of the pipe
        await reading
        self._end(code if code >= 0 else 128 - code, self._message(command.result, code))

    def terminate(self, grace: float) -> None:
        """What deleting a pod does: SIGTERM now, SIGKILL to everything `grace` seconds later."""
        self.body["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": 0}
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace, self._kill_if_alive)

    def kill(self) -> None:
        """SIGKILL to everything now."""
        kill_all(self.uid)

    def _kill_if_alive(self) -> None:
        if not self.finished.is_set():
            self.kill()

    async def _start(self, command: Command, sink: int) -> asyncio.subprocess.Process:
        for folder in command.folders:
            folder.mkdir(parents=True, exist_ok=True)
        for path, text in command.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command.result.unlink(missing_ok=True)
        here = str(Path(sys.executable).parent)  # torchrun and python of the environment that runs this
        env: Mapping[str, str] = {
            **_inherited(),
            "PYTHONUNBUFFERED": "1",
            **command.env,
            "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
            MARK: self.uid,
        }
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    async def _read(self, output: int, log: Path, on_line: Callable[[str], None]) -> None:
        """Lines of any length, until nobody writes any more."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(output, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        with contextlib.closing(transport), log.open("wb") as copy:
            while chunk := await reader.read(65536):
                copy.write(chunk)
                copy.flush()
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    on_line(line.decode(errors="replace"))
        if rest:
            on_line(rest.decode(errors="replace"))

    def _message(self, result: Path, code: int) -> str:
        """The termination message: what was written for it, else, after a failure, the tail of the log."""
        with contextlib.suppress(OSError):
            written = result.read_text(errors="replace")[:4096]
            if written:
                return written
        return self._tail.decode(errors="replace") if code else ""

    def _end(self, code: int, message: str) -> None:
        state = {"terminated": {"exitCode": code, "message": message, "finishedAt": _now()}}
        self._set_state(state, "Failed" if code else "Succeeded")
        self.finished.set()

    def _set_state(self, state: Mapping[str, Any], phase: str) -> None:
        self.body["status"] = {"phase": phase, "containerStatuses": [{"name": names.TRAINER, "state": state}]}
        self._changed()


def _inherited() -> dict[str, str]:
    """This process's environment without what torchrun would take for its own flags or ranks."""
    reserved = (*names.RESERVED_VARIABLES, MARK)
    return {
        k: v for k, v in os.environ.items() if k not in reserved and not k.startswith((names.RESERVED_PREFIX, "DDP_"))
    }


def _now() -> str:
    return time_to_text(datetime.now(UTC))
