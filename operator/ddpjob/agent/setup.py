"""The setup of a job: a shell text that a pod runs once, before torch is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from . import EXCEPTION
from .files import files_below
from .options import Options
from .output import Output, Stream, log
from .processes import start
from .report import Report, last_line, with_lines


class Setup:
    """The setup of one pod.

    - `is_over`: it has succeeded, or the job has none.
    - `added`: the files that it has added to the working directory with the job's code. They stay
      there for all attempts of the pod.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.is_over = options.setup is None
        self.process: subprocess.Popen[bytes] | None = None
        self.added: set[str] = set()

    def start(self, environment: Mapping[str, str], output: Output) -> None:
        """Start a shell, which ends at the first command that fails."""
        log("setup begins")
        self.ends = time.monotonic() + self.options.setup_seconds
        self.sent = self.files()
        # `pip` and `python` are those of the Python that runs the workers.
        python = environment.get("PYTHON_EXEC", sys.executable)
        path = os.pathsep.join([os.path.dirname(python), environment.get("PATH", os.defpath)])
        command = ["/bin/sh", "-ec", str(self.options.setup)]
        # After an error, pip would end with a notice of its new version, which is no reason.
        defaults = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.process = start(command, {**defaults, **environment, "PATH": path}, output)

    @property
    def code(self) -> int | None:
        """Return the exit code of the shell, or None while it runs."""
        return self.process.returncode if self.process else None

    def runs(self) -> bool:
        """Return True while the shell runs and its time is not over."""
        return self.code is None and time.monotonic() < self.ends

    def conclude(self, code: int | None, stream: Stream) -> Report | None:
        """Return the report if the setup has failed. Without a code, its time was over."""
        if code == 0:
            log("setup has ended")
            self.is_over = True
            self.added = self.files() - self.sent
            return None
        words = last_line(stream.text())
        if code is None:
            limit = f"not over after {self.options.setup_seconds:.0f} s"
            code, words = -signal.SIGKILL, f"{limit}; its last line: {words}" if words else limit
        report = {"cause": "SetupFailed", "exitCode": code, "exception": words[:EXCEPTION]}
        return with_lines(report, stream)

    def files(self) -> set[str]:
        """Return the files of the working directory, if each attempt gets a fresh one."""
        return files_below(".") if self.options.code else set()
