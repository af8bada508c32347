"""Say why an attempt has ended, from the exit codes and the last lines of its processes."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import EXCEPTION
from .files import read_json
from .output import TRACEBACK, Stream, log

Report = dict[str, Any]

# Bytes of a termination message, which is the kubelet's limit, and of the job's result in it.
MESSAGE = 4096
RESULT = MESSAGE - 200

# Limits of a report: lines of output, and characters of each line.
LINES, LINE_LENGTH = 12, 160

# Exit codes of a process that was told to stop, and those that say nothing about the cause without
# an exception.
INTERRUPTED, AMBIGUOUS = (-15, 143), (1, -6)

# Seconds that a process may take to end after its exception: torch stops its threads and frees
# devices. A peer may notice the loss, and end, before that. torchrun then sends SIGTERM to the
# others, and what they write from then on has that cause.
ENDING_SECONDS = 10.0

# The lines of a traceback between its header and its exception, and how many lines the exception
# may have. torch puts the rank before each line. An exception group has a line at its left.
FRAME = re.compile(r"(?:\[rank\d+\]: )?[ \t]")
EXCEPTION_LINE = re.compile(
    r"(?:\[rank\d+\]: )?(?!SystemExit|KeyboardInterrupt)([A-Za-z_][\w.<>]*(?::.*)?)$"
)
EXCEPTION_LINES = 25

# The exit code of Python after an exception.
EXCEPTION_CODE = 1

# Causes, the likeliest first. A follower lost a peer. Unclear: perhaps it is a follower.
CAUSES = ("Failure", "Unclear", "Follower")

# A stack of faulthandler. No thread is the current one if all wait, as in a stopped process; then
# the last one is the main thread.
STACK = re.compile(r"(Current thread|Thread) [^\n]*\n((?:  File [^\n]*\n?)+)")


class Judge:
    """What the words of error messages say about the cause of an end.

    - `words`: a file with patterns, by what they say.
    - `patience`: seconds after the first failure until torchrun sends SIGKILL to the other workers.
    """

    def __init__(self, words: bytes, patience: float) -> None:
        self.words = {
            kind: [re.compile(pattern) for pattern in patterns]
            for kind, patterns in read_json(words).items()
        }
        self.patience = patience - 1.0

    def judge(self, code: int, streams: list[Stream], record: Report) -> Report:
        """Return the report on a torchrun that has failed, from its exit code and its record.

        Of several failures, the likeliest cause counts.
        """
        begun = [stream for stream in streams if stream.worker]
        failures = record.get("failures", [])
        ends = [streams[failure["localRank"]] for failure in failures]
        found = []
        for failure in failures:
            stream = streams[failure["localRank"]]
            cause, exception = self.cause(stream.text(), failure["exitCode"])
            first = min(ends, key=lambda end: end.ended or 0.0)
            if self.was_stopped(failure["exitCode"], stream, first):
                own = own_exception(stream, failure["exitCode"], first)
                if cause != "Follower" and own:
                    failure = {**failure, "exitCode": EXCEPTION_CODE}
                    exception = own
                else:
                    cause = "Follower"
            exception = exception or failure["exception"] or signal_name(failure["exitCode"])
            report = {"cause": cause, **failure, "exception": exception}
            found.append((CAUSES.index(cause), stream.ended, failure["rank"], report, stream))
        if not found:
            # torchrun itself failed, or the program is another one and writes no record.
            stream = min(begun, key=lambda rank: rank.ended or 0.0, default=streams[-1])
            cause, exception = self.cause(record.get("error") or stream.text(), code)
            if code in INTERRUPTED:
                cause = "Follower"
            report = {"cause": cause, "exitCode": code, "exception": exception or signal_name(code)}
            found.append((0, stream.ended, 0, report, stream))
        _, ended, _, report, stream = min(found, key=lambda entry: entry[:3])
        lines = [line[:LINE_LENGTH] for line in stream.text().splitlines() if line.strip()]
        return {**report, "time": ended, "lines": lines[-LINES:]}

    def cause(self, text: str, exit_code: int) -> tuple[str, str]:
        """Return (cause, exception) of a process, from the end of its output."""
        found = [pattern.findall(text) for pattern in self.words.get("exception", [])]
        exception = next((matches[-1].strip()[:EXCEPTION] for matches in found if matches), "")
        if self.says("follower", text):
            return "Follower", exception
        if self.says("unclear", text) or (exit_code in AMBIGUOUS and not exception):
            return "Unclear", exception
        return "Failure", exception

    def was_stopped(self, exit_code: int, stream: Stream, first: Stream) -> bool:
        """Return True if torchrun has stopped a rank after the end of the first one."""
        is_late = (stream.ended or 0.0) - (first.ended or 0.0) > self.patience
        return exit_code in INTERRUPTED or (exit_code == -9 and is_late)

    def hang(self, age: float, ranks: list[Stream]) -> Report:
        """Return the report on ranks that gave no heartbeat for `age` seconds, with their stacks.

        It names the rank that is furthest behind, if a rank has written which one that is.
        """
        lines = []
        behind = []
        each = max(1, LINES // max(1, len(ranks)))
        for stream in ranks:
            text = stream.text()
            frames = stack_in(text) or ["no stack"]
            rank = stream.worker.get("rank")
            lines += [f"rank {rank}: {frame.strip()}"[:LINE_LENGTH] for frame in frames[:each]]
            behind += [
                found for words in self.words.get("behind", []) for found in words.findall(text)
            ]
        exception = "; ".join([f"no heartbeat for {age:.0f} s", *behind[-1:]])
        return {"cause": "Hang", "exception": exception, "lines": lines[:LINES]}

    def says(self, kind: str, text: str) -> bool:
        return any(pattern.search(text) for pattern in self.words.get(kind, []))


def own_exception(stream: Stream, exit_code: int, first: Stream) -> str:
    """Return the exception of which a rank was about to end when the first one ended, or ""."""
    began = stream.traceback_time
    # A rank that has handled SIGTERM may have written because of it.
    handled = exit_code != -signal.SIGTERM
    is_earlier = began < first.open_at or (not handled and began <= (first.ended or 0.0))
    if not is_earlier or first.open_at - began >= ENDING_SECONDS:
        return ""
    _, _, rest = stream.text().rpartition(TRACEBACK.decode() + "\n")
    lines = [line for line in rest.splitlines() if not FRAME.match(line)]
    if not lines:
        # The traceback of a group, or the rank was stopped while it wrote.
        return "an exception"
    # Figures of a later step: the program has caught the exception.
    goes_on = len(lines) > EXCEPTION_LINES or any(line.startswith("{") for line in lines)
    found = EXCEPTION_LINE.match(lines[0])
    return found[1][:EXCEPTION] if found and not goes_on else ""


def signal_name(exit_code: int) -> str:
    """Return the name of the signal that ended a process, or an empty string."""
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return ""


def stack_in(text: str) -> list[str]:
    """Return the frames of the thread that was interrupted, the innermost first."""
    stacks = STACK.findall(text)
    current = [frames for kind, frames in stacks if kind != "Thread"]
    chosen = current or [frames for _, frames in stacks]
    return chosen[-1].splitlines() if chosen else []


def on_success(result: bytes) -> Report:
    """Return the report on an attempt that succeeded, with the result that a rank has written."""
    found = read_json(result)
    size = len(json.dumps(found))
    if size > RESULT:
        log(f"DDP_RESULT_FILE has {size} bytes as JSON; {RESULT} are the limit")
        found = {}
    return {"cause": "Succeeded", "result": found}


def write(path: str, report: Report) -> None:
    """Write the termination message. A pod without it still has its exit code."""
    with suppress(OSError):
        Path(path).write_text(as_message(report))


def as_message(report: Report) -> str:
    """Return a report as a termination message. If it is too long, lines are left out first."""
    report = {"agent": 1, **report}
    if not report.get("steps"):
        report.pop("steps", None)
    while len(text := json.dumps(report)) > MESSAGE and report.get("lines"):
        report["lines"] = report["lines"][1:]
    if len(text) > MESSAGE and report.pop("steps", None):
        text = json.dumps(report)
    if len(text) > MESSAGE:
        known = ("agent", "attempt", "cause", "rank", "exitCode", "time")
        short = {name: report[name] for name in known if name in report}
        text = json.dumps({**short, "exception": report.get("exception", "")[:200]})
    return text
