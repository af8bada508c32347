"""Measure the time of a pod for each activity."""

import time

ACTIVITIES = (
    "setup",
    "waiting",
    "starting",
    "training",
    "ending",
)

# After a pause of so many seconds, such as a frozen machine, heartbeats get their time again.
FROZEN = 1.0


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
