"""The answer of a running pod's agent to a question of the operator (`agent/answers.py`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.core.api.history import Steps

# Bytes of an answer.
MAX_STATE = 4096

# Characters of a text in an answer.
MAX_TEXT = 500

# Seconds of an age at most: a larger number is no age.
LONGEST_AGE = 1e12

# The activity of an agent after the end of its processes, while it waits for another attempt.
WAITING = "waiting"


@dataclass(frozen=True)
class AgentState:
    """The state of an attempt in one pod.

    - `activity`: what the pod does. `stopped`: it was told to end.
    - `ended`: (rank, exit code) of the ended ranks, the first one first. The code is None if it is
      not known.
    - `steps`: the first and the last step. `checkpoint`: the last saved step.
    - `heartbeat`: the age of the last one in seconds; None before the first. `watched`: the agent
      notices if the heartbeats stop.
    - `error`: torchrun's last line about a problem.
    """

    attempt: int
    activity: str = ""
    stopped: bool = False
    ended: tuple[tuple[int, int | None], ...] = ()
    steps: Steps | None = None
    checkpoint: int | None = None
    heartbeat: float | None = None
    watched: bool = False
    error: str = ""

    @property
    def ended_early(self) -> tuple[int, ...]:
        """Return the ranks that ended with 0 before any other end, unless the pod was stopped."""
        if self.stopped:
            return ()
        early = []
        for rank, code in self.ended:
            if code != 0:
                break
            early.append(rank)
        return tuple(early)

    @property
    def failed(self) -> tuple[int, int | None] | None:
        """Return the first rank that has not ended with 0, and its exit code; None if none has."""
        for rank, code in self.ended:
            if code != 0:
                return rank, code
        return None

    def __str__(self) -> str:
        parts = []
        if self.ended:
            rank, code = self.ended[0]
            how = "" if code is None else f" with exit code {code}"
            parts.append(f"rank {rank} has ended{how}")
        if self.steps:
            _, last = self.steps
            parts.append(f"its last step is {last}")
        if self.checkpoint is not None:
            parts.append(f"its last checkpoint is of step {self.checkpoint}")
        if self.heartbeat is not None:
            parts.append(f"its last heartbeat was {self.heartbeat:.0f} s ago")
        if self.error:
            parts.append(f"torchrun says: {self.error}")
        return ", ".join(parts)


def read_state(text: bytes) -> AgentState | None:
    """Return the state in an answer, or None. Training code can forge it: nothing is trusted."""
    try:
        found = json.loads(text[:MAX_STATE])
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    attempt = _integer(found.get("attempt"))
    if attempt is None:
        return None
    return AgentState(
        attempt=attempt,
        activity=_text(found.get("activity")),
        stopped=found.get("stopped") is True,
        ended=_ended(_list(found.get("ended"))),
        steps=_steps(_list(found.get("steps"))),
        checkpoint=_integer(found.get("checkpoint")),
        heartbeat=_age(found.get("heartbeat")),
        watched=found.get("watched") is True,
        error=_text(found.get("error")),
    )


def _ended(entries: Sequence[Any]) -> tuple[tuple[int, int | None], ...]:
    found = []
    for entry in entries:
        pair = _list(entry)
        if len(pair) == 2:
            rank, code = map(_integer, pair)
            if rank is not None and rank >= 0:
                found.append((rank, code))
    return tuple(found)


def _steps(entries: Sequence[Any]) -> Steps | None:
    if len(entries) != 2:
        return None
    first, last = map(_integer, entries)
    if first is None or last is None:
        return None
    return first, last


def _age(value: Any) -> float | None:
    """Return an age in seconds, or None if the value is none."""
    is_age = type(value) in (int, float) and 0 <= value < LONGEST_AGE
    return float(value) if is_age else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _integer(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_exact = abs(value) < 2**53
    return int(value) if is_exact else None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    text = value.encode(errors="replace").decode()
    return text[:MAX_TEXT]
