"""A new attempt: after a failed one, with another number of nodes, or to give way to another job.

Kept pods have the same index in the new attempt. The others are deleted.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob.core.api.conditions import set_condition
from ddpjob.core.api.history import (
    YIELD_TIME,
    AttemptEnd,
    Backoff,
    LastFailure,
    Retried,
    Yielding,
    count_failed_node,
    forget_old_failures,
)
from ddpjob.core.api.names import Cause, Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Status, UsedBudget, starting_seconds
from ddpjob.core.decide.budget import count_restart, kept_backoff
from ddpjob.core.decide.causes import certain_verdict
from ddpjob.core.decide.deletions import delete_all_unfinished
from ddpjob.core.decide.describe import stop_running, with_status
from ddpjob.core.decide.gangs import pods_with_room
from ddpjob.core.decide.hopeless import PASSING, failure_of, hopeless_ending, may_repeat
from ddpjob.core.decide.in_place import pods_that_stay
from ddpjob.core.decide.transitions import begin_attempt, fail, grace_of, record, with_ended_attempt
from ddpjob.core.decide.verdict import Verdict
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.plan import MAX_MESSAGE, Event, Plan, counted

REASONS = {
    Cause.FAILURE: Reason.FAILURE,
    Cause.HANG: Reason.HANG,
    Cause.DISRUPTION: Reason.DISRUPTION,
    Cause.NOT_RESUMED: Reason.NOT_RESUMED,
    Cause.RENDEZVOUS: Reason.RENDEZVOUS_TIMEOUT,
}


@dataclass(frozen=True)
class Change:
    """Why a new attempt begins: the reason in its status, the event, and the kept pods."""

    reason: Reason
    event: Event
    stay: tuple[Pod, ...] = ()


def restart_or_fail(obs: Observation, spec: Spec, verdict: Verdict, now: datetime) -> Plan:
    """Restart the gang after a failed attempt, or end the job if a restart cannot help."""
    counted_obs = count_failure(obs, spec, verdict, now)
    if isinstance(counted_obs, Plan):
        return counted_obs
    event = Event("Warning", "Restarting", verdict.message)
    stay = pods_that_stay(counted_obs, spec, verdict.cause, verdict.pod, now)
    change = Change(REASONS[verdict.cause], event, stay)
    plan = replace_gang(counted_obs, spec, change, now)
    return replace(plan, confirm=lost_pods(obs), confirm_nodes=_lost_nodes(verdict))


def _lost_nodes(verdict: Verdict) -> tuple[str, ...]:
    """Return the Kubernetes node that the API server has to confirm as unreachable."""
    is_lost = verdict.reason == Reason.NODE_UNREACHABLE
    return (verdict.pod.node_name,) if is_lost and verdict.pod else ()


def lost_pods(obs: Observation) -> tuple[str, ...]:
    """Return the pods that the API server has to confirm as gone: they must not train on."""
    return tuple(map(obs.pod_name, obs.lost))


def count_failure(
    obs: Observation,
    spec: Spec,
    verdict: Verdict,
    now: datetime,
) -> Observation | Plan:
    """Return the Observation with an ended attempt in its history, its budget and its back-off.

    Return the end of the job as a Plan if no other attempt can help.
    """
    policy = spec.failure_policy
    if verdict.cause is Cause.NOT_RESUMED:
        # People still look for the failure before.
        entry: AttemptEnd = record(obs, verdict.cause, verdict.reason, verdict.message)
    else:
        obs = with_status(obs, _with_failure(obs, verdict, now))
        entry = obs.status.last_failure
    failure = failure_of(obs, policy, verdict, now)
    ending = hopeless_ending(failure)
    if ending:
        plan = fail(obs, spec, ending, now)
        return replace(plan, confirm=lost_pods(obs), confirm_nodes=_lost_nodes(verdict))
    status = count_restart(obs.status, verdict.cause, verdict.reason, policy, now)
    if may_repeat(failure):
        backoff = status.backoff.at_least(now + PASSING)
        status = replace(status, backoff=backoff)
    obs = with_status(obs, status)
    return with_ended_attempt(obs, entry, now)


def _with_failure(obs: Observation, verdict: Verdict, now: datetime) -> Status:
    """Return the status with the verdict, and with the Kubernetes node blamed by it."""
    status = replace(obs.status, last_failure=_last_failure(obs, verdict, now))
    pod = verdict.pod
    if pod is None or not pod.node_name or not verdict.blames_node:
        return status
    recent = forget_old_failures(status.failed_nodes, now)
    failed_nodes = count_failed_node(recent, pod.node_name, now)
    return replace(status, failed_nodes=failed_nodes)


def _last_failure(obs: Observation, verdict: Verdict, now: datetime) -> LastFailure:
    pod = verdict.pod
    finished = pod.finished if pod else None
    return LastFailure(
        obs.attempt,
        str(verdict.cause),
        str(verdict.reason),
        verdict.message[:MAX_MESSAGE],
        node=pod.node_name if pod else "",
        pod=obs.pod_name(verdict.index),
        rank=verdict.rank,
        exit_code=verdict.exit_code,
        time=finished or now,
    )


def resize(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Begin an attempt with another number of nodes. It costs no budget and no back-off.

    A certain failure at the same look is counted all the same.
    """
    verdict = certain_verdict(obs, now)
    if verdict:
        return restart_or_fail(obs, spec, verdict, now)
    message = f"nodes changed from {obs.status.pods.desired} to {spec.nodes}"
    entry = record(obs, Cause.RESIZED, Reason.RESIZED, message)
    backoff = kept_backoff(obs.status, now)
    obs = with_status(obs, replace(obs.status, backoff=backoff))
    event = Event("Normal", "Resized", message)
    stay = pods_that_stay(obs, spec, Cause.RESIZED, None, now)
    change = Change(Reason.RESIZED, event, stay)
    obs = with_ended_attempt(obs, entry, now)
    return replace_gang(obs, spec, change, now)


