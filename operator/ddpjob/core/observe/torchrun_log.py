"""torchrun's failure summary, parsed from the tail of its log.

The agent of torchrun always exits with 1. The failure summary at the end of its log has the first
failed rank, its exit code and its exception. The kubelet keeps the last 2048 bytes of the log as
the pod's termination message. The times in the agent's log lines have microseconds. Those in the
summary have whole seconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ddpjob.core.observe.peer_loss import FOLLOWER, TIMED_OUT, UNCLEAR_CAUSE

RENDEZVOUS_TIMEOUT = re.compile(r"RendezvousTimeoutError|RendezvousConnectionError")

# Exit codes after SIGTERM, or of a script that handled SIGTERM. The pod was deleted or evicted, but
# the API server may not show this yet.
INTERRUPTED = (143, -15)

# Exit codes of an uncaught exception and of an abort by a watchdog. Without the exception's text
# they do not show whether the process is the cause or a follower. The summary of eight processes
# fills the whole message, so on such nodes the text is usually missing.
AMBIGUOUS = (1, -6)

# A termination message of this many bytes is the tail of a log. Its first line may be incomplete.
CUT_LENGTH = 2040

# Limits that keep parsing fast, whatever a process writes.
MAX_LINES = 400
MAX_EXCEPTION = 500
MAX_LAST_LINE = 300

ROOT_CAUSE = "Root Cause (first observed failure):"
FIELD = re.compile(r"[ \t]*(time|rank|exitcode)[ \t]+: (\S+)(.*)")
RANK = re.compile(r"[0-9]{1,9}")
EXIT_CODE = re.compile(r"-?[0-9]{1,9}")
PID = re.compile(r"\(pid: \d+\)")
AGENT_LINE = re.compile(r"^E(\d{4} \d\d:\d\d:\d\d\.\d+) .*failed \(exitcode: -?\d+\)", re.MULTILINE)

# The last line of a traceback. torch may prefix it with the rank. In torchrun's summary it is
# indented.
EXCEPTION_LINE = (
    r"(?:\[rank\d+\]:\s?)?(?P<text>(?:[A-Za-z_]\w*\.)*"
    r"[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Timeout)\b(?::.*)?)$"
)
EXCEPTION = re.compile(rf"^[ \t]*{EXCEPTION_LINE}", re.MULTILINE)

# Python's own message if it does not find the script or the module. There is no exception then.
INTERPRETER = re.compile(r"^\S*python[\d.]*: (.+)$", re.MULTILINE)

# Those of its messages that another attempt would repeat. A script may write similar lines.
SCRIPT_MISSING = re.compile(
    r"^\S*python[\d.]*: (?:can't open file |No module named |can't find '__main__' module"
    r"|Error while finding module specification )",
    re.MULTILINE,
)

# The last output of Hydra after a mistake in a configuration. It ends with advice.
HYDRA = re.compile(
    r"^((?:Could not (?:override|append|delete)|Cannot find primary|Primary config|In '.*': Could"
    r"|You must specify|Error (?:in call|instantiating|locating|merging)|Ambiguous|Missing m|Key '"
    r"|no viable|mismatched).*(?:(?<=:)\n.*)?)\n(?:.*\n){0,20}?\n"
    r"Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace\.\s*\Z",
    re.MULTILINE,
)

# The text of an uncaught C++ exception. The process then ends with SIGABRT.
WHAT = re.compile(r"^[ \t]*what\(\):[ \t]+(.+)$", re.MULTILINE)

# The last words of C and C++ before an abort: glibc's on its heap, an assertion, a check of glog.
NATIVE = re.compile(
    r"^(.*(?:free\(\): |malloc\(\): |realloc\(\): |corrupted |munmap_chunk\(\): |double free"
    r"|: Assertion `|\] ?Check failed: ).{0,300})$"
)

# The trainer's words for the rank furthest behind (ddp_trainer/ranks/stragglers.py).
BEHIND = re.compile(
    r"\brank \d+ on .{1,200}? is (?:slow or stuck|frozen or cut off)\b[^;,\n]{0,200}"
)

LAUNCHER_ERROR = re.compile(
    r"^[\w.]*(?:ChildFailedError|SignalException|Rendezvous\w*Error)\b", re.MULTILINE
)
TRACEBACK = "Traceback (most recent call last):\n  File "


@dataclass(frozen=True)
class Summary:
    """torchrun's report of the first failure on one node.

    - `time`: in the container's local time zone, read as UTC.
    - `exception`: the last line of the traceback, or the name of the signal.
    - `lost_peer`: the process lost its connection to another one.
    - `interrupted`: the process was told to stop.
    - `ambiguous`: it cannot be known whether the process is a follower.
    - `script_missing`: Python did not find the script or the module.
    - `ended_early`: the rank ended with 0 while others were still training.
    """

    rank: int
    exit_code: int
    time: datetime | None
    exception: str
    lost_peer: bool
    interrupted: bool
    ambiguous: bool
    script_missing: bool
    ended_early: bool = False

    @property
    def follower(self) -> bool:
        """True if another process is the cause."""
        return self.lost_peer or self.interrupted

    @property
    def certain(self) -> bool:
        """True if the failure is this rank's own, whatever the other nodes report."""
        return not self.follower and not self.ambiguous


