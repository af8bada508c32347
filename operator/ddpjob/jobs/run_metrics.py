"""The metrics of a run: the events printed by its trainer, their curves, and the time spent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from ddpjob.core.api.readers import Dict

# Events of the trainer: those of a training, then those of workloads with other measurements or
# checks.
TRAINING_EVENTS = ("start", "train", "eval", "checkpoint", "model", "end", "interrupted")
OTHER_EVENTS = ("message", "speed", "rate", "pipeline")
EVENTS = frozenset((*TRAINING_EVENTS, *OTHER_EVENTS))

# The stages of a run, each with the phases summed in it. The trainer measures its own phases.
# `launch`, `end` and `other` are the rest of the time outside and inside it.
STAGES = (
    ("starting processes", ("launch", "import")),
    ("rendezvous", ("rendezvous",)),
    ("reading data and setup", ("setup",)),
    ("waiting for data", ("data",)),
    ("forward", ("forward",)),
    ("backward and all-reduce", ("backward",)),
    ("optimizer", ("optimizer",)),
    ("evaluation", ("evaluate",)),
    ("checkpoints", ("checkpoint",)),
    ("shutdown", ("end",)),
    ("other", ("other",)),
)

# Phases of the trainer before its event `start`.
PHASES_BEFORE_START = ("import", "rendezvous", "setup")

# Stages below this share of the whole are not shown.
SMALLEST_SHARE = 0.001


def parse_metric(line: str) -> dict[str, Any] | None:
    """Return an event of the trainer, or None for any other line.

    Other programs log JSON objects with the key `event` too, so its value must be known. An object
    without this key is an event `train` if its `step` is a number: a user's own script writes it.
    """
    line = line.rstrip()
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        found = json.loads(line)
    # Deeply nested JSON raises RecursionError.
    except (ValueError, RecursionError):
        return None
    if "event" not in found:
        has_step = finite_number(found.get("step")) is not None
        return {"event": "train", **found} if has_step else None
    event = found["event"]
    return found if isinstance(event, str) and event in EVENTS else None


def is_for_people(line: str) -> bool:
    """Return True if a line is to be shown although it has an event: its form is the user's own."""
    return '"event"' not in line


def finite_number(value: Any) -> float | None:
    """Return a value to calculate with, or None. Users' scripts may report any value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if isfinite(value) else None
    # JSON has integers larger than any float.
    except OverflowError:
        return None


@dataclass
class RunMetrics:
    """The events of a run in their order. Its start and end are in seconds since the epoch."""

    start_time: float = 0.0
    end_time: float = 0.0
    events: list[Dict] = field(default_factory=list)

    def of_kind(self, event: str) -> list[Dict]:
        return [found for found in self.events if found.get("event") == event]

    def curve(self, event: str, value: str, over: str = "step") -> tuple[list[float], list[float]]:
        """Return (steps, values) of an event. `over` is the key of the x values.

        After a restart, the repeated steps replace the lost ones.
        """
        points: dict[float, float] = {}
        last = -inf
        for found in self.of_kind(event):
            x = finite_number(found.get(over))
            y = finite_number(found.get(value))
            if x is None or y is None:
                continue
            if x <= last:
                points = {step: old for step, old in points.items() if step < x}
            points[x] = y
            last = x
        return list(points), list(points.values())

    def stage_seconds(self) -> list[tuple[str, float]]:
        """Return (stage, seconds) of the last attempt, and the time lost to earlier attempts.

        The seconds add up to the whole run. The list is empty if the trainer reported no end.
        """
        starts = self.of_kind("start")
        ends = self.of_kind("end")
        if not starts or not ends:
            return []
        start = finite_number(starts[-1].get("time"))
        end = finite_number(ends[-1].get("time"))
        if start is None or end is None:
            return []
        # Split the time before the event `start` into lost attempts, launch and known phases.
        phases = _phase_seconds(ends[-1])
        before_start = sum(phases.get(phase, 0.0) for phase in PHASES_BEFORE_START)
        lost = 0.0
        if len(starts) > 1:
            lost = max(0.0, start - before_start - self.start_time)
        phases["launch"] = max(0.0, start - self.start_time - before_start - lost)
        phases["end"] = max(0.0, self.end_time - end)
        total = self.end_time - self.start_time
        phases["other"] = max(0.0, total - lost - sum(phases.values()))
        # Sum the phases of each stage.
        stages = []
        if lost:
            stages.append(("lost to restarts", lost))
        for stage, summed in STAGES:
            stages.append((stage, sum(phases.get(phase, 0.0) for phase in summed)))
        return stages


def _phase_seconds(end: Dict) -> dict[str, float]:
    """Return the seconds of each phase reported in the event `end`."""
    reported = end.get("seconds")
    if not isinstance(reported, Mapping):
        return {}
    phases = {}
    for phase, value in reported.items():
        seconds = finite_number(value)
        if seconds is not None:
            phases[phase] = seconds
    return phases


def shares(stages: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Return (stage, seconds, share of the total), without stages of almost no time."""
    total = sum(seconds for _, seconds in stages) or 1.0
    found = []
    for stage, seconds in stages:
        share = seconds / total
        if share >= SMALLEST_SHARE:
            found.append((stage, seconds, share))
    return found
