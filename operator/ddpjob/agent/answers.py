"""Make the answers on the agent's port: numbers for Prometheus, and its state for the operator."""

import json
import re
from functools import partial
from typing import Any, Callable, Protocol

from .options import Options
from .output import Output
from .suspicion import Heartbeat
from .times import Times

# The most ranks in a state, and characters of its error: less than 4 KB in all.
RANKS = 48
ERROR = 250

# A line about an error, in the output of torchrun.
TROUBLE = re.compile(r"(?i)error|fail|cannot|refused|timed out|unreachable")


class Pod(Protocol):
    """The part of the agent needed for the answers."""

    options: Options
    attempt: int
    stop_signal: int
    output: Output
    times: Times
    heartbeat: Heartbeat

    def activity(self) -> str: ...

    def is_ready(self) -> bool: ...


def answers_of(pod: Pod) -> dict[str, Callable[[], str]]:
    return {
        "/metrics": partial(metrics, pod),
        "/state": partial(state, pod),
        pod.options.state_path: partial(state, pod),
    }


def metrics(pod: Pod) -> str:
    """Return the numbers of a pod in the format of Prometheus."""
    numbers = {
        "attempt": pod.attempt,
        "ready": int(pod.is_ready()),
        **pod.output.figures,
    }
    age = pod.heartbeat.age()
    if age is not None:
        numbers["heartbeat_age_seconds"] = age
    for activity, seconds in pod.times.seconds.items():
        name = f'seconds_total{{activity="{activity}"}}'
        numbers[name] = round(seconds, 3)
    lines = [f"ddpjob_agent_{name} {value}\n" for name, value in numbers.items()]
    return "".join(lines)


def state(pod: Pod) -> str:
    """Return the state of the attempt, as a JSON object.

    - `activity`: one of ACTIVITIES. `stopped`: the pod was told to end.
    - `ended`: pairs of a rank and its exit code (null if unknown), in the order of their ends.
    - `steps`: the first and the last step. `checkpoint`: the last saved step.
    - `heartbeat`: seconds since the last one, or null before the first. `watched`: whether a stop
      of the heartbeats would be noticed.
    - `error`: torchrun's last line about an error.
    """
    output = pod.output
    streams = output.streams
    launcher = streams[-1].text() if streams else ""
    found: dict[str, Any] = {
        "attempt": pod.attempt,
        "activity": pod.activity(),
        "stopped": bool(pod.stop_signal),
        "ended": output.ended_ranks()[:RANKS],
        "steps": output.steps.get(pod.attempt),
        "checkpoint": output.checkpoint,
        "heartbeat": pod.heartbeat.age(),
        "watched": pod.heartbeat.is_watched(),
        "error": trouble_in(launcher),
    }
    return json.dumps(found)


def trouble_in(text: str) -> str:
    """Return the last line about an error, or an empty string."""
    for line in reversed(text.splitlines()):
        if TROUBLE.search(line):
            return line.strip()[:ERROR]
    return ""
