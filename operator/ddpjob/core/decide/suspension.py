"""Suspend a job, for a user or for a queue, and resume it."""

from dataclasses import replace
from datetime import datetime

from ddpjob.core.api.conditions import set_condition
from ddpjob.core.api.names import Cause, Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import PodCounts, Status
from ddpjob.core.decide.budget import kept_backoff
from ddpjob.core.decide.causes import certain_verdict
from ddpjob.core.decide.dead_nodes import describe_wait
from ddpjob.core.decide.deletions import delete_all_unfinished
from ddpjob.core.decide.describe import describe, describe_pods, stop_running, with_status
from ddpjob.core.decide.restarts import Change, count_failure, lost_pods, replace_gang
from ddpjob.core.decide.transitions import (
    grace_of,
    not_suspended,
    record,
    selector_of,
    why_resumed,
    with_ended_attempt,
)
from ddpjob.core.decide.verdict import Verdict
from ddpjob.core.observe.observation import Finding, Observation
from ddpjob.core.plan import MAX_MESSAGE, Event, Plan


def suspend(obs: Observation, spec: Spec, why: Finding, now: datetime) -> Plan:
    """Give the pods of the job back, because it may not run. They get their grace period.

    A failure that is certain when the suspension begins is counted. Pods that end later were ended
    by the suspension.
    """
    begins = not obs.status.has(Condition.SUSPENDED)
    failure = _failure_before(obs, now) if begins else None
    if failure:
        counted_obs = count_failure(obs, spec, failure, now)
        if isinstance(counted_obs, Plan):
            return counted_obs
        obs = counted_obs
    message = _describe_suspension(obs, why, now)
    delete = delete_all_unfinished(obs, grace_of(obs), now)
    events: tuple[Event, ...] = ()
    if begins:
        events = (Event("Normal", why.reason, message[:MAX_MESSAGE]),)
        if not failure:
            obs = _end_attempt(obs, why, now)
    status = _suspended(obs, spec, why, message)
    if begins and not failure:
        status = replace(status, backoff=kept_backoff(status, now))
    confirm = lost_pods(obs) if failure else ()
    return Plan(status, delete=delete, events=events, confirm=confirm)


def _failure_before(obs: Observation, now: datetime) -> Verdict | None:
    """Return the failure of the attempt before its suspension, if it is certain."""
    if obs.status.attempt.number is None:
        return None
    # After the status was lost, the pods may end because of a suspension before.
    if obs.status.reason == Reason.STATUS_RECOVERED:
        return None
    return certain_verdict(obs, now)


def _is_asked_for(why: Finding) -> bool:
    """Return True if the user has suspended the job, and no queue."""
    return why.reason == Reason.SUSPENDED


def _describe_suspension(obs: Observation, why: Finding, now: datetime) -> str:
    remaining = obs.unreleased
    if not remaining:
        return why.message
    begin = "suspending:" if _is_asked_for(why) else f"{why.message};"
    wait = describe_wait(obs, remaining[0], now)
    return f"{begin} waiting for {describe_pods(remaining)} to end{wait}"


def _end_attempt(obs: Observation, why: Finding, now: datetime) -> Observation:
    """Add the suspended attempt to the history. An attempt without a pod is no part of it."""
    attempt = obs.status.attempt
    had_pods = bool(obs.current) or attempt.latched
    if attempt.number is None or not had_pods:
        return obs
    cause = "the job was suspended" if _is_asked_for(why) else why.message
    entry = record(obs, Cause.SUSPENDED, why.reason, cause)
    return with_ended_attempt(obs, entry, now)


def _suspended(obs: Observation, spec: Spec, why: Finding, message: str) -> Status:
    phase = Phase.SUSPENDED if _is_asked_for(why) else Phase.PENDING
    status = describe(obs, phase, why.reason, message)
    if status.attempt.number is None:
        status = replace(
            status,
            pods=PodCounts(desired=spec.nodes),
            selector=selector_of(obs.job),
        )
    conditions = stop_running(status.conditions, why.reason, status.message)
    conditions = set_condition(
        conditions,
        Condition.SUSPENDED,
        True,
        why.reason,
        status.message,
    )
    attempt = replace(
        status.attempt,
        undecided_since=None,
        silent_since=None,
    )
    return replace(status, conditions=conditions, attempt=attempt)


def resume(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Begin a new attempt after a suspension, or with new room in a queue. It costs nothing."""
    reason, message = why_resumed(obs)
    event = Event("Normal", reason, message)
    status = replace(obs.status, conditions=not_suspended(obs))
    resumed = with_status(obs, status)
    return replace_gang(resumed, spec, Change(reason, event), now)
