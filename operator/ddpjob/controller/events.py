"""Kubernetes events about jobs."""

import logging
import uuid
from collections.abc import Set
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


@dataclass
class Reporter:
    """Logs events and posts them. `identity` names this operator."""

    writer: Writer
    identity: str
    # The last message of each job from `post_once`, by UID.
    _standing: dict[str, str] = field(default_factory=dict)

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

    async def post_once(self, job: Job, reason: str, message: str) -> None:
        """Post an event about an obstacle, unless the last one has the same message."""
        if message == self._standing.get(job.uid):
            return
        if await self.post(job, Event("Warning", reason, message[:MAX_MESSAGE])):
            self._standing[job.uid] = message

    def forget_others(self, uids: Set[str]) -> None:
        """Forget the messages of all jobs but these."""
        self._standing = {uid: text for uid, text in self._standing.items() if uid in uids}


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
