"""The status of an attempt that begins."""

from dataclasses import replace
from datetime import datetime

from ddpjob.core import names
from ddpjob.core.history import forget_old_failures
from ddpjob.core.job import Job
from ddpjob.core.observe import Observation
from ddpjob.core.spec import Spec
from ddpjob.core.status import PodCounts, Status


def begin_attempt(obs: Observation, spec: Spec, attempt: int, now: datetime) -> Status:
    """Return the status of an attempt that begins now, with the nodes of the spec."""
    job = obs.job
    status = job.status
    host = names.hostname(attempt, 0, spec.nodes)
    ran: bool | None = status.running_time is not None
    if not ran and any(not pod.released for pod in obs.older):
        # Pods of an older attempt still run. They keep their time for a checkpoint.
        ran = status.previous_attempt_ran
    return replace(
        status,
        attempt=attempt,
        attempt_time=now,
        previous_attempt_ran=ran if attempt > 0 else None,
        running_time=None,
        undecided_since=None,
        starting_since=None,
        starting_seconds=0,
        yielding=None,
        failed_nodes=forget_old_failures(status.failed_nodes, now),
        pods=PodCounts(desired=spec.nodes),
        resolved={
            "nprocPerNode": spec.nproc_per_node,
            "worldSize": spec.world_size,
            "accelerator": spec.accelerator,
            "rendezvous": f"{host}.{job.name}:{names.RENDEZVOUS_PORT}",
        },
        selector=selector_of(job),
        succeeded_nodes=(),
        result={},
    )


def selector_of(job: Job) -> str:
    """Return the label selector of a job's pods, for the scale subresource."""
    return f"{names.LABEL_JOB_UID}={job.uid}"
