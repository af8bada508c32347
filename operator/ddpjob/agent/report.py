"""Find out why an attempt has ended, from the exit codes and the last output of its processes."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from . import EXCEPTION, NOTE, NOTICE, RECORD
from .files import read_file, read_json
from .message import RESULT, Report
from .output import Stream, log
from .stacks import LINES, stack_in, stack_lines

ENDED = attrgetter("ended")

# Spaces, and characters of the box of an error as `typer` and `rich` print it.
BOX = " \t│┃╭╮╰╯─━┏┓┗┛"

# Characters of a line of output in a report.
LINE_LENGTH = 160

# Errors with a place in the output.
SYNTAX = ("SyntaxError", "IndentationError", "TabError")
PLACE = re.compile(r'  File "(?:[^"\n]*/)?([^/"\n]+)", (line \d+)\n')

# Exit codes: of Python after an exception, of an aborted process, and of a process told to stop.
EXCEPTION_CODE = 1
ABORTED = -signal.SIGABRT
INTERRUPTED = (-signal.SIGTERM, 143)

# Seconds from the exception of a process to its end, at most: torch frees devices. A peer may end
# before that, and torchrun then sends SIGTERM to the others. So many lines may follow a stopped
# rank's exception.
ENDING_SECONDS = 10.0
EXCEPTION_LINES = 25

# The longest time from the exception of a process to its end: it may upload its results.
EXIT_SECONDS = 120.0

# Causes, the likeliest first. A follower lost a peer. Unclear: perhaps it is a follower.
CAUSES = ("Failure", "Unclear", "Follower")


class LastWords(NamedTuple):
    """The last output of a process, if it explains the end.

    - `text`: the exception that ended it, or else its last line.
    - `words`: the text to search for the words of a lost peer.
    - `is_stopped`: torchrun has ended it because of another process. `was_told`: by a signal.
    """

    exit_code: int
    text: str = ""
    words: str = ""
    is_exception: bool = False
    is_stopped: bool = False
    was_told: bool = False


class Judge:
    """Judges the cause of an end by the words of error messages.

    - `words`: a file with patterns, by their meaning.
    - `patience`: seconds from the first failure until torchrun sends SIGKILL to the other workers.
    """

    def __init__(self, words: bytes, patience: float) -> None:
        self.words = {}
        for kind, patterns in read_json(words).items():
            self.words[kind] = [re.compile(pattern) for pattern in patterns]
        # torchrun polls its workers.
        self.patience = patience - 1.0

    def judge(
        self, code: int, streams: list[Stream], record: Report, *, stopped: bool = False
    ) -> Report:
        """Return the report on a failed torchrun, from its exit code and its record.

        Of several failures, the likeliest cause counts, then the first in time, then the first in
        torchrun's record. `stopped`: the ranks were told to end.
        """
        failures = record.get("failures", [])
        if not failures:
            return self.judge_launcher(code, streams, record)
        failed = [streams[failure["localRank"]] for failure in failures]
        first = min(failed, key=ENDED)
        found = []
        for failure, rank in zip(failures, failed):
            last_words = self.last_words(rank, failure, first)
            found.append((self.judge_rank(rank, last_words, failure), rank, last_words))
        report, stream, _ = min(found, key=priority)
        # torchrun has found no failure of these.
        others = [rank for rank in streams if rank.worker and rank not in failed]
        early = [rank for rank in others if 0.0 < rank.ended < first.ended]
        if early and report["cause"] == "Follower" and not stopped:
            report = ended_early(early[0], report)
        return with_lines(report, stream)

    def judge_rank(self, rank: Stream, last_words: LastWords, failure: Report) -> Report:
        """Return the report on a failed rank."""
        exit_code = last_words.exit_code
        exception = last_words.text or failure["exception"] or signal_name(exit_code)
        if exception.startswith(SYNTAX):
            for place in PLACE.findall(rank.text())[-1:]:
                exception += " ({}, {})".format(*place)
        return {
            "cause": self.cause(last_words),
            "rank": failure["rank"],
            "localRank": failure["localRank"],
            "exitCode": exit_code,
            "exception": exception[:EXCEPTION],
            "time": failed_at(rank, last_words),
        }

    def judge_launcher(self, code: int, streams: list[Stream], record: Report) -> Report:
        """Return the report on a failure of torchrun itself, or of another program."""
        begun = [stream for stream in streams if stream.worker]
        failed = [stream for stream in begun if stream.exit_code]
        stream = min(failed or begun, key=ENDED, default=streams[-1])
        error = record.get("error", "")
        report: Report = {}
        if failed and not error:
            code = stream.exit_code or code
            report["rank"] = stream.worker["rank"]
        last_words = self.words_at_end(stream, code)
        if error:
            last_words = LastWords(code, error, error, is_exception=True)
            raised = self.raised(begun)
            if raised:
                stream, last_words = raised
                report["rank"] = stream.worker["rank"]
        report["cause"] = "Follower" if code in INTERRUPTED else self.cause(last_words)
        report["exitCode"] = code
        report["exception"] = last_words.text[:EXCEPTION] or signal_name(code)
        return with_lines(report, stream)

    def raised(self, ranks: list[Stream]) -> tuple[Stream, LastWords] | None:
        """Return the rank about to end by an exception of its own, and its last words.

        torchrun may have lost a peer because of that.
        """
        for stream in sorted(ranks, key=lambda rank: rank.exception.time):
            found = self.exception_at_end(stream)
            is_own = found and self.cause(found) == "Failure"
            if found and is_own and was_ending(stream, -signal.SIGTERM, stream):
                return stream, found
        return None

    def last_words(self, stream: Stream, failure: Report, first: Stream) -> LastWords:
        """Return the last words of a rank, with its exit code.

        There are none if torchrun stopped it, unless it was about to end by its own exception.
        """
        exit_code = failure["exitCode"]
        note = failure.get("note")
        is_late = stream.ended - first.ended > self.patience
        was_killed = exit_code == -signal.SIGKILL and is_late
        if was_killed or exit_code in INTERRUPTED:
            if not was_ending(stream, exit_code, first):
                return LastWords(exit_code, is_stopped=True)
            exit_code = EXCEPTION_CODE
            if not note:
                text = stream.exception.text or "an exception"
                words = stream.exception.words
                return LastWords(exit_code, text, words, is_exception=True, was_told=True)
        if exit_code == EXCEPTION_CODE and note:
            return LastWords(exit_code, note["exception"], note["words"], is_exception=True)
        return self.words_at_end(stream, exit_code)

    def words_at_end(self, stream: Stream, exit_code: int) -> LastWords:
        """Return the last words of a process, if they can explain its end."""
        text = stream.text()
        if exit_code == ABORTED:
            # What was logged before is not its end.
            return self.last_match("abort", text, ABORTED) or LastWords(ABORTED, words=text)
        if exit_code < 0:
            return LastWords(exit_code)
        found = self.exception_at_end(stream) if exit_code == EXCEPTION_CODE else None
        line = last_line(text)
        return found or LastWords(exit_code, line, line)

    def exception_at_end(self, stream: Stream) -> LastWords | None:
        error = stream.exception
        is_late = stream.ended - error.time > EXIT_SECONDS
        if error.counts and error.text and not is_late:
            return LastWords(EXCEPTION_CODE, error.text, error.words, is_exception=True)
        text = stream.text()
        # A traceback of another form, such as that of `rich`.
        end = "\n".join(text.splitlines()[-LINES:])
        found = self.last_match("end", text, EXCEPTION_CODE)
        return found or self.last_match("exception", end, EXCEPTION_CODE)

    def cause(self, last_words: LastWords) -> str:
        """Return the cause according to the last words of a process, one of CAUSES."""
        if last_words.is_stopped or self.says("follower", last_words.words):
            return "Follower"
        is_ambiguous = last_words.exit_code in (EXCEPTION_CODE, ABORTED)
        has_no_reason = is_ambiguous and not last_words.is_exception
        if has_no_reason or self.says("unclear", last_words.words):
            return "Unclear"
        return "Failure"

    def hang(self, age: float | None, ranks: list[Stream]) -> Report:
        """Return the report on a hanging gang, with the stacks of its ranks.

        `age`: seconds since the last heartbeat, or None before the first. The report names the
        rank furthest behind, if the output of a rank tells it.
        """
        exception = "no heartbeat" if age is None else f"no heartbeat for {age:.0f} s"
        behind = []
        groups: dict[tuple[str, ...], list[int]] = {}
        # A rank without its header has not begun.
        for stream in filter(attrgetter("worker"), ranks):
            text = stream.text()
            stack = tuple(stack_in(text)) or ("no stack",)
            groups.setdefault(stack, []).append(stream.worker["rank"])
            for pattern in self.words.get("behind", []):
                behind += pattern.findall(text)
        if behind:
            exception += f"; {behind[-1]}"
        return {"cause": "Hang", "exception": exception, "lines": stack_lines(groups)}

    def last_match(self, kind: str, text: str, exit_code: int) -> LastWords | None:
        """Return the last match of the first matching pattern."""
        for pattern in self.words.get(kind, []):
            matches = list(pattern.finditer(text))
            if matches:
                found = matches[-1]
                exception = " ".join(found[1].split())
                words = text[found.start() :]
                return LastWords(exit_code, exception, words, is_exception=True)
        return None

    def says(self, kind: str, text: str) -> bool:
        return any(pattern.search(text) for pattern in self.words.get(kind, []))


def read_record(folder: Path) -> Report:
    """Return torchrun's record of its failed workers, with their notes."""
    record = read_json(read_file(folder / RECORD))
    for failure in record.get("failures", []):
        note = folder / NOTE.format(index=failure["localRank"])
        failure["note"] = read_json(read_file(note))
    return record


