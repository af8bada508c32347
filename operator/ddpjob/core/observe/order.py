"""The last assignment of a pod kept for an attempt."""

from datetime import datetime
from math import isfinite
from typing import NamedTuple

from ddpjob.core.api.readers import Dict, integer_or_zero
from ddpjob.core.api.times import parse_time


class Order(NamedTuple):
    """An assignment of a kept pod: when it was given, how often again, and its grace period."""

    time: datetime
    copies: int
    grace: float


def read_order(told: Dict) -> Order | None:
    """Return the order in an assignment, or None. The assignment of a new pod has no time."""
    time = parse_time(told.get("time"))
    if time is None:
        return None
    grace = told.get("grace")
    seconds = float(grace) if isinstance(grace, int | float) and isfinite(grace) else 0.0
    return Order(time, integer_or_zero(told.get("copies")), seconds)
