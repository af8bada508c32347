"""Find out why an attempt has ended, from the exit codes and the last output of its processes."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from . import EXCEPTION, NOTE, RECORD
from .files import read_file, read_json
from .output import Stream, log

Report = dict[str, Any]

# Bytes of a termination message (the kubelet's limit), and of the job's result in it.
MESSAGE = 4096
RESULT = MESSAGE - 200

# Optional entries of a report: they are left out if they are empty, or if the report is too long.
FIGURES = ("steps", "total", "trained")

# Limits of a report: lines of output, and characters of each line.
LINES, LINE_LENGTH = 12, 160

# Exit codes: of Python after an exception, of an aborted process, and of a process told to stop.
EXCEPTION_CODE, ABORTED, INTERRUPTED = 1, -signal.SIGABRT, (-signal.SIGTERM, 143)

# Seconds from the exception of a process to its end, at most: torch stops its threads and frees
# devices. A peer may notice the loss, and end, before that. torchrun then sends SIGTERM to the
# others, and that is the cause of their later output. So many lines may follow the exception of a
# stopped rank.
ENDING_SECONDS, EXCEPTION_LINES = 10.0, 25

# The longest time from the exception of a process to its end: it may upload its results.
EXIT_SECONDS = 120.0

# Causes, the likeliest first. A follower lost a peer. Unclear: perhaps it is a follower.
CAUSES = ("Failure", "Unclear", "Follower")

# A stack of faulthandler. No thread is the current one if all wait, as in a stopped process; then
# the last one is the main thread.
STACK = re.compile(r"(Current thread|Thread) [^\n]*\n((?:  File [^\n]*\n?)+)")

# Files of the frames below a program's own frames in its stack.
STARTERS = (f'"{os.path.dirname(os.path.abspath(__file__))}/', '"<frozen runpy>"')


class LastWords(NamedTuple):
    """The last output of a process, if it explains the end.

    - `text`: the exception that ended it, or else its last line.
    - `words`: the text to search for the words of a lost peer.
    - `is_stopped`: torchrun has ended it because of another process.
    """

    exit_code: int
    text: str = ""
    words: str = ""
    is_exception: bool = False
    is_stopped: bool = False


class Judge:
    """Judges the cause of an end by the words of error messages.

    - `words`: a file with patterns, by their meaning.
    - `patience`: seconds from the first failure until torchrun sends SIGKILL to the other workers.
    """

    def __init__(self, words: bytes, patience: float) -> None:
        self.words = {
            kind: [re.compile(pattern) for pattern in patterns]
            for kind, patterns in read_json(words).items()
        }
        # torchrun polls its workers.
        self.patience = patience - 1.0

    def judge(self, code: int, streams: list[Stream], record: Report) -> Report:
        """Return the report on a failed torchrun, from its exit code and its record.

        Of several failures, the likeliest cause counts, then the first in time, then the first in
        torchrun's record.
        """
        failures = record.get("failures", [])
        if not failures:
            return self.judge_launcher(code, streams, record)
        failed = [streams[failure["localRank"]] for failure in failures]
        first = min(failed, key=end_of)
        found = []
        for failure, stream in zip(failures, failed):
            last_words = self.last_words(stream, failure, first)
            cause = self.cause(last_words)
            exit_code = last_words.exit_code
            exception = last_words.text or failure["exception"] or signal_name(exit_code)
            report = {
                "cause": cause,
                "rank": failure["rank"],
                "localRank": failure["localRank"],
                "exitCode": exit_code,
                "exception": exception[:EXCEPTION],
            }
            found.append((CAUSES.index(cause), end_of(stream), report, stream))
        _, _, report, stream = min(found, key=lambda entry: entry[:2])
        # torchrun has found no failure of the other ranks.
        ended = [rank for rank in streams if rank.worker and rank.ended and rank not in failed]
        early = [rank for rank in ended if end_of(rank) < end_of(first)]
        if report["cause"] == "Follower" and early:
            report = {**report, "cause": "Failure", "exception": ended_early(early[0], report)}
        return with_lines(report, stream)

    def judge_launcher(self, code: int, streams: list[Stream], record: Report) -> Report:
        """Return the report on a failure of torchrun itself, or of another program."""
        begun = [stream for stream in streams if stream.worker]
        failed = [stream for stream in begun if stream.exit_code]
        error = record.get("error", "")
        stream = min(failed or begun, key=end_of, default=streams[-1])
        report: Report = {}
        if error:
            last_words = LastWords(code, error, error, is_exception=True)
        else:
            if failed:
                code, report = stream.exit_code or code, {"rank": stream.worker["rank"]}
            last_words = self.words_at_end(stream, code)
        cause = "Follower" if code in INTERRUPTED else self.cause(last_words)
        exception = last_words.text[:EXCEPTION] or signal_name(code)
        return with_lines(
            {**report, "cause": cause, "exitCode": code, "exception": exception}, stream
        )

    def last_words(self, stream: Stream, failure: Report, first: Stream) -> LastWords:
        """Return the last words of a rank, with its exit code.

        There are none if torchrun stopped the rank after the end of the first one, unless the rank
        was about to end by an exception of its own.
        """
        exit_code, note = failure["exitCode"], failure.get("note", {})
        is_late = end_of(stream) - end_of(first) > self.patience
        if exit_code in INTERRUPTED or (exit_code == -signal.SIGKILL and is_late):
            if not was_ending(stream, exit_code, first):
                return LastWords(exit_code, is_stopped=True)
            exit_code = EXCEPTION_CODE
            if not note and not stream.exception.text:
                return LastWords(exit_code, "an exception", is_exception=True)
        if exit_code == EXCEPTION_CODE and note:
            return LastWords(exit_code, note["exception"], note["words"], is_exception=True)
        return self.words_at_end(stream, exit_code)

    def words_at_end(self, stream: Stream, exit_code: int) -> LastWords:
        """Return the last words of a process, if they can explain its end."""
        text, error = stream.text(), stream.exception
        is_late = end_of(stream) - error.time > EXIT_SECONDS
        if exit_code == EXCEPTION_CODE and error.counts and error.text and not is_late:
            return LastWords(exit_code, error.text, error.words, is_exception=True)
        if exit_code == EXCEPTION_CODE:
            # A traceback of another form, such as that of `rich`.
            end = "\n".join(text.splitlines()[-LINES:])
            if found := self.last_match("exception", end):
                words = end[found.start() :]
                return LastWords(exit_code, found[1].strip(), words, is_exception=True)
        if exit_code == ABORTED:
            found = self.last_match("abort", text)
            exception = found[1].strip() if found else ""
            return LastWords(exit_code, exception, text, is_exception=bool(found))
        if exit_code < 0:
            return LastWords(exit_code)
        return LastWords(exit_code, last_line(text), text if exit_code == EXCEPTION_CODE else "")

    def cause(self, last_words: LastWords) -> str:
        """Return the cause according to the last words of a process, one of CAUSES."""
        if last_words.is_stopped or self.says("follower", last_words.words):
            return "Follower"
        is_ambiguous = last_words.exit_code in (EXCEPTION_CODE, ABORTED)
        if self.says("unclear", last_words.words) or (is_ambiguous and not last_words.is_exception):
            return "Unclear"
        return "Failure"

    def hang(self, age: float | None, ranks: list[Stream]) -> Report:
        """Return the report on a hanging gang, with the stacks of its ranks.

        `age` is that of the last heartbeat in seconds, or None before the first. The report names
        the rank furthest behind, if the output of a rank tells it.
        """
        lines = []
        behind = []
        each = max(1, LINES // max(1, len(ranks)))
        for stream in ranks:
            text = stream.text()
            frames = choose(stack_in(text), each) or ["no stack"]
            rank = stream.worker.get("rank")
            lines += [f"rank {rank}: {frame.strip()}"[:LINE_LENGTH] for frame in frames]
            behind += [
                found for words in self.words.get("behind", []) for found in words.findall(text)
            ]
        since = "" if age is None else f" for {age:.0f} s"
        exception = "; ".join([f"no heartbeat{since}", *behind[-1:]])
        return {"cause": "Hang", "exception": exception, "lines": lines[:LINES]}

    def last_match(self, kind: str, text: str) -> re.Match[str] | None:
        """Return the last match of the first pattern with a match."""
        for pattern in self.words.get(kind, []):
            for found in reversed(list(pattern.finditer(text))):
                return found
        return None

    def says(self, kind: str, text: str) -> bool:
        return any(pattern.search(text) for pattern in self.words.get(kind, []))


def read_record(folder: Path) -> Report:
    """Return torchrun's record of its failed workers, with the notes of the workers."""
    record = read_json(read_file(folder / RECORD))
    for failure in record.get("failures", []):
        failure["note"] = read_json(read_file(folder / NOTE.format(index=failure["localRank"])))
    return record


