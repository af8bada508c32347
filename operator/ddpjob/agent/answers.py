"""Make the answers on the agent's port: numbers for Prometheus, and its state for the operator."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, Callable, Protocol

from .output import Output
from .times import Times

# Bytes of a state, the most ranks in it, and characters of torchrun's error.
STATE, RANKS, ERROR = 4096, 64, 500

# A line about an error, in the output of torchrun.
TROUBLE = re.compile(r"(?i)error|fail|cannot|refused|timed out|unreachable")


class Pod(Protocol):
    """The part of the agent needed for the answers."""

    attempt: int
    stop_signal: int
    output: Output
    times: Times

    def activity(self) -> str: ...

    def is_ready(self) -> bool: ...

    def heartbeat_age(self) -> float | None: ...

    def is_watched(self) -> bool: ...


def answers_of(pod: Pod) -> dict[str, Callable[[], str]]:
    """Return the functions for the answers, by their paths."""
    return {"/metrics": partial(metrics, pod), "/state": partial(state, pod)}


def metrics(pod: Pod) -> str:
    """Return the numbers of a pod in the text format of Prometheus."""
    ready, age = int(pod.is_ready()), pod.heartbeat_age()
    numbers = {"attempt": pod.attempt, "ready": ready, **pod.output.figures}
    if age is not None:
        numbers["heartbeat_age_seconds"] = round(age, 3)
    for name, spent in pod.times.seconds.items():
        numbers[f'seconds_total{{activity="{name}"}}'] = round(spent, 3)
    return "".join(f"ddpjob_agent_{name} {value}\n" for name, value in numbers.items())


def state(pod: Pod) -> str:
    """Return the state of the attempt, as a JSON object of at most STATE bytes.

    - `activity`: what the pod does, one of ACTIVITIES. `stopped`: it was told to end.
    - `ended`: pairs of a rank and its exit code, in the order of their ends. The code is null if it
      is not known.
    - `steps`: the first and the last step. `checkpoint`: the last saved step.
    - `heartbeat`: the age of the last one in seconds, or null before the first. `watched`: whether
      a stop of the heartbeats would be noticed.
    - `error`: torchrun's last line about an error.
    """
    age, streams = pod.heartbeat_age(), pod.output.streams
    found: dict[str, Any] = {
        "attempt": pod.attempt,
        "activity": pod.activity(),
        "stopped": bool(pod.stop_signal),
        "ended": pod.output.ended_ranks()[:RANKS],
        "steps": pod.output.steps.get(pod.attempt),
        "checkpoint": pod.output.checkpoint,
        "heartbeat": None if age is None else round(age, 1),
        "watched": pod.is_watched(),
        "error": trouble_in(streams[-1].text() if streams else ""),
    }
    text = json.dumps(found)
    return text if len(text) <= STATE else json.dumps({**found, "error": ""})


def trouble_in(text: str) -> str:
    """Return the last line about an error, or an empty string."""
    lines = [line.strip() for line in text.splitlines() if TROUBLE.search(line)]
    return lines[-1][:ERROR] if lines else ""