def priority(found: tuple[Report, Stream, LastWords]) -> tuple[float, float]:
    report, _, last_words = found
    likelihood: float = CAUSES.index(report["cause"])
    if last_words.was_told and not likelihood:
        # It may have caught its exception before.
        likelihood = 0.5
    elif last_words.exit_code == EXCEPTION_CODE and not last_words.is_exception:
        likelihood = 0.25
    return likelihood, report["time"]


def failed_at(stream: Stream, last_words: LastWords) -> float:
    """Return when a process failed: at its last exception, or at its end."""
    error = stream.exception
    is_last = was_ending(stream, last_words.exit_code, stream)
    is_cause = last_words.text == error.text
    return error.time if is_last and is_cause else stream.ended


def ended_early(stream: Stream, report: Report) -> Report:
    """Return the report on a rank that ended too early, from that on its peer."""
    rank = stream.worker["rank"]
    sentence = (
        f"rank {rank} ended with exit code 0 while rank {report['rank']} was still training: do "
        f"all ranks make the same number of steps? ({report['exception']})"
    )
    return {
        "cause": "EndedEarly",
        "rank": rank,
        "exitCode": 0,
        "exception": sentence[:EXCEPTION],
    }


def was_ending(stream: Stream, exit_code: int, first: Stream) -> bool:
    """Return True if a rank was about to end by its own exception when the first one ended."""
    error = stream.exception
    is_last = error.counts and error.following <= EXCEPTION_LINES
    is_recent = first.open_at - error.time < ENDING_SECONDS
    is_earlier = error.time < first.open_at
    # A rank with a handler of SIGTERM may have written because of it.
    if exit_code == -signal.SIGTERM:
        is_earlier = error.time <= first.ended
    return is_last and is_recent and is_earlier


def last_line(text: str) -> str:
    """Return the last line with words in it, and not one of the agent, without a box around it."""
    for line in reversed(text.splitlines()):
        words = line.strip(BOX)
        if words.strip("=-") and NOTICE not in line:
            return words
    return ""


def with_lines(report: Report, stream: Stream) -> Report:
    """Return a report with the time of a process's end, and its last lines."""
    lines = []
    for line in stream.text().splitlines():
        if line.strip():
            lines.append(line[:LINE_LENGTH])
    return {
        "time": stream.ended,
        **report,
        "lines": lines[-LINES:],
    }


def signal_name(exit_code: int) -> str:
    """Return the name of the signal in an exit code, or an empty string."""
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return ""


def on_success(result: bytes) -> Report:
    """Return the report on a success, with the result written by a rank."""
    found = read_json(result)
    size = len(json.dumps(found))
    if size > RESULT:
        log(f"DDP_RESULT_FILE has {size} bytes as JSON; {RESULT} are the limit")
        found = {}
    return {"cause": "Succeeded", "result": found}
