"""The status of an attempt that begins."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from ddpjob.core.api import names
from ddpjob.core.api.history import forget_old_failures
from ddpjob.core.api.job import Job
from ddpjob.core.api.spec import Spec
from ddpjob.core.api.status import Host, PodCounts, Status
from ddpjob.core.observe.observation import Observation, Pod


def begin_attempt(
    obs: Observation, spec: Spec, attempt: int, now: datetime, kept: Sequence[Pod] = ()
) -> Status:
    """Return the status of an attempt that begins now, with the nodes of the spec.

    The pods `kept` stay from the attempt before, and one of them hosts the rendezvous: the name of
    a new pod is not known everywhere at once.
    """
    job = obs.job
    status = job.status
    births = {pod.index: pod.born for pod in kept}
    first = min(kept, key=lambda pod: pod.index, default=None)
    host = Host(first.index, first.address) if first else Host()
    ran: bool | None = status.running_time is not None
    if not ran and (status.pod_attempts or any(not pod.released for pod in obs.older)):
        # Pods may still run an older attempt. They keep their time for a checkpoint.
        ran = status.previous_attempt_ran
    return replace(
        status,
        attempt=attempt,
        attempt_time=now,
        pod_attempts=tuple(births.get(i, attempt) for i in range(spec.nodes)) if kept else (),
        host=host,
        previous_attempt_ran=ran if attempt > 0 else None,
        running_time=None,
        undecided_since=None,
        silent_since=None,
        starting_since=None,
        starting_seconds=0,
        yielding=None,
        failed_nodes=forget_old_failures(status.failed_nodes, now),
        pods=PodCounts(desired=spec.nodes),
        resolved={
            "nprocPerNode": spec.nproc_per_node,
            "worldSize": spec.world_size,
            "accelerator": spec.accelerator,
            "rendezvous": names.rendezvous_endpoint(job.name, attempt, host.address),
        },
        selector=selector_of(job),
        succeeded_nodes=(),
        result={},
    )


def selector_of(job: Job) -> str:
    """Return the label selector of a job's pods, for the scale subresource."""
    return f"{names.LABEL_JOB_UID}={job.uid}"
