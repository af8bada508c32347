"""A pod of the agent alone: the tests write its assignments, and read its log and its message."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ddpjob.core.agent_files import WORDS, agent_files

# Longest wait for anything in these tests, in seconds. Other tests may use the processors.
DEADLINE = 120.0

TORCHRUN = [sys.executable, str(Path(__file__).parent / "fake_torchrun.py")]


def agent_options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the options of an agent with its program and all its files in `folder`."""
    return {
        "folder": str(folder / "run"),
        "assignment": str(folder / "assignment"),
        "words": str(folder / "agent" / WORDS),
        "message": str(folder / "message"),
        "clear": None,
        "work": str(folder),
        "code": None,
        "setup": None,
        "setup_seconds": 1800,
        "own_files": False,
        "own_ipc": False,
        "state_path": "/state/uid-of-job/0",
        "port": None,
        "command": None,
        "flags": [],
        "hang_seconds": None,
        "first_seconds": None,
        "heartbeat": "File",
        "fast_start": False,
        **changes,
    }


class Pod:
    """A container with the agent as process 1.

    - `script`: the Python code of the workers.
    - `options`: of the agent, in addition to its files. `command`: in place of torchrun.
    """

    def __init__(
        self,
        folder: Path,
        script: str = "",
        *,
        command: Sequence[str] = TORCHRUN,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.programs = folder / "agent"
        self.programs.mkdir(exist_ok=True)
        for name, text in agent_files().items():
            if name == "suspicion.py":
                # The waits for other pods.
                text = shortened(text, "ORDER_SECONDS = 10.0", "SILENT_SECONDS = 10.0")
            (self.programs / name).write_text(text)
        (folder / "script.py").write_text(script)
        self.options = agent_options(folder, command=command, **options)
        self.env = {"PATH": os.environ["PATH"], "TEST_POD": str(folder), **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def assign(self, number: int, ranks: int = 1, **changes: Any) -> None:
        """Write an assignment as a kubelet does: the file is replaced as a whole."""
        assignment = {
            "attempt": number,
            "start": True,
            "flags": [f"--ranks={ranks}"],
            "ranks": ranks,
            "env": {"DDP_ATTEMPT": str(number)},
            "grace": 5,
            "wait": DEADLINE,
            **changes,
        }
        file = self.folder / "assignment.new"
        file.write_text(json.dumps(assignment))
        file.rename(self.folder / "assignment")

    def start(self, *prefix: str, **settings: Any) -> "Pod":
        """Start the agent. Its output goes into a file."""
        arguments = [json.dumps(self.options), str(self.folder / "script.py")]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-IS", str(self.programs), "agent", *arguments],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **settings,
            )
        return self

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "message").read_text())
        return found

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the log has the text so many times."""
        wait_until(lambda: self.log.count(text) >= times, lambda: f"{text!r} in:\n{self.log}")

    def wait_for_looks(self) -> None:
        """Wait until the agent has looked at its assignment: the seconds in /metrics have grown."""
        for _ in range(2):
            before = self.get("/metrics")
            wait_until(lambda before=before: self.get("/metrics") != before)

    def end(self) -> int:
        """Wait for the end of the container, and return its exit code."""
        assert self.process
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the container has not ended within {DEADLINE:.0f} s:\n{self.stacks()}")

    def stacks(self) -> str:
        """Let each process write its stack into the log, and return the log with their states."""
        assert self.process
        # The agent would kill the others as soon as the first one ends.
        self.process.send_signal(signal.SIGSTOP)
        found = []
        for process in self.processes():
            with suppress(OSError):
                folder = Path(f"/proc/{process}")
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{process} waits in {(folder / 'wchan').read_text()}: {words}")
                os.kill(process, signal.SIGABRT)
        wait_until(lambda: not self.processes())
        self.process.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        return "\n".join([*found, self.log])

    def terminate(self) -> None:
        """Delete the pod: process 1 gets SIGTERM."""
        assert self.process
        self.process.terminate()

    def kill(self) -> None:
        """Kill the container, and what it has left."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the processes of the pod without the agent, found by their environment."""
        mark = f"TEST_POD={self.folder}".encode()
        agent = self.process.pid if self.process else None
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    is_agent = int(folder.name) == agent
                    if mark in (folder / "environ").read_bytes() and not is_agent:
                        found.append(int(folder.name))
                except OSError:
                    pass
        return found

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of a request to the agent's port."""
        url = f"http://127.0.0.1:{self.options['port']}{path}"
        ends = time.monotonic() + DEADLINE
        while True:
            try:
                with urllib.request.urlopen(url, timeout=20) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, ""
            except http.client.RemoteDisconnected:
                # This process waited for a processor so long that the agent closed the connection.
                assert time.monotonic() < ends, "the agent closes every connection"

    def is_up(self) -> bool:
        """Return True if the agent listens on its port."""
        try:
            return self.get("/metrics")[0] == 200
        except OSError:
            return False

    def is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False


def shortened(text: str, *constants: str) -> str:
    """Return a program with these constants set to a tenth of a second."""
    for constant in constants:
        assert text.count(constant) == 1
        text = text.replace(constant, f"{constant.partition(' = ')[0]} = 0.1")
    return text


def wait_until(condition: Any, describe: Any = lambda: "") -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE:.0f} s: {describe()}"
        time.sleep(0.01)
