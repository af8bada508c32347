"""Jobs and their statuses, in the states that tests begin with."""

from dataclasses import fields as fields_of
from dataclasses import replace

from ddpjob.core.api.conditions import Conditions, find_condition, set_condition, stamp_conditions
from ddpjob.core.api.history import (
    Backoff,
    EndedAttempt,
    FailedNode,
    LastFailure,
    Place,
    Retried,
    UnreachableNode,
    Yielding,
)
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Condition
from ddpjob.core.api.parts import write
from ddpjob.core.api.status import Account, Attempt, Host, PodCounts, Resolved, Status, UsedBudget
from ddpjob.core.api.times import format_time

from .times import NOW, at

JOB_UID = "0b4c6f3e-9d52-4c43-b4f0-2f4c0f6f1d11"

# The end of the message of a failed job without a checkpoint.
WHAT_TO_DO = (
    "correct the cause, then raise spec.retries (ddpjob retry digits): the job begins anew, unless "
    "its script saves checkpoints itself. To change its spec, delete it and create it again"
)


def a_spec(**fields):
    return {"nodes": 2, "image": "trainer:1", "args": ["train.py"], **fields}


def a_manifest(*, name="digits", status=None, generation=1, deleting=False, **spec):
    metadata = {"name": name, "namespace": "ml", "uid": JOB_UID, "generation": generation}
    if deleting:
        metadata["deletionTimestamp"] = format_time(NOW)
    return {"metadata": metadata, "spec": a_spec(**spec), "status": status or {}}


def a_job(*, status: Status | None = None, **fields) -> Job:
    """Return a job of two nodes. Without a `status` the operator has not seen it yet."""
    return Job.from_dict(a_manifest(status=status.to_dict() if status else None, **fields))


def a_condition(kind: Condition, holds: bool = True, *, now=NOW) -> Conditions:
    """Return the conditions of a job with only this one."""
    return stamp_conditions(set_condition((), kind, holds, "Reason", "message"), 1, now)


def condition(status: Status, kind: Condition) -> dict:
    found = find_condition(status.conditions, kind)
    return write(found) if found else {}


# The parts with fields that a test gives by their names alone.
PARTS = {
    field.name: part
    for part, cls in (("attempt", Attempt), ("budget", UsedBudget), ("account", Account))
    for field in fields_of(cls)
}


def changed(status: Status, **fields) -> Status:
    """Return a status with other values of its fields, and of those of its parts."""
    for name, value in fields.items():
        part = PARTS.get(name)
        if part:
            name, value = part, replace(getattr(status, part), **{name: value})
        status = replace(status, **{name: value})
    return status


def a_status(*, attempt=0, nodes=2, latched=True, ran=True, **fields) -> Status:
    """Return the status of a job in the middle of an attempt.

    `latched`: every pod of the attempt was seen. `ran`: all its nodes were running at once.
    """
    status = Status(
        phase="Running" if ran else "Starting",
        reason="NodesRunning" if ran else "CreatingPods",
        observed_generation=1,
        conditions=a_condition(Condition.RUNNING, ran),
        attempt=Attempt(
            attempt,
            start=NOW,
            running_time=NOW if ran else None,
            latched=latched,
            had_pods=attempt > 0,
        ),
        pods=PodCounts(desired=nodes),
        start_time=NOW,
    )
    return changed(status, **fields)


def a_starting_job(*, attempt=0, nodes=2) -> Job:
    """Return a job before the latch: not every pod of its attempt was seen."""
    status = a_status(attempt=attempt, nodes=nodes, latched=False, ran=False)
    return a_job(status=status, nodes=nodes)


def a_running_job(
    *, attempt=0, nodes=2, spec=None, generation=1, deleting=False, **status_fields
) -> Job:
    """Return a job after the latch. All of its nodes ran.

    `spec` are fields of its spec. Fields of its status can be given by name.
    """
    return a_job(
        status=a_status(attempt=attempt, nodes=nodes, **status_fields),
        generation=generation,
        deleting=deleting,
        **{"nodes": nodes, **(spec or {})},
    )


def a_finished_job(
    kind=Condition.COMPLETE, *, ignored_fields=(), completion_time=None, **fields
) -> Job:
    status = a_status(
        conditions=a_condition(kind),
        phase=str(kind),
        ignored_fields=ignored_fields,
        completion_time=completion_time,
    )
    return a_job(status=status, **fields)


# A status with a value in every field, and with all fields in every part.
FULL_STATUS = Status(
    phase="Failed",
    reason="MaxRestartsExceeded",
    message="message",
    pods=PodCounts(desired=4, active=3, ready=2, succeeded=1, failed=1),
    attempt=Attempt(
        2,
        start=NOW,
        running_time=at(5),
        latched=True,
        had_pods=True,
        births=(2, 0),
        host=Host(1, "10.0.0.7"),
        previous_ran=False,
        succeeded_nodes=(0, 3),
        undecided_since=at(6),
        silent_since=at(6),
        starting_since=at(7),
        starting_seconds=3,
        yielding=Yielding("ml/older", at(11)),
    ),
    budget=UsedBudget(
        failures=1,
        disruptions=1,
        announced=3,
        failure_times=(NOW,),
        disruption_times=(at(1),),
        announced_times=(at(2),),
        retried=Retried(1, 1, 1, 2),
    ),
    account=Account("training", at(5), {"queued": 1, "starting": 4, "training": 5}),
    last_failure=LastFailure(
        1, "Failure", "WorkerFailed", "message", "node-1", "digits-1-1", 1, 1, time=NOW
    ),
    attempts=(
        EndedAttempt(
            1,
            "Failure",
            "WorkerFailed",
            "message",
            "node-1",
            "digits-0-1",
            1,
            1,
            start=NOW,
            running_time=at(2),
            training_time=at(4),
            untrained_seconds=2,
            end=at(9),
            first_step=1,
            last_step=9,
            total_steps=90,
            steps_lost=3,
        ),
    ),
    failed_nodes=(FailedNode("node-1", 2, NOW),),
    backoff=Backoff(2, at(10)),
    result={"accuracy": "0.9"},
    resolved=Resolved(1, 4, "cpu", "x"),
    ignored_fields=("spec.later",),
    start_time=NOW,
    completion_time=at(60),
    conditions=a_condition(Condition.FAILED),
    observed_generation=3,
    selector="ddpjob.dev/job-uid=x",
    place=Place(2, "uid-of-workload"),
    active_since=at(8),
    active_seconds=9,
    unreachable_nodes=(UnreachableNode("node-2", NOW, "uid-2"),),
    stray_pods=("copy",),
)
