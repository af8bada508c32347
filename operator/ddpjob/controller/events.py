"""Kubernetes events about jobs."""

import logging
import time
import uuid
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ddpjob.controller.writer import Writer
from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.times import format_time
from ddpjob.core.plan import MAX_MESSAGE, Event
from ddpjob.kube.errors import CallFailed
from ddpjob.kube.kinds import EVENTS
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)

# Seconds until an event about a lasting obstacle is repeated. By default, an API server keeps
# events for one hour.
REPEAT_AFTER = 3000.0


@dataclass(frozen=True, slots=True)
class Posted:
    """The obstacle of the last event of a reason, and when it was posted, in seconds of a clock."""

    obstacle: str
    time: float


@dataclass
class Reporter:
    """Logs events and posts them. `identity` names this operator. `clock` gives seconds."""

    writer: Writer
    identity: str
    clock: Callable[[], float] = time.monotonic
    # The last event from `post_once`, by the job's UID and the reason.
    _standing: dict[tuple[str, str], Posted] = field(default_factory=dict)

    async def post(self, job: Job, event: Event) -> bool:
        """Post one event. Return True if it was posted. Raises nothing but LeaseLost."""
        key = f"{job.namespace}/{job.name}"
        extra = {"job": key, "reason": event.reason}
        log.info("%s: %s: %s", key, event.reason, event.message, extra=extra)
        body = event_body(job, event, self.identity)
        try:
            await self.writer.write(Request(Verb.CREATE, EVENTS, job.namespace, body=body))
        except CallFailed as error:
            log.warning("%s: event %s was not posted: %s", key, event.reason, error)
            return False
        return True

    async def post_once(self, job: Job, reason: str, message: str, obstacle: str = "") -> None:
        """Post an event about an obstacle, unless the last one of this reason had the same.

        `obstacle` identifies it if the message changes with time. An obstacle that lasts is posted
        again before the API server removes its event.
        """
        now = self.clock()
        obstacle = obstacle or message
        last = self._standing.get((job.uid, reason))
        if last and last.obstacle == obstacle and now - last.time < REPEAT_AFTER:
            return
        if await self.post(job, Event("Warning", reason, message[:MAX_MESSAGE])):
            self._standing[job.uid, reason] = Posted(obstacle, now)

    def forget(self, uid: str, reason: str) -> None:
        """Forget an obstacle that is gone. If it comes back, it is posted at once."""
        self._standing.pop((uid, reason), None)

    def forget_others(self, uids: Set[str]) -> None:
        """Forget the obstacles of all jobs but these."""
        self._standing = {key: last for key, last in self._standing.items() if key[0] in uids}


def event_body(job: Job, event: Event, identity: str) -> dict[str, Any]:
    """Return a core/v1 Event about a job. `identity` names the reporting operator."""
    now = format_time(datetime.now(UTC))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{job.name}.{uuid.uuid4().hex[:16]}",
            "namespace": job.namespace,
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": event.kind,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": names.MANAGER},
        "reportingComponent": f"{names.GROUP}/operator",
        "reportingInstance": identity,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
