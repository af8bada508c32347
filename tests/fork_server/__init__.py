"""Start Python programs of tests as forks of one process, with torch and the trainer imported.

A new Python needs two to four seconds of CPU time for these imports, a fork none. The server, the
stand-in and the work of a fork are the same as for the agent in a pod (ddpjob.agent), so a fork
behaves as there: it has its own arguments, variables, folder, streams, session and signals, and its
stand-in ends as it ends. If a fork could differ from a new Python, it becomes one (`why_not`). This
is only slower. FORK_SERVER_LOG=FILE collects these programs with the reasons.

A fork ends without the clean-up of the interpreter, which would take a second of CPU time.
tests/trainer/test_fork_server.py compares both ways.
"""

import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ddpjob.agent import SOCKET

HERE = Path(__file__).parent
OPERATOR = HERE.parents[1] / "operator"


class ForkServer:
    """A server for forks with these variables, and the program to start in place of Python."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        folder = Path(self._folder.name)
        self.python = folder / "python"
        stand_in = [sys.executable, "-IS", HERE / "stand_in.py", OPERATOR, folder]
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, stand_in))} "$@"\n')
        self.python.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / SOCKET))
            server.listen()
            # It ends when this process has ended.
            self.process = subprocess.Popen(
                [sys.executable, str(HERE), str(server.fileno())],
                env={**environment, "PYTHONPATH": ""},
                pass_fds=[server.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Ctrl-C is for the tests. They then close the server.
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server and its forks."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()
