"""Measure the time of a pod for each activity, and read the time that its workers have to end."""

import time
from collections.abc import Mapping

ACTIVITIES = (
    "setup",
    "waiting",
    "starting",
    "training",
    "ending",
)

# After a pause of so many seconds, such as a frozen machine, heartbeats get their time again.
FROZEN = 1.0

# torchrun's own seconds from SIGTERM to SIGKILL.
DEFAULT_SHUTDOWN = 30.0


def shutdown_seconds(env: Mapping[str, str]) -> float:
    """Return the seconds that workers have to end. torchrun itself refuses what is no number."""
    try:
        return float(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    except (KeyError, ValueError):
        return DEFAULT_SHUTDOWN


class Times:
    """The seconds of each activity.

    `thawed` is the time at which the last long pause of this process ended, or 0.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self.clock = time.monotonic()
        self.thawed = 0.0

    def spend(self, activity: str) -> None:
        """Count the time since the last call for an activity."""
        now = time.monotonic()
        if now - self.clock > FROZEN:
            self.thawed = time.time()
        self.seconds[activity] += now - self.clock
        self.clock = now
