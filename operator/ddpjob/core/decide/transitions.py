"""The transitions of a job: how its status, and its pods, change when something has happened.

Each function returns a new Status or a Plan. When a transition applies is decided in rules.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob.core.api import names
from ddpjob.core.api.conditions import Conditions, set_condition
from ddpjob.core.api.history import (
    AttemptEnd,
    Retried,
    add_attempt,
    ended_attempt,
    forget_old_failures,
)
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Cause, Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Attempt, Host, PodCounts, Resolved, Status
from ddpjob.core.decide.deletions import clean_up, current_grace
from ddpjob.core.decide.describe import describe, with_status
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.plan import MAX_MESSAGE, NEXT_STEP, Event, Plan, counted

# Begin


def begin_attempt(
    obs: Observation,
    spec: Spec,
    attempt: int,
    now: datetime,
    kept: Sequence[Pod] = (),
) -> Status:
    """Return the status of a new attempt, with the nodes of the spec.

    The pods `kept` stay from the attempt before, and one of them hosts the rendezvous: the name of
    a new pod is not known everywhere at once.
    """
    job = obs.job
    before = job.status.attempt
    births: tuple[int, ...] = ()
    if kept:
        born = {pod.index: pod.born for pod in kept}
        births = tuple(born.get(index, attempt) for index in range(spec.nodes))
    host = _host_among(kept)
    return replace(
        job.status,
        attempt=Attempt(
            attempt,
            start=now,
            had_pods=before.had_pods or before.latched,
            births=births,
            host=host,
            previous_ran=_has_run(obs),
        ),
        failed_nodes=forget_old_failures(job.status.failed_nodes, now),
        pods=PodCounts(desired=spec.nodes),
        resolved=Resolved(
            spec.nproc_per_node,
            spec.world_size,
            spec.accelerator,
            names.rendezvous_endpoint(job.name, attempt, host.address),
        ),
        selector=selector_of(job),
        result={},
    )


def _host_among(kept: Sequence[Pod]) -> Host:
    # A pod without an address is found by its name.
    with_address = [pod for pod in kept if pod.address]
    if not with_address:
        return Host()
    first = min(with_address, key=lambda pod: pod.index)
    return Host(first.index, first.address)


def _has_run(obs: Observation) -> bool:
    """Return True if pods may have trained in the attempt, or in an older one."""
    attempt = obs.status.attempt
    if attempt.running_time is not None:
        return True
    older_run = any(not pod.released for pod in obs.older)
    if attempt.births or older_run:
        # Pods may still run an older attempt. They keep their time for a checkpoint.
        return attempt.previous_ran
    return False


def selector_of(job: Job) -> str:
    """Return the label selector of a job's pods, for the scale subresource."""
    return f"{names.LABEL_JOB_UID}={job.uid}"


