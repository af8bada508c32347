"""The last assignment of a pod kept for an attempt."""

from datetime import datetime
from typing import NamedTuple

from ddpjob.core.api.readers import Dict, integer_or_zero
from ddpjob.core.api.times import MAX_SECONDS, parse_time


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
    found = told.get("grace")
    is_grace = isinstance(found, int | float) and 0 <= found <= MAX_SECONDS
    grace = float(found) if found is not None and is_grace else 0.0
    return Order(time, integer_or_zero(told.get("copies")), grace)
