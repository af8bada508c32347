"""Kubernetes events, as objects to post."""

import uuid
from datetime import UTC, datetime
from typing import Any

from ddpjob.core import names
from ddpjob.core.job import Job
from ddpjob.core.plan import Event
from ddpjob.core.times import format_time


def event_body(job: Job, event: Event, identity: str) -> dict[str, Any]:
    """Return a core/v1 Event about a job. `identity` names the operator that reports it."""
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
