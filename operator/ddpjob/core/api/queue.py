"""The queue of a job, in its labels."""

from dataclasses import dataclass
from typing import Any

from ddpjob.core.api.readers import SpecError, mapping_or_empty, quoted
from ddpjob.core.api.times import MAX_INT32

GROUP = "kueue.x-k8s.io"

# Labels of a job, as users of Kueue know them.
LABEL_QUEUE = f"{GROUP}/queue-name"
LABEL_PRIORITY = f"{GROUP}/priority-class"
LABEL_MAX_SECONDS = f"{GROUP}/max-exec-time-seconds"

# A LocalQueue of this name takes what has no queue.
DEFAULT_QUEUE = "default"


@dataclass(frozen=True)
class Queue:
    """What the labels of a job ask of Kueue.

    `max_time`: the seconds that the job may hold its place, as they are written; empty is without a
    limit.
    """

    name: str
    priority_class: str = ""
    max_time: str = ""

    def read_max_time(self) -> int:
        """Return `max_time` in seconds; 0 is without a limit. Raises SpecError."""
        if not self.max_time:
            return 0
        is_number = self.max_time.isdecimal() and len(self.max_time) <= len(str(MAX_INT32))
        if not is_number or not 1 <= int(self.max_time) <= MAX_INT32:
            wanted = f"must be an integer from 1 to {MAX_INT32} in quotes"
            raise SpecError(
                f"metadata.labels.{LABEL_MAX_SECONDS}: {wanted}, got {quoted(self.max_time)}; "
                "correct the label"
            )
        return int(self.max_time)

    def __str__(self) -> str:
        return self.name


def read_queue(labels: Any) -> Queue | None:
    """Return the queue in the labels of a job, or None."""
    found = mapping_or_empty(labels)
    name = found.get(LABEL_QUEUE)
    if not isinstance(name, str) or not name:
        return None
    priority, seconds = found.get(LABEL_PRIORITY), found.get(LABEL_MAX_SECONDS)
    return Queue(name, str(priority or ""), str(seconds or ""))
