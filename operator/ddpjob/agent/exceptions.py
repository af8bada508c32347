"""Find the last exception in the output of a process, as Python prints it.

It may be of any class and of any length. Its beginning is kept apart from the end of the output.
"""

from __future__ import annotations

import re
import traceback

from . import EXCEPTION

# The beginning of a traceback. That of an exception group ends so, too.
HEADER = b"Traceback (most recent call last):"

# The mark put before each line by torch, the first line of a traceback, and the left side of its
# lines until the exception.
RANK = re.compile(r"\[rank\d+\]: ?")
BEGIN = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
MARGIN, GROUP_MARGIN = "", "  | "

# In the message of an exception that torch brings from another process or thread, such as a worker
# of DataLoader. The exception itself follows.
ORIGINAL = re.compile(r"Original Traceback \(most recent call last\):$")

# The text before a traceback that does not end the process.
ASIDE = re.compile(r"Exception ignored in|Exception in thread|Error in (?:atexit|sys\.)")

# The first line of an exception, and the exceptions that end a program without a traceback.
FIRST_LINE = re.compile(r"[A-Za-z_][\w.<>]*(?::.*)?$")
NO_ERROR = re.compile(r"(SystemExit|KeyboardInterrupt)\b")

# Characters kept from the first line on, and the most lines after it. A message may have several
# lines, and programs write while they end. After more lines, or figures, the program has gone on:
# it has caught the exception.
WORDS, FOLLOWING = 4096, 1000

# Characters of the line before a traceback.
LINE = 300


class LastException:
    """The last exception printed by a process.

    - `text`: its first line, and the second one if the first line ends with a colon. It is empty
      until the first line is there.
    - `words`: its first line and the ones after it.
    - `time`: when its traceback began, a Unix time, or 0 if there is none.
    - `following`: the number of lines after the first one. `goes_on`: the process has done
      something else since then.
    """

    def __init__(self) -> None:
        self._before = ""
        self._begin(MARGIN, 0.0)

    def _begin(self, margin: str, now: float) -> None:
        self.text = self.words = ""
        self.time = now
        self.goes_on = False
        self.following = 0
        # The beginning of the lines of its traceback, or None once its first line is found.
        self._margin: str | None = margin

    def take(self, lines: bytes, now: float) -> None:
        """Look at complete lines, written by the process before `now`, a Unix time."""
        if HEADER in lines or self.counts:
            for line in lines.decode(errors="replace").splitlines():
                line = RANK.sub("", line, count=1)
                self._take_line(line, now)
                self._before = line
        else:
            self._before = lines[-LINE:].decode(errors="replace").rstrip("\n").rpartition("\n")[2]

    @property
    def counts(self) -> bool:
        """True if the process may end by it."""
        return bool(self.time) and not self.goes_on

    def _take_line(self, line: str, now: float) -> None:
        begin = BEGIN.match(line)
        if begin and not ASIDE.match(RANK.sub("", self._before, count=1)):
            self._begin(GROUP_MARGIN if begin[1] else MARGIN, now)
        elif self._margin is not None:
            found = line[len(self._margin) :] if line.startswith(self._margin) else ""
            # Another thread may write between the lines of a traceback.
            if NO_ERROR.match(found):
                self.time = 0.0
            elif FIRST_LINE.match(found):
                self.text, self.words, self._margin = found[:EXCEPTION].strip(), found, None
        elif self.time:
            self._follow(line)

    def _follow(self, line: str) -> None:
        """Look at a line after the first one of the exception."""
        if ORIGINAL.match(line):
            self._margin = MARGIN
        if self.text.endswith(":") and line.strip():
            self.text = f"{self.text} {line.strip()}"[:EXCEPTION]
        self.words = f"{self.words}\n{line}"[:WORDS]
        self.following += bool(line.strip())
        self.goes_on = self.following > FOLLOWING or line.startswith("{")


def first_line(error: BaseException) -> tuple[str, str]:
    """Return (text, words) of an exception, as they are found in what Python prints."""
    found = LastException()
    lines = traceback.format_exception_only(type(error), error)
    found.take(b"\n".join([HEADER, "".join(lines).encode(errors="replace")]), 1.0)
    return found.text, found.words
