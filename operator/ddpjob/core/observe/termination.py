"""A trainer's termination message: the report of its agent, or the tail of its log.

The agent writes its report, a JSON object, when it ends. A container killed before, for example for
its memory, leaves the tail of its log. A container without the agent leaves the tail of its log, or
its script's result from $DDP_RESULT_FILE.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from ddpjob.core.api.history import MAX_ATTEMPTS, Steps
from ddpjob.core.api.readers import Dict, child
from ddpjob.core.observe.torchrun_log import (
    INTERRUPTED,
    MAX_EXCEPTION,
    Summary,
    has_missing_script,
    has_timed_out,
    is_follower,
    parse_summary,
)

# The cause in the report on a failed setup, and the reason of such a pod.
SETUP_FAILED = "SetupFailed"

# The cause in the report on a rank that ended with 0 while another one of its pod still trained.
ENDED_EARLY = "EndedEarly"

# The largest rank and exit code of a report.
MAX_NUMBER = 1_000_000_000

# Limits of a result, in entries and in characters of each key and value.
MAX_RESULT_ENTRIES = 32
MAX_RESULT_STRING = 256


@dataclass(frozen=True)
class Termination:
    """What is known of the end of a trainer.

    - `text`: the last words of its processes. `follower`: they report the loss of a peer.
      `timed_out`: they say that the process had waited too long for a peer.
    - `summary`: the first failure of the node; None if no rank is known to have failed.
    - `result`: what the script wrote to $DDP_RESULT_FILE.
    - `attempt`: the attempt in the agent's report; None without a report.
    - `hang`: the agent has ended the attempt because its heartbeat stopped. `setup`: the setup of
      the pod has failed, so no process of the job has begun.
    - `steps`: the first and the last step of attempts in the pod. `total_steps`: the planned steps
      of the training.
    - `trained`: when attempts made their first step, or gave their first heartbeat, in the pod.
    """

    text: str = ""
    follower: bool = False
    timed_out: bool = False
    summary: Summary | None = None
    result: Mapping[str, str] = field(default_factory=dict)
    attempt: int | None = None
    hang: bool = False
    setup: bool = False
    steps: Mapping[int, Steps] = field(default_factory=dict)
    total_steps: int | None = None
    trained: Mapping[int, datetime] = field(default_factory=dict)


# Each message is read once, although every look at a job reads it again.
@lru_cache(maxsize=4096)
def read_termination(message: str) -> Termination:
    """Read a termination message. Never raises, whatever a process has written."""
    report = _report(message)
    if report is None:
        return replace(_words(message), summary=parse_summary(message), result=read_result(message))
    exception = _string(report.get("exception"))[:MAX_EXCEPTION]
    lines = report.get("lines")
    words = lines if isinstance(lines, list) else []
    text = "\n".join([*map(_string, words), exception])
    return replace(
        _words(text),
        # Another launcher than the agent's own writes torchrun's summary only.
        summary=_summary(report, exception, text) or parse_summary(text),
        result=result_of(child(report, "result")),
        attempt=_number(report.get("attempt")),
        hang=report.get("cause") == "Hang",
        setup=report.get("cause") == SETUP_FAILED,
        steps=_steps(child(report, "steps")),
        total_steps=_number(report.get("total")),
        trained=_training_times(child(report, "trained")),
    )


def _words(text: str) -> Termination:
    """Return the last words, with what they say about a peer. A search of 4 KB takes 2 ms."""
    return Termination(text, is_follower(text), has_timed_out(text))


def _report(message: str) -> Dict | None:
    """Return the agent's report, or None if the message is something else."""
    if not message.startswith('{"agent": '):
        return None
    try:
        report = json.loads(message)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def _summary(report: Dict, exception: str, text: str) -> Summary | None:
    rank = _number(report.get("rank"))
    exit_code = _number(report.get("exitCode"))
    if rank is None or rank < 0 or exit_code is None:
        return None
    cause = report.get("cause")
    interrupted = cause == "Stopped" or exit_code in INTERRUPTED
    return Summary(
        rank=rank,
        exit_code=exit_code,
        time=_time(report.get("time")),
        exception=exception,
        lost_peer=cause == "Follower" and not interrupted,
        interrupted=interrupted,
        ambiguous=cause == "Unclear",
        script_missing=has_missing_script(text),
        ended_early=cause == ENDED_EARLY,
    )


def read_result(message: str) -> Mapping[str, str]:
    """Return the JSON object in a termination message as strings, at most 32 entries.

    The result is empty if the message is something else, such as the tail of a log.
    """
    try:
        data = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return result_of(data) if isinstance(data, dict) else {}


def result_of(data: Mapping[str, object]) -> Mapping[str, str]:
    """Return the entries of a JSON object as strings, at most 32."""
    entries = list(data.items())[:MAX_RESULT_ENTRIES]
    return {_result_string(key): _result_string(value) for key, value in entries}


def _result_string(value: object) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        # The decoder accepts deeper objects than the encoder.
        text = "(nested too deeply)"
    # Half of a character is valid in JSON and not in UTF-8.
    return text[:MAX_RESULT_STRING].encode(errors="replace").decode()


def _steps(data: Dict) -> Mapping[int, Steps]:
    found = {}
    for attempt, steps in list(data.items())[:MAX_ATTEMPTS]:
        numbers = [_number(step) for step in steps] if isinstance(steps, list) else []
        if str(attempt).isdecimal() and len(numbers) == 2 and None not in numbers:
            found[int(attempt)] = (numbers[0] or 0, numbers[1] or 0)
    return found


def _training_times(data: Dict) -> Mapping[int, datetime]:
    found = {}
    for attempt, value in list(data.items())[:MAX_ATTEMPTS]:
        time = _time(value)
        if str(attempt).isdecimal() and time:
            found[int(attempt)] = time
    return found


def _string(value: Any) -> str:
    """Return a string valid in UTF-8: half of a character is valid in JSON only."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _number(value: Any) -> int | None:
    # In Python, True is an integer too. A script may write 3.0 as its step.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and abs(value) <= MAX_NUMBER else None


def _time(value: Any) -> datetime | None:
    """Return a Unix time as a datetime, or None if it is none or out of range."""
    if not isinstance(value, int | float):
        return None
    try:
        return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        return None
