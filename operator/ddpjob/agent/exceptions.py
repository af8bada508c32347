"""Find the last exception in the output of a process, as Python prints it.

It may be of any class and of any length. Its beginning is kept apart from the end of the output.
"""

from __future__ import annotations

import re
import traceback

from . import EXCEPTION

# The beginning of a traceback. That of an exception group ends so, too.
HEADER = b"Traceback (most recent call last):"

# torch's mark before each line, the first line of a traceback, and the left side of its lines.
RANK = re.compile(r"\[rank\d+\]: ?")
# It may follow a progress bar, with or without the mark. It may not be that of an exception within
# a group, in a message, or behind the prefix of a log.
BEGIN = re.compile(
    r"(?:(  \+ Exception Group )|(?!\s*[|+])(?:.*\[rank\d+\]: |.*(?<![\]:] )(?<!Original )))?"
    r"Traceback \(most recent call last\):$"
)
MARGIN = ""
GROUP_MARGIN = "  | "

# In the message of an exception that torch brings from another process or thread, such as a worker
# of DataLoader. The exception itself follows.
ORIGINAL = re.compile(r"Original Traceback \(most recent call last\):$")

# The text before a traceback that does not end the process.
ASIDE = re.compile(r"Exception ignored in|Exception in thread|Error in (?:atexit|sys\.)")

# The first line of an exception, and the exceptions that end a program without a traceback.
FIRST_LINE = re.compile(r"[^\W\d][\w.<>]*(?::.*)?$")
NO_ERROR = re.compile(r"(SystemExit|KeyboardInterrupt)\b")

# Characters kept from the first line on, and the most lines after it: of its message, and of a
# program that ends. After more lines, or figures, the program has caught the exception.
WORDS = 4096
FOLLOWING = 1000
FIGURES = re.compile(r"""\{.*"(?:step|epoch|loss)":""")

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
        self.text = ""
        self.words = ""
        self.time = now
        self.goes_on = False
        self.following = 0
        # The beginning of the lines of its traceback, or None once its first line is found.
        self._margin: str | None = margin

    def take(self, lines: bytes, now: float) -> None:
        """Look at complete lines, written before `now`, a Unix time."""
        if HEADER not in lines and not self.counts:
            end = lines[-LINE:].decode(errors="replace")
            _, _, last = end.rstrip("\n").rpartition("\n")
            self._before = without_rank(last)
            return
        for marked in lines.decode(errors="replace").splitlines():
            line = without_rank(marked)
            self._take_line(line, now)
            self._before = line

    @property
    def counts(self) -> bool:
        """True if the process may end by it."""
        return bool(self.time) and not self.goes_on

    def take_message(self, text: str) -> None:
        """Look at an exception and its message, without a traceback before it."""
        self._begin(MARGIN, 1.0)
        for line in text.splitlines():
            if self._margin is None:
                self._follow(line)
            else:
                self._find_first_line(line)

    def _take_line(self, line: str, now: float) -> None:
        begin = BEGIN.match(line)
        if begin and not ASIDE.match(self._before):
            self._begin(GROUP_MARGIN if begin[1] else MARGIN, now)
        elif self._margin is None:
            self._follow(line)
        # Another thread may write between the lines of a traceback.
        elif line.startswith(self._margin):
            self._find_first_line(line[len(self._margin) :])

    def _find_first_line(self, line: str) -> None:
        if NO_ERROR.match(line):
            self.time = 0.0
        elif FIRST_LINE.match(line):
            self.text = line[:EXCEPTION].strip()
            self.words = line
            self._margin = None

    def _follow(self, line: str) -> None:
        if ORIGINAL.match(line):
            self._margin = MARGIN
        if self.text.endswith(":") and line.strip():
            self.text = f"{self.text} {line.strip()}"[:EXCEPTION]
        self.words = f"{self.words}\n{line}"[:WORDS]
        if line.strip():
            self.following += 1
        self.goes_on = self.following > FOLLOWING or bool(FIGURES.match(line))


def without_rank(line: str) -> str:
    return RANK.sub("", line, count=1)


def first_line(error: BaseException) -> tuple[str, str]:
    """Return (text, words) of an exception, as they are found in what Python prints."""
    found = LastException()
    found.take_message("".join(traceback.format_exception_only(type(error), error)))
    return found.text, found.words
