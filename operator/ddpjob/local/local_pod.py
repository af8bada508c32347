"""A pod of this machine: one process group, its output and its end, as a kubelet handles them.

A probe asks the pod's agent whether its workers have met. An assignment is written into a file.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from ddpjob.core.api import names
from ddpjob.core.api.times import format_time
from ddpjob.core.observe.agent_state import AgentState, read_state
from ddpjob.core.observe.pods import grace_of
from ddpjob.local import processes
from ddpjob.local.environment import create_environment
from ddpjob.local.output import Output
from ddpjob.local.run_files import write_whole
from ddpjob.local.translate import Command

# Seconds for killed processes to end. Only a process hanging in the kernel takes longer.
KILL_SECONDS = 10
KILL_INTERVAL = 0.02

# Seconds for the last output after all processes were killed. Only an escaped process of the pod
# holds the pipe open for longer.
DRAIN_SECONDS = 5

# Exit code of a container after a failed start.
CANNOT_START = 128

# The exit code of a process ended by a signal is the sum of this and the signal's number.
SIGNAL_BASE = 128

# Longest termination message read by a kubelet from a container's file, in characters.
MAX_MESSAGE = 4096

# Seconds between two probes, and for the answer to one.
PROBE_INTERVAL = 0.2
PROBE_TIMEOUT = 1.0

# Seconds between two questions for an agent's state, and until an answer is too old.
QUESTION_INTERVAL = 10.0
FRESH = 15.0


class LocalPod:
    """A pod of this machine.

    `body` is the pod as an API server would show it. `changed` is called when its status changes.
    `port` is the port of its agent.
    """

    def __init__(self, body: dict[str, Any], changed: Callable[[], None], port: int = 0) -> None:
        self.body = body
        self._port = port
        self._assignment: Path | None = None
        # The last answer of its agent with its time, and the time of the last question.
        self._answer: tuple[AgentState | None, float] = (None, float("-inf"))
        self._asked = float("-inf")
        self.finished = asyncio.Event()
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._known: set[psutil.Process] = set()

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def grace(self) -> int:
        """Return the pod's own grace period in seconds."""
        return grace_of(self.body["spec"])

    async def run(self, command: Command, output: Output) -> None:
        """Run a command from its start to its end. An error of any kind ends the pod."""
        try:
            code = await self._run(command, output)
            self._set_ended(code, _termination_message(command.message, code, output))
        except Exception as error:
            await asyncio.to_thread(self.kill)
            self._set_ended(CANNOT_START, _describe(error, command.argv[0]))
        finally:
            self.finished.set()

    async def _run(self, command: Command, output: Output) -> int:
        """Return the exit code."""
        # Start the agent with a pipe for its output and its errors.
        read_end, write_end = os.pipe()
        try:
            self._process = await self._start(command, write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        # The pod may have been deleted while its agent was being started.
        if "deletionTimestamp" in self.body["metadata"]:
            self._send_sigterm()
        self._set_state({"running": {"startedAt": _now()}}, "Running")
        if command.environment:
            self._set_started(False)
        probing = asyncio.create_task(self._probe())
        # Wait for the agent alone. Processes left behind by it must not keep the pod alive.
        reading = asyncio.create_task(self._read(output, read_end))
        try:
            code = await self._process.wait()
        finally:
            probing.cancel()
        # Killing the rest closes the last writing end of the pipe.
        await asyncio.to_thread(self.kill)
        await asyncio.wait({reading}, timeout=DRAIN_SECONDS)
        if reading.done():
            reading.result()
        else:
            reading.cancel()
        return code if code >= 0 else SIGNAL_BASE - code

    async def _start(self, command: Command, output: int) -> asyncio.subprocess.Process:
        _prepare_files(command)
        if command.environment:
            await asyncio.to_thread(create_environment, command.environment)
        self._assignment = command.assignment
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=self._environment(command),
            cwd=command.cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    def _environment(self, command: Command) -> Mapping[str, str]:
        # torchrun and python must come from the environment of this process, or from the one for
        # the setup.
        own = command.environment
        own_folder = str(own / "bin" if own else Path(sys.executable).parent)
        of_environment = {"VIRTUAL_ENV": str(own)} if own else {}
        path = command.env.get("PATH", os.environ.get("PATH", os.defpath))
        return {
            **processes.inherited_environment(),
            "PYTHONUNBUFFERED": "1",
            **of_environment,
            **command.env,
            "PATH": os.pathsep.join([own_folder, path]),
            processes.POD_UID: self.uid,
        }

    async def _read(self, output: Output, read_end: int) -> None:
        """Copy the output. After a failure, kill the pod: a full pipe would block its processes."""
        try:
            await output.copy(read_end)
        except Exception:
            await asyncio.to_thread(self.kill)
            raise

    # Attempts

    def assign(self, attempt: int, assignment: str, ready_since: str | None) -> None:
        """Give the pod's agent the assignment of another attempt."""
        metadata = self.body["metadata"]
        metadata["labels"][names.LABEL_ATTEMPT] = str(attempt)
        metadata["annotations"][names.ANNOTATION_ASSIGNMENT] = assignment
        if ready_since is not None:
            metadata["annotations"][names.ANNOTATION_READY_BEFORE] = ready_since
        if self._assignment:
            write_whole(self._assignment, assignment)
        self._changed()

    async def _probe(self) -> None:
        """Set the condition Ready by the agent's answers, until the task is cancelled.

        If the pod runs a setup, wait for the end of the setup first.
        """
        while self._port and self._trainer.get("started") is False:
            if (await self._ask_agent(names.STARTED_PATH))[0]:
                self._set_started(True)
            await asyncio.sleep(PROBE_INTERVAL)
        is_ready = False
        while self._port:
            answer, _ = await self._ask_agent()
            if answer != is_ready:
                is_ready = answer
                # Two changes may fall into the same second.
                moment = datetime.now(UTC).isoformat()
                condition = {
                    "type": "Ready",
                    "status": str(is_ready),
                    "reason": "Probe",
                    "lastTransitionTime": moment,
                }
                self.body["status"]["conditions"] = [condition]
                self._trainer["ready"] = is_ready
                self._changed()
            await asyncio.sleep(PROBE_INTERVAL)

    @property
    def _trainer(self) -> dict[str, Any]:
        """Return the status of the container `trainer`."""
        found: dict[str, Any] = self.body["status"]["containerStatuses"][0]
        return found

    def _set_started(self, has_started: bool) -> None:
        self._trainer["started"] = has_started
        self._changed()

    async def _ask_agent(self, path: str = "/ready") -> tuple[bool, bytes]:
        """Return whether the agent has answered with 200, and the body of its answer."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                with contextlib.closing(writer):
                    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                    return b" 200 " in head.partition(b"\r\n")[0], body
        except (OSError, TimeoutError, ValueError):
            return False, b""

    async def ask_state(self) -> None:
        """Ask the agent for its state, at most every QUESTION_INTERVAL seconds."""
        if time.monotonic() - self._asked < QUESTION_INTERVAL:
            return
        self._asked = time.monotonic()
        _, body = await self._ask_agent(names.STATE_PATH)
        self._answer = read_state(body), time.monotonic()
        self._changed()

    @property
    def state(self) -> AgentState | None:
        """Return the agent's answer, or None if it is too old."""
        state, answered = self._answer
        return state if time.monotonic() - answered < FRESH else None

    # End

    def terminate(self, grace: float) -> None:
        """Delete the pod: send SIGTERM now, and SIGKILL to all its processes after `grace` seconds.

        As in a cluster, only the agent gets the SIGTERM.
        """
        # As in a cluster, the timestamp is the end of the grace period.
        deadline = datetime.now(UTC) + timedelta(seconds=grace)
        self.body["metadata"] |= {
            "deletionTimestamp": format_time(deadline),
            "deletionGracePeriodSeconds": max(1, round(grace)),
        }
        self._send_sigterm()
        asyncio.get_running_loop().call_later(grace, self._kill_unless_finished)

    def _send_sigterm(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        # Remember the agent's children. Once it has ended, they can no longer be found below it.
        with contextlib.suppress(psutil.Error):
            agent = psutil.Process(self._process.pid)
            self._known.update(agent.children(recursive=True))
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def _kill_unless_finished(self) -> None:
        if not self.finished.is_set():
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all processes of the pod until none is left."""
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            remaining = self._find_processes()
            if not remaining:
                return
            processes.kill(remaining)
            # psutil.wait_procs would take the agent's exit code away from asyncio.
            time.sleep(KILL_INTERVAL)

    def _find_processes(self) -> list[psutil.Process]:
        session = self._process.pid if self._process else None
        self._known.update(processes.find_processes(self.uid, session))
        return processes.living(self._known)

    # Status

    def _set_ended(self, code: int, message: str) -> None:
        state = {"terminated": {"exitCode": code, "message": message, "finishedAt": _now()}}
        self._set_state(state, "Failed" if code else "Succeeded")

    def _set_state(self, state: Mapping[str, Any], phase: str) -> None:
        containers = [{"name": names.TRAINER, "state": state, "ready": False}]
        self.body["status"] = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "containerStatuses": containers,
        }
        self._changed()


def _prepare_files(command: Command) -> None:
    for folder in command.folders:
        # A subPath of a claim may be an existing file.
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
    for file, content in command.files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    command.message.unlink(missing_ok=True)


def _termination_message(message: Path, code: int, output: Output) -> str:
    """Return the message written by the process, else the end of its output if it failed."""
    with contextlib.suppress(OSError):
        written = message.read_text(errors="replace")[:MAX_MESSAGE]
        if written:
            return written
    return output.tail if code else ""


def _describe(error: Exception, program: str) -> str:
    """Return an error with the name of its file, or with the name of the program."""
    if isinstance(error, OSError):
        return f"{error.filename or program}: {error.strerror or error}"
    return f"{program}: {error or type(error).__name__}"


def _now() -> str:
    return format_time(datetime.now(UTC))
