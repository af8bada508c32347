"""The answer of a running pod's agent to a question of the operator (`agent/answers.py`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.core.api.history import Steps

# Bytes of an answer.
MAX_STATE = 4096

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
        codes = [code for _, code in self.ended]
        first = next((place for place, code in enumerate(codes) if code != 0), len(codes))
        return () if self.stopped else tuple(rank for rank, _ in self.ended[:first])

    @property
    def failed(self) -> tuple[int, int | None] | None:
        """Return the first rank that has not ended with 0, and its exit code; None if none has."""
        return next((end for end in self.ended if end[1] != 0), None)

    def __str__(self) -> str:
        parts = [f"rank {rank} has ended" for rank, _ in self.ended[:1]]
        if self.steps:
            parts.append(f"its last step is {self.steps[1]}")
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
    attempt = _integer(found.get("attempt")) if isinstance(found, dict) else None
    if attempt is None:
        return None
    steps = [_integer(step) for step in _list(found.get("steps"))]
    has_steps = len(steps) == 2 and None not in steps
    age = found.get("heartbeat")
    is_age = type(age) in (int, float) and 0 <= age < float("inf")
    return AgentState(
        attempt=attempt,
        activity=_text(found.get("activity")),
        stopped=found.get("stopped") is True,
        ended=_ended(_list(found.get("ended"))),
        steps=(steps[0] or 0, steps[1] or 0) if has_steps else None,
        checkpoint=_integer(found.get("checkpoint")),
        heartbeat=float(age) if is_age else None,
        watched=found.get("watched") is True,
        error=_text(found.get("error")),
    )


def _ended(entries: Sequence[Any]) -> tuple[tuple[int, int | None], ...]:
    pairs = [_list(entry) for entry in entries]
    found = [(_integer(pair[0]), _integer(pair[1])) for pair in pairs if len(pair) == 2]
    return tuple((rank, code) for rank, code in found if rank is not None and rank >= 0)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _integer(value: Any) -> int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and abs(value) < 2**53 else None


def _text(value: Any) -> str:
    return value.encode(errors="replace").decode()[:500] if isinstance(value, str) else ""
