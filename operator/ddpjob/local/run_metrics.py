"""What the metrics of a run tell in the end: its curves, its result, and where the time went. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

Metric = Mapping[str, Any]

EVENTS = (
    *("start", "train", "eval", "checkpoint", "model", "end", "interrupted"),
    *("message", "speed", "rate", "pipeline"),
)
"""What the trainer's progress lines report: of a training, and of the workloads that measure or check something else."""

STAGES = (
    ("starting processes", ("launch", "import")),
    ("meeting", ("rendezvous",)),
    ("reading data, setting up", ("setup",)),
    ("waiting for data", ("data",)),
    ("forward", ("forward",)),
    ("backward and all-reduce", ("backward",)),
    ("optimizer", ("optimizer",)),
    ("evaluating", ("evaluate",)),
    ("checkpoints", ("checkpoint",)),
    ("ending", ("end",)),
    ("other", ("other",)),
)
"""What a person reads, and the phases that it sums: the trainer's own, and `launch`, `end` and `other` as seen from outside."""


def metric(line: str) -> dict[str, Any] | None:
    """A progress line of the trainer: a JSON object whose `event` is one of ours; other programs log such lines too."""
    if not line.startswith('{"event"'):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("event") in EVENTS else None


def number(value: Any) -> float | None:
    """The value, where it is a number to calculate with; scripts of users write what they like."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if isfinite(value) else None
    except OverflowError:  # JSON knows whole numbers of any length
        return None


@dataclass
class Story:
    """The metrics of a run in their order, with the times around them in seconds of one clock (unix)."""

    began: float
    ended: float = 0.0
    metrics: list[Metric] = field(default_factory=list)

    def of(self, event: str) -> list[Metric]:
        return [m for m in self.metrics if m.get("event") == event]

    def curve(self, event: str, value: str, over: str = "step") -> tuple[list[float], list[float]]:
        """(steps, values) of what `event` reported; after a restart the repeated steps replace those that were lost."""
        points: dict[float, float] = {}
        for metric in self.of(event):
            step, at = number(metric.get(over)), number(metric.get(value))
            if step is not None and at is not None:
                if points and step <= next(reversed(points)):
                    points = {s: v for s, v in points.items() if s < step}
                points[step] = at
        return list(points), list(points.values())

    def seconds(self) -> list[tuple[str, float]]:
        """(stage, seconds) of the last attempt and what was lost to earlier ones; what is nobody's is `other`."""
        starts, ends = self.of("start"), self.of("end")
        started = number(starts[-1].get("time")) if starts else None
        ended = number(ends[-1].get("time")) if ends else None
        if started is None or ended is None:
            return []
        told = ends[-1].get("seconds")
        phases = {
            k: s
            for k, v in (told.items() if isinstance(told, Mapping) else ())
            if (s := number(v)) is not None
        }
        before = sum(phases.get(name, 0.0) for name in ("import", "rendezvous", "setup"))
        lost = self._lost(started, before)
        phases["launch"] = max(0.0, started - self.began - before - lost)
        phases["end"] = max(0.0, self.ended - ended)
        phases["other"] = max(0.0, self.ended - self.began - lost - sum(phases.values()))
        stages = [(stage, sum(phases.get(name, 0.0) for name in names)) for stage, names in STAGES]
        return [("lost to restarts", lost)] * bool(lost) + stages

    def _lost(self, last_start: float, before: float) -> float:
        return max(0.0, last_start - before - self.began) if len(self.of("start")) > 1 else 0.0


def share(parts: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """(stage, seconds, share of the whole); stages of less than a thousandth are left out."""
    whole = sum(seconds for _, seconds in parts) or 1.0
    return [
        (stage, seconds, seconds / whole) for stage, seconds in parts if seconds / whole >= 0.001
    ]
