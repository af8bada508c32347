"""Times as Kubernetes writes them: RFC 3339 in UTC with whole seconds."""

from datetime import UTC, datetime
from typing import Any


def format_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: Any) -> datetime | None:
    """Return the time in UTC, or None if `text` is not a time."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None
