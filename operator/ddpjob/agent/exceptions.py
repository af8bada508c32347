"""Find the last exception, of any class and length, in the output of a process."""

import re
import traceback
from contextlib import suppress

from . import EXCEPTION

# The beginning of a traceback. That of an exception group ends so, too.
HEADER = b"Traceback (most recent call last):"

# torch's mark before each line, the first line of a traceback, and the left side of its lines.
RANK = re.compile(r"\[rank\d+\]: ?")
# It may follow a progress bar, or be in a message. It may not be within a group.
BEGIN = re.compile(r"(?:  \+ Exception Group |(?!\s*[|+]).*)?Traceback \(most recent call last\):$")
# One of the next lines. If all have the prefix of a log, the process has caught the exception.
FRAME = re.compile(r"(?:  |> )File ")
NEXT = 4
# The margin of a group's own lines.
MARGIN = re.compile(r"^  \| ")

# The text before a traceback that does not end the process.
ASIDE = re.compile(
    r"Exception ignored in|Exception in thread|Error in (?:atexit|sys\.)|Process \S+:$"
)

# Between the tracebacks of a chain.
CHAIN = re.compile("The above exception was the|During handling of the above")

# The first line of an exception, and the exceptions that end a program without a traceback.
FIRST_LINE = re.compile(r"[^\W\d][\w.<>]*(?::.*)?$")
NO_ERROR = re.compile(r"(SystemExit|KeyboardInterrupt)\b")

# Characters kept from the first line on, and the most lines after it. After more lines, or figures,
# the program has caught the exception.
WORDS = 4096
FOLLOWING = 1000
FIGURES = re.compile(r"""\{.*"(?:step|epoch|loss)":""")

# Characters of the line before a traceback.
LINE = 300


class LastException:
    """The last exception printed by a process.

    - `text`: its first line, and the second one if the first line ends with a colon.
    - `words`: its first line and the ones after it, below those of the exceptions that led to it.
    - `time`: when its traceback began, a Unix time, or 0 if there is none.
    - `following`: the number of lines after the first one. `goes_on`: the process has done
      something else since then.
    """

    def __init__(self) -> None:
        self._before = ""
        self._left = 0
        self._chain = ""
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self.text = ""
        # An exception in a handler often hides the words of a lost peer.
        self.words = self._chain
        self.time = now
        self.goes_on = False
        self.following = 0

    def take(self, lines: bytes, now: float) -> None:
        """Look at complete lines, written before `now`, a Unix time."""
        if HEADER not in lines and not self.counts and self._left <= 0:
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

    def _take_line(self, line: str, now: float) -> None:
        if BEGIN.match(line):
            self._left = 0 if ASIDE.match(self._before) else NEXT
            return
        line = MARGIN.sub("", line)
        self._left -= 1
        if self._left >= 0 and FRAME.match(line):
            self._begin(now)
            self._left = 0
        elif self.text:
            self._follow(line)
        else:
            self._find_first_line(line)

    def _find_first_line(self, line: str) -> None:
        if NO_ERROR.match(line):
            self.time = 0.0
        elif FIRST_LINE.match(line):
            self.text = line[:EXCEPTION].strip()
            self.words = f"{self.words}\n{line}".lstrip()

    def _follow(self, line: str) -> None:
        if self.text.endswith(":") and line.strip():
            self.text = f"{self.text} {line.strip()}"[:EXCEPTION]
        self.words = f"{self.words}\n{line}"[:WORDS]
        if line.strip():
            self.following += 1
            self._chain = self.words[: WORDS // 4] if CHAIN.match(line) else ""
        self.goes_on = self.following > FOLLOWING or bool(FIGURES.match(line))


def without_rank(line: str) -> str:
    return RANK.sub("", line, count=1)


def first_line(error: BaseException) -> tuple[str, str]:
    """Return (text, words) of a raised exception, as they are found in what Python prints."""
    found = LastException()
    last = traceback.format_exception_only(type(error), error)[-1].partition("\n")[0]
    # A loader of the program may raise.
    with suppress(Exception):
        printed = traceback.format_exception(type(error), error, error.__traceback__)
        found.take("".join(printed).encode(errors="replace"), 1.0)
    text = found.text or last[:EXCEPTION]
    return "" if NO_ERROR.match(text) else text, found.words or text