def recover(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Continue with the newest attempt that has pods, after a user has changed the status.

    A missing pod counts as lost, since it is not known whether it was created.
    """
    attempt = max(pod.attempt for pod in obs.pods)
    newest = [pod for pod in obs.pods if pod.attempt == attempt]
    nodes = 1 + max(pod.index for pod in newest)
    all_ran = all(pod.started for pod in newest)
    message = (
        f"the status was deleted or replaced by an older one; the job continues with attempt "
        f"{attempt}, the newest that has pods"
    )
    stayed = [pod for pod in newest if pod.born < attempt]
    begun = begin_attempt(obs, spec, attempt, now, stayed)
    was_suspended = begun.has(Condition.SUSPENDED)
    status = replace(
        begun,
        conditions=not_suspended(obs) if was_suspended else begun.conditions,
        # Pods that may have trained get time for a checkpoint.
        attempt=replace(
            begun.attempt,
            running_time=now if all_ran else None,
            latched=True,
            previous_ran=True,
        ),
        phase=Phase.STARTING,
        reason=Reason.STATUS_RECOVERED,
        message=message,
        pods=PodCounts(desired=max(spec.nodes, nodes)),
        start_time=begun.start_time or now,
    )
    event = Event("Warning", Reason.STATUS_RECOVERED, message)
    return Plan(status, events=(event,), wake_after=0.0)


def begin(obs: Observation, spec: Spec, now: datetime) -> Status:
    """Return the status of the first attempt. Only later growth of `spec.retries` counts."""
    retried = Retried(spec.lifecycle.retries)
    budget = replace(obs.status.budget, retried=retried)
    begun = begin_attempt(obs, spec, 0, now)
    begun = replace(begun, start_time=now, budget=budget)
    if begun.has(Condition.SUSPENDED):
        begun = replace(begun, conditions=not_suspended(obs))
    return begun


# End


@dataclass(frozen=True)
class Ending:
    """How a job fails. `record` describes its last attempt, `grace` is for the pods."""

    reason: str
    message: str
    record: AttemptEnd
    grace: int | None = None


def complete(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """End the job as Complete."""
    started = obs.status.start_time or now
    lasted = now - started
    seconds = int(lasted.total_seconds())
    nodes = counted(len(obs.succeeded), "node")
    restarts = counted(obs.status.restarts, "restart")
    message = f"{nodes} succeeded after {seconds} s and {restarts}"
    entry = record(obs, Cause.SUCCEEDED, Reason.SUCCEEDED, message)
    obs = with_ended_attempt(obs, entry, now)
    status = describe(obs, Phase.COMPLETE, Reason.SUCCEEDED, message)
    conditions = _set_finished(obs, Condition.COMPLETE, Reason.SUCCEEDED, message)
    status = replace(
        status,
        attempt=replace(status.attempt, latched=True, succeeded_nodes=()),
        completion_time=now,
        conditions=conditions,
    )
    event = Event("Normal", "Complete", message)
    delete = clean_up(obs, spec, None, now)
    return Plan(status, delete=delete, events=(event,))


def stop(obs: Observation, spec: Spec, reason: str, message: str, now: datetime) -> Plan:
    """End the job as Failed although no attempt of it failed, as after a deadline."""
    entry = record(obs, Cause.STOPPED, reason, message)
    ending = Ending(reason, message, entry, grace_of(obs))
    return fail(obs, spec, ending, now)


def fail(obs: Observation, spec: Spec, ending: Ending, now: datetime) -> Plan:
    step = _next_step(obs.job.name, spec)
    room = MAX_MESSAGE - len(step) - len("; ")
    why = ending.message[:room].rstrip(".")
    message = f"{why}; {step}"
    obs = with_ended_attempt(obs, ending.record, now)
    status = describe(obs, Phase.FAILED, ending.reason, message)
    # Only later growth of the number takes the job up again.
    retried = replace(status.budget.retried, retries=spec.lifecycle.retries)
    conditions = _set_finished(obs, Condition.FAILED, ending.reason, message)
    status = replace(
        status,
        attempt=replace(status.attempt, succeeded_nodes=()),
        completion_time=now,
        budget=replace(status.budget, retried=retried),
        result={},
        conditions=conditions,
    )
    event = Event("Warning", "Failed", message)
    delete = clean_up(obs, spec, ending.grace, now)
    return Plan(status, delete=delete, events=(event,))


def _next_step(name: str, spec: Spec) -> str:
    """Return what a person can do after the job has failed."""
    again = "begins anew, unless its script saves checkpoints itself"
    if spec.checkpoint:
        again = "resumes from its last checkpoint"
    return (
        f"{NEXT_STEP} (ddpjob retry {name}): the job {again}. To change its spec, delete it and "
        "create it again"
    )


def _set_finished(obs: Observation, kind: Condition, reason: str, message: str) -> Conditions:
    """Set Complete or Failed. A finished job is neither Running nor Suspended."""
    conditions = set_condition(obs.status.conditions, kind, True, reason, message)
    if obs.status.has(Condition.SUSPENDED):
        conditions = set_condition(conditions, Condition.SUSPENDED, False, reason, message)
    return set_condition(conditions, Condition.RUNNING, False, reason, message)


# Parts of a transition


def not_suspended(obs: Observation) -> Conditions:
    reason, message = why_resumed(obs)
    return set_condition(obs.status.conditions, Condition.SUSPENDED, False, reason, message)


def why_resumed(obs: Observation) -> tuple[Reason, str]:
    """Return why a job without pods may have them again: the reason and its sentence."""
    if obs.queue is None:
        return Reason.RESUMED, "the job was resumed"
    return Reason.ADMITTED, f"the queue {obs.queue} has given the job room"


def record(obs: Observation, cause: Cause, reason: str, message: str) -> AttemptEnd:
    return AttemptEnd(
        obs.attempt,
        str(cause),
        str(reason),
        message[:MAX_MESSAGE],
    )


def with_ended_attempt(obs: Observation, end: AttemptEnd, now: datetime) -> Observation:
    """Return the Observation with one more entry in the job's history."""
    status = obs.status
    attempt = status.attempt
    entry = ended_attempt(end, attempt.start, attempt.running_time, now)
    attempts = add_attempt(status.attempts, entry)
    return with_status(obs, replace(status, attempts=attempts))


def grace_of(obs: Observation) -> int | None:
    return current_grace(obs.status, obs.attempt)
