"""Gangs that wait for each other: each holds a part of the room that both need.

The older job keeps its pods. The younger one gives its pods back, see decide.py.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from ddpjob.core.job import Job
from ddpjob.core.names import Reason
from ddpjob.core.observe import Pod

# A job whose creation time cannot be read is the youngest.
NEVER = datetime.max.replace(tzinfo=UTC)


def find_older_gang(job: Job, others: Iterable[Job]) -> str:
    """Return the oldest job that keeps `job` from starting, as `namespace/name`; empty if none.

    `others` are gangs that hold room. The one found is incomplete too, for want of nodes or of the
    quota of the same namespace. If `job` has given way to it already, it counts until all its nodes
    run.
    """
    older = [other for other in others if _age(other) < _age(job) and _is_in_the_way(other, job)]
    oldest = min(older, key=_age, default=None)
    return _name(oldest) if oldest else ""


def holds_room(job: Job, pods: Iterable[Pod]) -> bool:
    """Return True if an incomplete gang has pods that use up a quota, or room on nodes."""
    return bool(pods_with_room(pods, job.status.reason == Reason.QUOTA))


def pods_with_room(pods: Iterable[Pod], under_quota: bool) -> list[Pod]:
    """Return the pods that use up room: a quota counts each, a cluster those that have a node."""
    return [pod for pod in pods if not pod.ended and (under_quota or pod.node_name)]


def _is_in_the_way(other: Job, job: Job) -> bool:
    status = other.status
    if status.finished or status.starting_since is None:
        return False
    if job.status.yielding and job.status.yielding.to == _name(other):
        return True
    if status.reason == Reason.QUOTA:
        return other.namespace == job.namespace
    return status.reason == Reason.UNSCHEDULABLE


def _age(job: Job) -> tuple[datetime, str]:
    return job.created or NEVER, job.uid


def _name(job: Job) -> str:
    return f"{job.namespace}/{job.name}"
