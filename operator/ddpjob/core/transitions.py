"""The transitions of a job: how its status, and its pods, change when something has happened.

Each function returns a new Status or a Plan. When a transition applies is decided in decide.py.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ddpjob.core import names
from ddpjob.core.attempts import begin_attempt, selector_of
from ddpjob.core.budget import count_restart, is_used_up
from ddpjob.core.causes import Verdict
from ddpjob.core.conditions import Conditions, set_condition
from ddpjob.core.dead_nodes import describe_wait
from ddpjob.core.deletions import clean_up, current_grace, delete_all_unfinished
from ddpjob.core.describe import describe, describe_pods, stop_running, with_status
from ddpjob.core.gangs import pods_with_room
from ddpjob.core.history import (
    Yielding,
    add_attempt,
    count_failed_node,
    ended_attempt,
    forget_old_failures,
)
from ddpjob.core.names import Cause, Condition, Phase, Reason
from ddpjob.core.observe import Observation
from ddpjob.core.plan import MAX_MESSAGE, NEXT_STEP, Event, Plan, counted
from ddpjob.core.pods import INIT_FAILED
from ddpjob.core.policy import FailurePolicy
from ddpjob.core.readers import Dict
from ddpjob.core.spec import Spec
from ddpjob.core.status import Backoff, PodCounts, Status, starting_seconds
from ddpjob.core.times import format_time, since

# How long a gang waits for an older one that it gave its room to.
YIELD_TIME = timedelta(minutes=10)

RESUMED = "the job was resumed"

REASONS = {
    Cause.FAILURE: Reason.FAILURE,
    Cause.DISRUPTION: Reason.DISRUPTION,
    Cause.RENDEZVOUS: Reason.RENDEZVOUS_TIMEOUT,
}


# Begin


def recover(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Continue with the newest attempt that has pods, after somebody has changed the status.

    Which pods of it were created is not known. So a missing one counts as lost.
    """
    attempt = max(pod.attempt for pod in obs.pods)
    nodes = 1 + max(pod.index for pod in obs.pods if pod.attempt == attempt)
    message = (
        f"the status was deleted or replaced by an older one; the job continues with attempt "
        f"{attempt}, the newest that has pods"
    )
    begun = begin_attempt(obs, spec, attempt, now)
    all_ran = all(pod.started for pod in obs.pods if pod.attempt == attempt)
    status = replace(
        begun,
        conditions=_not_suspended(obs) if begun.has(Condition.SUSPENDED) else begun.conditions,
        # Pods that may have trained get time for a checkpoint.
        running_time=now if all_ran else None,
        phase=Phase.STARTING,
        reason=Reason.STATUS_RECOVERED,
        message=message,
        attempt_started=attempt,
        previous_attempt_ran=None,
        pods=PodCounts(desired=max(spec.nodes, nodes)),
        start_time=begun.start_time or now,
    )
    event = Event("Warning", Reason.STATUS_RECOVERED, message)
    return Plan(status, events=(event,), wake_after=0.0)


# End


@dataclass(frozen=True)
class Ending:
    """How a job fails. `record` describes its last attempt, `grace` is that of its pods."""

    reason: str
    message: str
    record: Dict
    grace: int | None = None