def parse_summary(message: str) -> Summary | None:
    """Return torchrun's failure summary in a termination message, or None without one.

    The time is linear in the length of the message, so a process cannot make the operator slow by a
    message of its own.
    """
    before, header, after = message.rpartition(ROOT_CAUSE)
    fields = _parse_fields(after)
    rank = _field(fields, "rank")
    exit_code = _field(fields, "exitcode")
    if not header or not RANK.fullmatch(rank) or not EXIT_CODE.fullmatch(exit_code):
        return None
    # A traceback may be in the summary, after the exit code, or in the log above the summary.
    code = int(exit_code)
    code_line = fields["exitcode"]
    words = after.partition(code_line[0])[2]
    if not EXCEPTION.search(words):
        words = _lines_of_rank(rank, script_output(_complete_lines(message, before)))
    exception = _last_exception(words)
    lost_peer = bool(FOLLOWER.search(words))
    unclear = bool(UNCLEAR_CAUSE.search(words)) or (code in AMBIGUOUS and not exception)
    signal = PID.sub("", code_line[3]).strip(" ()")
    return Summary(
        rank=int(rank),
        exit_code=code,
        time=_failure_time(before, _field(fields, "time")),
        exception=exception or signal,
        lost_peer=lost_peer,
        interrupted=code in INTERRUPTED,
        ambiguous=unclear and not lost_peer,
        script_missing=has_missing_script(words),
    )


def has_missing_script(words: str) -> bool:
    """Return True if Python did not find the script or the module, by its own words."""
    return not EXCEPTION.search(words) and bool(SCRIPT_MISSING.search(words))


def _parse_fields(text: str) -> Mapping[str, re.Match[str]]:
    fields = {}
    for line in text.splitlines()[:MAX_LINES]:
        found = FIELD.match(line)
        if found:
            fields[found[1]] = found
    return fields


def _field(fields: Mapping[str, re.Match[str]], name: str) -> str:
    return fields[name][2] if name in fields else ""


def _complete_lines(message: str, text: str) -> str:
    """Return `text`, the beginning of `message`, without its first line if it may be incomplete."""
    if len(message.encode(errors="replace")) < CUT_LENGTH:
        return text
    return text.partition("\n")[2]


def script_output(text: str) -> str:
    """Return what the user's processes wrote: everything above the launcher's own traceback."""
    error = LAUNCHER_ERROR.search(text)
    if not error:
        return text
    return text[: max(0, text.rfind(TRACEBACK, 0, error.start()))]


def _lines_of_rank(rank: str, text: str) -> str:
    """Return the lines of one rank. torch marks them if the exception was not caught.

    Without marked lines of the rank, return all lines without a mark.
    """
    lines = text.splitlines()
    marked = [line for line in lines if line.startswith(f"[rank{int(rank)}]:")]
    if marked:
        return "\n".join(marked)
    return "\n".join(line for line in lines if not line.startswith("[rank"))


def _last_exception(text: str) -> str:
    patterns = (EXCEPTION, WHAT, NATIVE, INTERPRETER)
    found = next(filter(None, (pattern.findall(text) for pattern in patterns)), [])
    return str(found[-1]).strip()[:MAX_EXCEPTION] if found else ""


def _failure_time(before: str, summary_time: str) -> datetime | None:
    """Return the time of the agent's log line, or of the summary if the line was cut off.

    The log line (MMDD and microseconds) has no year, so it takes the summary's.
    """
    try:
        moment = datetime.strptime(summary_time, "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC)
        line = AGENT_LINE.search(before)
        if not line:
            return moment
        text = f"{moment.year}{line[1]}"
        return datetime.strptime(text, "%Y%m%d %H:%M:%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return None


def last_line(message: str) -> str:
    """Return the last line with text. torchrun ends its summary with a line of `=`."""
    for line in reversed(message.splitlines()):
        if line.strip(" =-"):
            return line.strip()[:MAX_LAST_LINE]
    return ""


def is_follower(message: str) -> bool:
    """Return True if a message reports the loss of a peer."""
    return bool(FOLLOWER.search(script_output(message)) or FOLLOWER.search(last_line(message)))


def has_timed_out(message: str) -> bool:
    """Return True if a message says that the process waited too long for its peer."""
    return bool(TIMED_OUT.search(script_output(message)))
