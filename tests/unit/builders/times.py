"""The time at which every test begins, and times after it."""

from datetime import UTC, datetime, timedelta

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)
