"""Run the setup of a job: a shell text, run once in a pod before torch is imported."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from . import EXCEPTION
from .files import paths_below
from .message import Report
from .options import Options
from .output import Output, Stream, log
from .place import WORK, keep_setup
from .processes import Process, start
from .report import last_line, with_lines

# Comments of pip after an error.
COMMENT = re.compile(r"^\s*(\[notice\]|note:|hint:).*", re.MULTILINE)


class Setup:
    """The setup of one pod.

    - `is_over`: it has succeeded, or the job has none.
    - `added`: its new paths in the working directory; None before its end.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.is_over = options.setup is None
        self.process: Process | None = None
        self.added: set[str] | None = None

    def start(self, env: Mapping[str, str], output: Output) -> None:
        """Start a shell. It ends at the first failed command."""
        log("setup begins")
        self.ends = time.monotonic() + self.options.setup_seconds
        self.sent = paths_below(Path(self.options.work, WORK))
        # `pip` and `python` belong to the Python of the workers.
        python = env.get("PYTHON_EXEC", sys.executable)
        path = env.get("PATH", os.defpath)
        variables = {
            **env,
            "PATH": f"{os.path.dirname(python)}:{path}",
        }
        command = ["/bin/sh", "-ec", "--", str(self.options.setup)]
        self.process = start(command, variables, output)

    @property
    def code(self) -> int | None:
        return self.process.returncode if self.process else None

    def runs(self) -> bool:
        return self.code is None and time.monotonic() < self.ends

    def conclude(self, code: int | None, stream: Stream) -> Report | None:
        """Return the report if the setup has failed. Without a code, its time was over."""
        if code == 0:
            log("setup has ended")
            self.is_over = True
            self.added = keep_setup(Path(self.options.work), self.sent)
            return None
        how = f"exit code {code}"
        if code is None:
            code = -signal.SIGKILL
            how = f"took longer than setupTimeoutSeconds={self.options.setup_seconds:g}"
        words = last_line(COMMENT.sub("", stream.text()))
        report = {
            "cause": "SetupFailed",
            "exitCode": code,
            "exception": f"{words[:EXCEPTION]} ({how})" if words else how,
        }
        return with_lines(report, stream)
