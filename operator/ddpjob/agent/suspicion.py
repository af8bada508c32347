"""Decide when to end an attempt that seems to hang, and to collect the stacks of its ranks."""

from __future__ import annotations

import time

from .processes import descendants, stop

# Seconds from the operator's order until the stacks are collected. That ends the ranks. All pods
# get the order, and not at the same moment: a rank has no stack to show if its peer has ended. So
# all processes are stopped first, and their connections stay open.
ORDER_SECONDS = 5.0

# Seconds of silence until the agent does the same without an order. The operator may ask meanwhile,
# and let the other pods collect theirs.
SILENT_SECONDS = 10.0


def is_too_old(
    age: float | None, limit: float | None, since_meeting: float, first_limit: float | None
) -> bool:
    """Return True if the last heartbeat is older than the limit, or if the first one is too late.

    All in seconds. `age` is None before the first heartbeat. A limit of None is none.
    """
    if age is None:
        return first_limit is not None and since_meeting > first_limit
    return limit is not None and age > limit


class Suspicion:
    """Since when there is an order, and since when the pod is silent."""

    def __init__(self) -> None:
        self.ordered: float | None = None
        self.silent: float | None = None

    def is_due(self, is_ordered: bool, is_silent: bool) -> bool:
        """Return True if it is time to end the attempt."""
        now = time.monotonic()
        if is_ordered and self.ordered is None:
            stop(descendants())
        self.ordered = (self.ordered or now) if is_ordered else None
        self.silent = (self.silent or now) if is_silent else None
        if self.ordered is not None:
            return now - self.ordered >= ORDER_SECONDS
        return self.silent is not None and now - self.silent >= SILENT_SECONDS
