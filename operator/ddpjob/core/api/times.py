"""Times as Kubernetes writes them: RFC 3339 in UTC with whole seconds."""

from datetime import UTC, datetime, timedelta
from typing import Any

MAX_INT32 = 2**31 - 1

# Longest deadline, window or grace period, in seconds: 68 years.
MAX_SECONDS = MAX_INT32

LAST_MOMENT = datetime.max.replace(tzinfo=UTC)


def format_time(moment: datetime) -> str:
    # A parsed time is in UTC already.
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return f"{moment.isoformat('T', 'seconds')[:-6]}Z"


def parse_time(text: Any) -> datetime | None:
    """Return the time in UTC, or None if `text` is not a time."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def later(moment: datetime, wait: timedelta) -> datetime:
    """Return the time after a wait, at most the last possible time."""
    try:
        return moment + wait
    except OverflowError:
        return LAST_MOMENT


def since(moment: datetime, now: datetime) -> timedelta:
    """Return the time since `moment`; zero if a clock was set back and `moment` is to come."""
    return max(now - moment, timedelta(0))
