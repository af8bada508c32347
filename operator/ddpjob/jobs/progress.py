"""The progress of a training, from the events of its trainer."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from ddpjob.core.api.readers import Dict
from ddpjob.jobs.run_metrics import finite_number

# The unit of a speed is the first part of its key, such as samples_per_second.
PER_SECOND = "_per_second"


@dataclass(frozen=True)
class Progress:
    """The newest values of a training. A value not reported by the trainer is None.

    `speed` has its unit, such as `5,120 samples/s`. `checkpoint_time` is the time of the last
    complete checkpoint, and `time` is the time of the last event.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    speed: str = ""
    checkpoint_step: int | None = None
    checkpoint_time: datetime | None = None
    time: datetime | None = None

    @classmethod
    def from_events(cls, events: Iterable[Dict]) -> Self:
        """Return the progress after these events, the newest last."""
        progress = cls()
        for event in events:
            progress = progress.after(event)
        return progress

    def after(self, event: Dict) -> Self:
        """Return the progress after one more event."""
        kind = event.get("event")
        time = _time(event.get("time"))
        if kind == "checkpoint":
            return replace(
                self, checkpoint_step=_integer(event.get("step")), checkpoint_time=time, time=time
            )
        if kind == "start":
            # A resumed training goes on from its checkpoint.
            resumed = _integer(event.get("resumed_step"))
            return replace(self, step=resumed, steps=_integer(event.get("steps")), time=time)
        changes: dict[str, Any] = {"time": time}
        for key in ("step", "steps", "epoch", "epochs"):
            changes[key] = _integer(event.get(key))
        if kind == "train":
            # JSON has null for nan. A loss of nan has diverged.
            changes["loss"] = math.nan if event.get("loss", 0.0) is None else event.get("loss")
            changes["speed"] = format_speed(event)
        if kind == "eval":
            changes["accuracy"] = finite_number(event.get("accuracy"))
        known = {key: value for key, value in changes.items() if value not in (None, "")}
        return replace(self, **known)

    @property
    def share(self) -> float | None:
        """Return the finished part of the steps, from 0 to 1."""
        if self.step is None or not self.steps:
            return None
        return min(self.step / self.steps, 1.0)

    def short(self) -> str:
        """Return the steps, such as `120/460`."""
        if self.step is None:
            return ""
        return f"{self.step}/{self.steps}" if self.steps else str(self.step)

    def __str__(self) -> str:
        parts = [f"step {self.short()}"] if self.short() else []
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}" + (f"/{self.epochs}" if self.epochs else ""))
        if isinstance(self.loss, int | float):
            parts.append(f"loss {self.loss:.4f}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.1%}")
        if self.speed:
            parts.append(self.speed)
        return ", ".join(parts)


def format_speed(event: Dict) -> str:
    """Return the speed in an event with its unit, such as `5,120 samples/s`."""
    for key, value in event.items():
        unit, found, rest = key.partition(PER_SECOND)
        speed = finite_number(value)
        if found and not rest and speed is not None:
            return f"{speed:,.0f} {unit}/s"
    return ""


def _integer(value: Any) -> int | None:
    number = finite_number(value)
    return None if number is None else int(number)


def _time(value: Any) -> datetime | None:
    seconds = finite_number(value)
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
