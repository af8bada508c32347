"""The time of day for decisions.

A machine's clock may jump, after a wrong answer of a time server for example. Such a jump must not
make a deadline end early or late.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

# A difference up to this is followed at once: time servers correct clocks by small steps.
TOLERANCE = timedelta(seconds=5)

# A larger one is followed after this time in seconds, if it lasts.
PATIENCE = 600.0


def wall_time() -> datetime:
    return datetime.now(UTC)


@dataclass
class SteadyClock:
    """The wall clock, without its jumps. `wall` and `monotonic` are the clocks of the machine."""

    wall: Callable[[], datetime] = wall_time
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._adopt()

    def now(self) -> datetime:
        """Return the time of the wall clock. After a jump, continue from the time before it."""
        steady = self._base + timedelta(seconds=self.monotonic() - self._since)
        if abs(self.wall() - steady) <= TOLERANCE:
            self._adopt()
            return self._base
        if self.monotonic() - self._since > PATIENCE:
            self._adopt()
            return self._base
        return steady

    def _adopt(self) -> None:
        self._base = self.wall()
        self._since = self.monotonic()
