"""What the agent answers on its port: numbers for Prometheus, and its state for the operator."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent

# Bytes of a state, the most ranks in it, and characters of torchrun's error.
STATE, RANKS, ERROR = 4096, 64, 500

# A line in which torchrun says what does not work.
TROUBLE = re.compile(r"(?i)error|fail|cannot|refused|timed out|unreachable")


def answers_of(agent: Agent) -> dict[str, Callable[[], str]]:
    """Return what returns the answer, by its path."""
    return {"/metrics": partial(metrics, agent), "/state": partial(state, agent)}


def metrics(agent: Agent) -> str:
    """Return the numbers of a pod in the text format of Prometheus."""
    ready, age = int(agent.is_ready()), agent.heartbeat_age()
    numbers = {"attempt": agent.attempt, "ready": ready, **agent.output.figures}
    if age is not None:
        numbers["heartbeat_age_seconds"] = round(age, 3)
    for name, spent in agent.times.seconds.items():
        numbers[f'seconds_total{{activity="{name}"}}'] = round(spent, 3)
    return "".join(f"ddpjob_agent_{name} {value}\n" for name, value in numbers.items())


def state(agent: Agent) -> str:
    """Return what is known of the attempt, as a JSON object of at most STATE bytes.

    - `activity`: what the pod does, one of ACTIVITIES. `stopped`: it was told to end.
    - `ended`: pairs of a rank and its exit code, in the order of their ends. The code is null if it
      is not known.
    - `steps`: the first and the last step. `checkpoint`: the last step that was saved.
    - `heartbeat`: the age of the last one in seconds, or null before the first. `watched`: whether
      it would be noticed that they stop.
    - `error`: the last line in which torchrun says what does not work.
    """
    age, streams = agent.heartbeat_age(), agent.output.streams
    found: dict[str, Any] = {
        "attempt": agent.attempt,
        "activity": agent.activity(),
        "stopped": bool(agent.stop_signal),
        "ended": agent.output.ended_ranks()[:RANKS],
        "steps": agent.output.steps.get(agent.attempt),
        "checkpoint": agent.output.checkpoint,
        "heartbeat": None if age is None else round(age, 1),
        "watched": is_watched(agent),
        "error": trouble_in(streams[-1].text() if streams else ""),
    }
    text = json.dumps(found)
    return text if len(text) <= STATE else json.dumps({**found, "error": ""})


def is_watched(agent: Agent) -> bool:
    """Return True if it would be noticed that the heartbeats stop."""
    if agent.options.heartbeat == "Log":
        return agent.output.writes_steadily
    return agent.heartbeat_age() is not None


def trouble_in(text: str) -> str:
    """Return the last line in which a program says what does not work, or an empty string."""
    lines = [line.strip() for line in text.splitlines() if TROUBLE.search(line)]
    return lines[-1][:ERROR] if lines else ""