def retry(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Take a Failed job up again, with its counters, its history and its last checkpoint.

    Its budgets and its active time begin anew.
    """
    status = obs.status
    message = f"the job was taken up again: spec.retries is {spec.lifecycle.retries}"
    conditions = set_condition(status.conditions, Condition.FAILED, False, Reason.RETRIED, message)
    # Pods left alone may have gone on, and a user may have restored an old status.
    newest = max((pod.attempt for pod in obs.pods), default=0)
    running_time = status.attempt.running_time
    if running_time is None and obs.current and obs.all_run:
        running_time = now
    used = status.budget
    costs = (used.failures, used.disruptions, used.announced)
    status = replace(
        status,
        attempt=replace(
            status.attempt,
            number=max(obs.attempt, newest),
            running_time=running_time,
        ),
        conditions=conditions,
        completion_time=None,
        active_seconds=0,
        backoff=Backoff(),
        budget=UsedBudget(*costs, retried=Retried(spec.lifecycle.retries, *costs)),
    )
    event = Event("Normal", "Retried", message)
    change = Change(Reason.RETRIED, event)
    obs = with_status(obs, status)
    return replace_gang(obs, spec, change, now)


def give_way(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Give back the pods of an incomplete gang, to let an older gang become complete."""
    older = obs.older_gang
    assert older is not None
    with_room = pods_with_room(obs.current, obs.is_under_quota)
    wanted = counted(obs.status.pods.desired, "pod")
    message = (
        f"only {len(with_room)} of {wanted} had room; all are "
        f"deleted to make room for {older}, which is incomplete too"
    )
    entry = record(obs, Cause.YIELDED, Reason.YIELDED, message)
    event = Event("Normal", Reason.YIELDED, message)
    change = Change(Reason.YIELDED, event)
    obs = with_ended_attempt(obs, entry, now)
    plan = replace_gang(obs, spec, change, now)
    yielding = Yielding(older.uid, now + YIELD_TIME)
    attempt = replace(plan.status.attempt, yielding=yielding)
    status = replace(plan.status, attempt=attempt)
    return replace(plan, status=status)


def replace_gang(obs: Observation, spec: Spec, change: Change, now: datetime) -> Plan:
    """Return the plan of a new attempt: its status, and the deletion of all pods but the kept ones.

    The kept pods get their assignment once the status is written.
    """
    message = change.event.message[:MAX_MESSAGE]
    begun = begin_attempt(obs, spec, obs.attempt + 1, now, change.stay)
    attempt = begun.attempt
    if _never_started(obs, change.reason):
        # Such a gang does not get the time of startupDeadlineSeconds again.
        waited = starting_seconds(obs.status.attempt, now)
        attempt = replace(attempt, starting_seconds=waited)
    status = replace(
        begun,
        attempt=attempt,
        phase=Phase.RESTARTING,
        reason=change.reason,
        message=message,
        conditions=stop_running(begun.conditions, change.reason, message),
    )
    begins = f"attempt {attempt.number} begins"
    if change.stay:
        begins += f" and keeps {counted(len(change.stay), 'pod')}"
    announcement = f"{begins}: {change.event.message}"[:MAX_MESSAGE]
    return Plan(
        status,
        delete=delete_all_unfinished(obs, grace_of(obs), now, change.stay),
        events=(replace(change.event, message=announcement),),
        wake_after=0.0,
    )


def _never_started(obs: Observation, reason: Reason) -> bool:
    """Return True if the pods of the ended attempt have not met, as its reason shows."""
    if reason in (Reason.RENDEZVOUS_TIMEOUT, Reason.YIELDED):
        return True
    return reason == Reason.DISRUPTION and obs.status.attempt.running_time is None