def complete(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """End the job as Complete."""
    started = obs.status.start_time or now
    seconds = int(since(started, now).total_seconds())
    message = (
        f"{counted(len(obs.succeeded), 'node')} succeeded after {seconds} s and "
        f"{counted(obs.status.restarts, 'restart')}"
    )
    obs = _with_ended_attempt(obs, _record(obs, Cause.SUCCEEDED, Reason.SUCCEEDED, message), now)
    status = replace(
        describe(obs, Phase.COMPLETE, Reason.SUCCEEDED, message),
        attempt_started=obs.attempt,
        completion_time=now,
        succeeded_nodes=(),
        conditions=_set_finished(obs, Condition.COMPLETE, Reason.SUCCEEDED, message),
    )
    event = Event("Normal", "Complete", message)
    return Plan(status, delete=clean_up(obs, spec, None, now), events=(event,))


def stop(obs: Observation, spec: Spec, reason: str, message: str, now: datetime) -> Plan:
    """End the job as Failed although no attempt of it failed, as after a deadline."""
    record = _record(obs, Cause.STOPPED, reason, message)
    return _fail(obs, spec, Ending(reason, message, record, _grace(obs)), now)


def _fail(obs: Observation, spec: Spec, ending: Ending, now: datetime) -> Plan:
    step = _next_step(spec)
    message = f"{ending.message[: MAX_MESSAGE - len(step) - 2].rstrip('.')}; {step}"
    obs = _with_ended_attempt(obs, ending.record, now)
    status = replace(
        describe(obs, Phase.FAILED, ending.reason, message),
        completion_time=now,
        succeeded_nodes=(),
        result={},
        conditions=_set_finished(obs, Condition.FAILED, ending.reason, message),
    )
    event = Event("Warning", "Failed", message)
    return Plan(status, delete=clean_up(obs, spec, ending.grace, now), events=(event,))


def _next_step(spec: Spec) -> str:
    """Return what a person can do after the job has failed."""
    again = "it begins anew, unless its script saves checkpoints itself"
    if spec.checkpoint:
        again = "it resumes from its last checkpoint"
    return f"{NEXT_STEP}: {again}"


def _set_finished(obs: Observation, kind: Condition, reason: str, message: str) -> Conditions:
    """Set Complete or Failed. A finished job is neither Running nor Suspended."""
    conditions = set_condition(obs.status.conditions, kind, True, reason, message)
    if obs.status.has(Condition.SUSPENDED):
        conditions = set_condition(conditions, Condition.SUSPENDED, False, reason, message)
    return set_condition(conditions, Condition.RUNNING, False, reason, message)


# Restart


def restart_or_fail(obs: Observation, spec: Spec, verdict: Verdict, now: datetime) -> Plan:
    """Restart the gang after a failed attempt, or end the job if that cannot help."""
    policy = spec.failure_policy
    obs = with_status(obs, _with_failure(obs, verdict, now))
    ending = _hopeless(obs.status, policy, verdict, now)
    if ending:
        return _fail(obs, spec, ending, now)
    record = obs.status.last_failure
    counted_status = count_restart(obs.status, verdict.cause, policy, now)
    event = Event("Warning", "Restarting", verdict.message)
    obs = _with_ended_attempt(with_status(obs, counted_status), record, now)
    return _replace_gang(obs, spec, REASONS[verdict.cause], event, now)


def _hopeless(
    status: Status, policy: FailurePolicy, verdict: Verdict, now: datetime
) -> Ending | None:
    """Return the end of a job that must not restart, or None."""
    failed = verdict.cause is Cause.FAILURE
    if failed and verdict.script_missing:
        reason: str = Reason.SCRIPT_NOT_FOUND
        why = "Python did not find it; check spec.args and the image"
    elif _has_own_exit_code(verdict) and not policy.is_retryable(verdict.exit_code):
        reason = Reason.NON_RETRYABLE
        why = "failurePolicy.nonRetryableExitCodes has this code, so the job does not restart"
    elif not is_used_up(status, verdict.cause, policy, now):
        return None
    elif failed:
        reason = Reason.MAX_RESTARTS
        why = f"maxRestarts={policy.max_restarts} is used up"
    else:
        reason = Reason.MAX_DISRUPTIONS
        why = f"maxDisruptions={policy.max_disruptions} is used up"
    message = f"{verdict.message}; {why}"
    grace = current_grace(status, status.attempt or 0)
    return Ending(reason, message, status.last_failure, grace)


def _has_own_exit_code(verdict: Verdict) -> bool:
    """Return True if the exit code is that of a worker which failed by itself.

    A follower and an init container have exit codes too.
    """
    return verdict.is_own_failure and verdict.reason != INIT_FAILED


def _with_failure(obs: Observation, verdict: Verdict, now: datetime) -> Status:
    """Return the status with the verdict, and with the Kubernetes node that it speaks against."""
    status = replace(obs.status, last_failure=_last_failure(obs, verdict, now))
    pod = verdict.pod
    if pod is None or not pod.node_name or not verdict.blames_node:
        return status
    recent = forget_old_failures(status.failed_nodes, now)
    return replace(status, failed_nodes=count_failed_node(recent, pod.node_name, now))


def _last_failure(obs: Observation, verdict: Verdict, now: datetime) -> dict[str, Any]:
    pod = verdict.pod
    finished = pod.finished if pod else None
    fields = {
        **_record(obs, verdict.cause, verdict.reason, verdict.message),
        "node": pod.node_name if pod else "",
        "pod": names.pod_name(obs.job.name, obs.attempt, verdict.index),
        "rank": verdict.rank,
        "exitCode": verdict.exit_code,
        "time": format_time(finished or now),
    }
    return {key: value for key, value in fields.items() if value not in (None, "")}


def resize(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Begin an attempt with another number of nodes. It costs no budget and no back-off."""
    message = f"nodes changed from {obs.status.pods.desired} to {spec.nodes}"
    record = _record(obs, Cause.RESIZED, Reason.RESIZED, message)
    obs = with_status(obs, replace(obs.status, backoff=Backoff()))
    event = Event("Normal", "Resized", message)
    return _replace_gang(_with_ended_attempt(obs, record, now), spec, Reason.RESIZED, event, now)


def give_way(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Give the pods of an incomplete gang back, so that an older gang can become complete."""
    older = obs.older_gang
    with_room = pods_with_room(obs.current, obs.is_under_quota)
    message = (
        f"only {len(with_room)} of {counted(obs.status.pods.desired, 'pod')} had room; all are "
        f"deleted to make room for the older job {older}, which is incomplete too"
    )
    record = _record(obs, Cause.YIELDED, Reason.YIELDED, message)
    event = Event("Normal", Reason.YIELDED, message)
    obs = _with_ended_attempt(obs, record, now)
    plan = _replace_gang(obs, spec, Reason.YIELDED, event, now)
    yielding = Yielding(older, now + YIELD_TIME)
    return replace(plan, status=replace(plan.status, yielding=yielding))


def _replace_gang(
    obs: Observation, spec: Spec, reason: Reason, event: Event, now: datetime
) -> Plan:
    """Return the plan of a new attempt: its status, and the deletion of the old pods."""
    message = event.message[:MAX_MESSAGE]
    begun = begin_attempt(obs, spec, obs.attempt + 1, now)
    never_started = reason in (Reason.RENDEZVOUS_TIMEOUT, Reason.YIELDED)
    status = replace(
        begun,
        # A gang that has never started does not get the time of startupDeadlineSeconds again.
        starting_seconds=starting_seconds(obs.status, now) if never_started else 0,
        phase=Phase.RESTARTING,
        reason=reason,
        message=message,
        conditions=stop_running(begun.conditions, reason, message),
    )
    announcement = f"attempt {begun.attempt} begins: {event.message}"[:MAX_MESSAGE]
    return Plan(
        status,
        delete=delete_all_unfinished(obs, _grace(obs), now),
        events=(replace(event, message=announcement),),
        wake_after=0.0,
    )


# Suspend and resume


def suspend(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Give the pods of the job back. They get their grace period, to write a checkpoint."""
    remaining = [pod for pod in obs.pods if not pod.released]
    message = "suspended; to resume, set spec.suspend to false"
    if remaining:
        wait = describe_wait(obs, remaining[0], now)
        message = f"suspending: waiting for {describe_pods(remaining)} to end{wait}"
    delete = delete_all_unfinished(obs, _grace(obs), now)
    reason = Reason.SUSPENDED
    events: tuple[Event, ...] = ()
    if not obs.status.has(Condition.SUSPENDED):
        events = (Event("Normal", "Suspended", message),)
        if obs.status.attempt is not None:
            record = _record(obs, Cause.SUSPENDED, reason, "the job was suspended")
            obs = _with_ended_attempt(obs, record, now)
    status = describe(obs, Phase.SUSPENDED, reason, message)
    if status.attempt is None:
        selector = selector_of(obs.job)
        status = replace(status, pods=PodCounts(desired=spec.nodes), selector=selector)
    conditions = stop_running(status.conditions, reason, message)
    status = replace(
        status,
        conditions=set_condition(conditions, Condition.SUSPENDED, True, reason, message),
        backoff=Backoff(),
        undecided_since=None,
    )
    return Plan(status, delete=delete, events=events)


def resume(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Begin a new attempt after a suspension. It costs nothing."""
    event = Event("Normal", "Resumed", RESUMED)
    resumed = with_status(obs, replace(obs.status, conditions=_not_suspended(obs)))
    return _replace_gang(resumed, spec, Reason.RESUMED, event, now)


def begin(obs: Observation, spec: Spec, now: datetime) -> Status:
    """Return the status of the first attempt."""
    begun = replace(begin_attempt(obs, spec, 0, now), start_time=now)
    was_suspended = begun.has(Condition.SUSPENDED)
    return replace(begun, conditions=_not_suspended(obs)) if was_suspended else begun


def _not_suspended(obs: Observation) -> Conditions:
    conditions = obs.status.conditions
    return set_condition(conditions, Condition.SUSPENDED, False, Reason.RESUMED, RESUMED)


def _record(obs: Observation, cause: Cause, reason: str, message: str) -> dict[str, Any]:
    return {
        "attempt": obs.attempt,
        "cause": str(cause),
        "reason": str(reason),
        "message": message[:MAX_MESSAGE],
    }


def _with_ended_attempt(obs: Observation, record: Dict, now: datetime) -> Observation:
    """Return the Observation with one more entry in the job's history."""
    status = obs.status
    entry = ended_attempt(record, status.attempt_time, now)
    return with_status(obs, replace(status, attempts=add_attempt(status.attempts, entry)))


def _grace(obs: Observation) -> int | None:
    return current_grace(obs.status, obs.attempt)