def end_of(stream: Stream) -> float:
    return stream.ended or 0.0


def ended_early(stream: Stream, report: Report) -> str:
    """Return the sentence on a peer that ended too early, as if all work had been done."""
    rank, other = stream.worker.get("rank"), report["rank"]
    return (
        f"rank {rank} ended with exit code 0 while rank {other} was still training: do all ranks "
        f"make the same number of steps? ({report['exception']})"
    )[:EXCEPTION]


def was_ending(stream: Stream, exit_code: int, first: Stream) -> bool:
    """Return True if a rank was about to end by its own exception when the first one ended."""
    error = stream.exception
    # A rank with a handler of SIGTERM may have written because of it.
    handled = exit_code != -signal.SIGTERM
    is_earlier = error.time < first.open_at or (not handled and error.time <= end_of(first))
    is_last = error.counts and error.following <= EXCEPTION_LINES
    return is_last and is_earlier and first.open_at - error.time < ENDING_SECONDS


def last_line(text: str) -> str:
    """Return the last line with text."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-\t")]
    return lines[-1] if lines else ""


def with_lines(report: Report, stream: Stream) -> Report:
    """Return a report with the end of a process: its time, and its last lines."""
    lines = [line[:LINE_LENGTH] for line in stream.text().splitlines() if line.strip()]
    return {**report, "time": stream.ended, "lines": lines[-LINES:]}


def signal_name(exit_code: int) -> str:
    """Return the name of the signal in an exit code, or an empty string."""
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return ""


def stack_in(text: str) -> list[str]:
    """Return the frames of the interrupted thread, the innermost first.

    The frames of the agent are left out. In a fork, they are below those of the program.
    """
    stacks = STACK.findall(text)
    current = [frames for kind, frames in stacks if kind != "Thread"]
    chosen = current or [frames for _, frames in stacks]
    frames = chosen[-1].splitlines() if chosen else []
    return [frame for frame in frames if not any(place in frame for place in STARTERS)]


def choose(frames: list[str], number: int) -> list[str]:
    """Return so many frames: the innermost ones, and the innermost one outside of torch."""
    own = [frame for frame in frames if "/torch/" not in frame]
    if not own or own[0] in frames[:number]:
        return frames[:number]
    return [*frames[: number - 1], own[0]]


def on_success(result: bytes) -> Report:
    """Return the report on a successful attempt, with the result written by a rank."""
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
    for name in FIGURES:
        if not report.get(name):
            report.pop(name, None)
    while len(text := json.dumps(report)) > MESSAGE and report.get("lines"):
        report["lines"] = report["lines"][1:]
    if len(text) > MESSAGE:
        text = json.dumps({name: report[name] for name in report if name not in FIGURES})
    if len(text) > MESSAGE:
        known = ("agent", "attempt", "cause", "rank", "exitCode", "time")
        short = {name: report[name] for name in known if name in report}
        text = json.dumps({**short, "exception": report.get("exception", "")[:200]})
    return text
