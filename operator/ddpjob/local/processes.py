"""Plays the kubelet: one process group for each pod, its output, its end, and nothing left behind.

torchrun puts each worker into a session of its own, and a killed agent orphans its workers; so the
processes of a pod are found by a variable in their environment, as a container's are by their
cgroup.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ddpjob.core import names
from ddpjob.core.times import format_time
from ddpjob.local.translate import Command

MARK = "DDPJOB_POD_UID"
TAIL_BYTES = 2048
"""What a kubelet keeps of the log as termination message."""

KILL_SECONDS = 10
"""For what is killed to be gone; only a process that hangs in the kernel takes longer."""

DRAIN_SECONDS = 5
"""For the last output, once everything is killed; only what escaped a pod holds its pipe open for longer."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(uid: str, session: int | None = None) -> list[psutil.Process]:
    """Every living process that was started in the pod `uid`, whoever its parent is by now.

    A process that was given a clean environment is found below one that was not, or in the agent's
    `session`.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session or process.environ().get(MARK) == uid:
                found += [process, *process.children(recursive=True)]
    return _living(found)


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    living = []
    for process in dict.fromkeys(processes):
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


class LocalPod:
    """A pod of this machine. `body` is what a cluster would show of it; `changed` is called when that changes."""

    def __init__(self, body: dict[str, Any], uid: str, changed: Callable[[], None]) -> None:
        self.body, self.uid = body, uid
        body["metadata"]["uid"] = uid
        body["spec"]["nodeName"] = socket.gethostname()
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._known: set[psutil.Process] = set()
        self._tail = b""
        self.finished = asyncio.Event()

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    async def run(self, command: Command, log: Path, on_line: Callable[[str], None]) -> None:
        """From start to end; every line of output goes to `log` and to `on_line`. Whatever goes wrong ends the pod."""
        try:
            self._end(*await self._live(command, log, on_line))
        except Exception as error:
            await asyncio.to_thread(self.kill)
            self._end(128, _sentence(error, command.argv[0]))
        finally:
            self.finished.set()

    async def _live(
        self, command: Command, log: Path, on_line: Callable[[str], None]
    ) -> tuple[int, str]:
        """(exit code, termination message)."""
        output, sink = os.pipe()
        try:
            self._process = await self._start(command, sink)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(sink)
        if "deletionTimestamp" in self.body["metadata"]:  # deleted while it was being started
            self._ask_to_end()
        self._set_state({"running": {"startedAt": _now()}}, "Running")
        reading = asyncio.create_task(self._read(output, log, on_line))
        code = await self._process.wait()
        await asyncio.to_thread(self.kill)  # which also closes the last writing end of the pipe
        await asyncio.wait({reading}, timeout=DRAIN_SECONDS)
        if not reading.cancel():
            reading.result()
        return (code if code >= 0 else 128 - code), self._message(command.result, code)

    def terminate(self, grace: float) -> None:
        """What deleting a pod does: SIGTERM now, SIGKILL to everything `grace` seconds later."""
        self.body["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": 0}
        self._ask_to_end()
        asyncio.get_running_loop().call_later(grace, self._kill_if_alive)

    def _ask_to_end(self) -> None:
        """SIGTERM to the agent; who is below it is remembered, for whoever it leaves behind."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(psutil.Error):
                self._known.update(psutil.Process(self._process.pid).children(recursive=True))
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to everything of the pod, until nothing is left."""
        deadline = time.monotonic() + KILL_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(
                0.02
            )  # not psutil's wait, which would take the agent's exit code from asyncio

    def _left(self) -> list[psutil.Process]:
        self._known.update(processes_of(self.uid, self._process.pid if self._process else None))
        return _living(self._known)

    def _kill_if_alive(self) -> None:
        if not self.finished.is_set():
            self.kill()

    async def _start(self, command: Command, sink: int) -> asyncio.subprocess.Process:
        for folder in command.folders:
            if not folder.exists():  # a subPath of a claim may be a file that is there
                folder.mkdir(parents=True, exist_ok=True)
        for file, text in command.files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        command.result.unlink(missing_ok=True)
        path = command.env.get("PATH", os.environ.get("PATH", os.defpath))
        here = str(
            Path(sys.executable).parent
        )  # torchrun and python of the environment that runs this
        env: Mapping[str, str] = {
            **_inherited(),
            "PYTHONUNBUFFERED": "1",
            **command.env,
            "PATH": os.pathsep.join([here, path]),
            MARK: self.uid,
        }
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=env,
            cwd=command.cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    async def _read(self, output: int, log: Path, on_line: Callable[[str], None]) -> None:
        """Lines of any length, until nobody writes any more. What nobody reads would block: an error ends the pod."""
        try:
            await self._copy(output, log, on_line)
        except Exception:
            await asyncio.to_thread(self.kill)
            raise

    async def _copy(self, output: int, log: Path, on_line: Callable[[str], None]) -> None:
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
                    on_line(_as_shown(line))
                rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]  # a progress bar may never end its line
        if rest:
            on_line(_as_shown(rest))

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

    def _set_state(self, state: Mapping[str, Any], phase: str) -> None:
        self.body["status"] = {
            "phase": phase,
            "containerStatuses": [{"name": names.TRAINER, "state": state}],
        }
        self._changed()


def _as_shown(line: bytes) -> str:
    """What a terminal shows of it in the end: a carriage return begins it anew."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _inherited() -> dict[str, str]:
    """This process's environment without what torchrun would take for its own flags or ranks."""
    reserved = (*names.RESERVED_VARIABLES, MARK)
    return {
        k: v
        for k, v in os.environ.items()
        if k not in reserved and not k.startswith((names.RESERVED_PREFIX, "DDP_"))
    }


def _sentence(error: Exception, program: str) -> str:
    """What a person can do something about: the file where one is named, else what was to be started."""
    if isinstance(error, OSError):
        return f"{error.filename or program}: {error.strerror or error}"
    return f"{program}: {error or type(error).__name__}"


def _now() -> str:
    return format_time(datetime.now(UTC))
