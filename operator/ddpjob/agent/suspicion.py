"""Find out whether an attempt hangs, and when to end it and to collect the stacks of its ranks."""

from __future__ import annotations

import time
from typing import NamedTuple

from .files import changed_at
from .options import Options
from .output import Output
from .processes import descendants, stop
from .times import Times

# Seconds from the stop of all processes until the stacks are collected. That ends the ranks, and a
# rank has no stack to show if its peer has ended. So they stay stopped, with their connections
# open, until all pods have the operator's order. On a busy node this took more than 5 s.
ORDER_SECONDS = 10.0

# Seconds of silence until the agent stops its processes without an order.
SILENT_SECONDS = 10.0


class Heartbeat(NamedTuple):
    """The heartbeats of an attempt: changes of a file, or the output of its ranks."""

    options: Options
    path: str
    output: Output
    times: Times

    @property
    def in_file(self) -> bool:
        return self.options.heartbeat == "File"

    def last(self) -> float:
        """Return the Unix time of the last heartbeat, or 0 before the first one."""
        beat = changed_at(self.path) if self.in_file else self.output.last_time
        is_of_attempt = self.output.attempt >= 0 and beat >= self.output.began
        return beat if is_of_attempt else 0.0

    def note_first(self) -> None:
        """Note when the attempt began to train, if only the file shows it."""
        beat = self.last() if self.in_file else 0.0
        if beat:
            self.output.trained.setdefault(self.output.attempt, beat)

    def age(self) -> float | None:
        """Return the seconds since the last heartbeat, or None before the first one."""
        beat = self.last()
        if not beat:
            return None
        since = max(beat, self.times.thawed)
        return round(max(0.0, time.time() - since), 3)

    def is_watched(self) -> bool:
        """Return True if a stop of the heartbeats would be noticed."""
        if self.in_file:
            return self.last() > 0.0
        return self.output.writes_steadily

    def is_late(self) -> bool:
        """Return True if the last heartbeat is too old, or if the first one is too late.

        Ranks with output only at their start need no heartbeat.
        """
        age = self.age()
        if age is None:
            age = self.output.since_meeting()
            limit = self.options.first_seconds
        elif not self.is_watched():
            return False
        else:
            limit = self.options.hang_seconds
        return limit is not None and age > limit


class Suspicion:
    """The times since which the pod is silent, and since which its processes are stopped."""

    def __init__(self) -> None:
        self.silent: float | None = None
        self.stopped: float | None = None

    def is_due(self, is_ordered: bool, is_silent: bool) -> bool:
        """Return True if it is time to end the attempt. Stopped processes never continue."""
        now = time.monotonic()
        if self.stopped is None:
            self.silent = (self.silent or now) if is_silent else None
            has_no_order = self.silent is not None and now - self.silent >= SILENT_SECONDS
            if not (is_ordered or has_no_order):
                return False
            stop(descendants())
            self.stopped = now
        return now - self.stopped >= ORDER_SECONDS
