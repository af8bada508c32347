"""Suspend a job, for a user or for a queue, and resume it."""

from dataclasses import replace
from datetime import datetime

from ddpjob.core.api.conditions import set_condition
from ddpjob.core.api.names import Cause, Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import PodCounts
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
from ddpjob.core.observe.observation import Finding, Observation
from ddpjob.core.plan import MAX_MESSAGE, Event, Plan


def suspend(obs: Observation, spec: Spec, why: Finding, now: datetime) -> Plan:
    """Give the pods of the job back, because it may not run. They get their grace period.

    A failure that is certain when the suspension begins is counted. Pods that end later were ended
    by the suspension.
    """
    is_asked_for = why.reason == Reason.SUSPENDED
    begins = not obs.status.has(Condition.SUSPENDED)
    # After the status was lost, the pods may end because of a suspension before.
    has_begun = obs.status.attempt.number is not None
    is_known = has_begun and obs.status.reason != Reason.STATUS_RECOVERED
    failure = certain_verdict(obs, now) if begins and is_known else None
    if failure:
        counted_obs = count_failure(obs, spec, failure, now)
        if isinstance(counted_obs, Plan):
            return counted_obs
        obs = counted_obs
    remaining = [pod for pod in obs.pods if not pod.released]
    message = why.message
    if remaining:
        wait = describe_wait(obs, remaining[0], now)
        begin = "suspending:" if is_asked_for else f"{why.message};"
        message = f"{begin} waiting for {describe_pods(remaining)} to end{wait}"
    delete = delete_all_unfinished(obs, grace_of(obs), now)
    reason = why.reason
    events: tuple[Event, ...] = ()
    if begins:
        events = (Event("Normal", reason, message[:MAX_MESSAGE]),)
        # An attempt without a pod is no part of the history.
        had_pods = bool(obs.current) or obs.status.attempt.latched
        if has_begun and had_pods and not failure:
            cause = "the job was suspended" if is_asked_for else why.message
            obs = with_ended_attempt(obs, record(obs, Cause.SUSPENDED, reason, cause), now)
    phase = Phase.SUSPENDED if is_asked_for else Phase.PENDING
    status = describe(obs, phase, reason, message)
    if status.attempt.number is None:
        selector = selector_of(obs.job)
        status = replace(status, pods=PodCounts(desired=spec.nodes), selector=selector)
    conditions = stop_running(status.conditions, reason, status.message)
    status = replace(
        status,
        conditions=set_condition(conditions, Condition.SUSPENDED, True, reason, status.message),
        backoff=kept_backoff(status, now) if begins and not failure else status.backoff,
        attempt=replace(status.attempt, undecided_since=None, silent_since=None),
    )
    confirm = lost_pods(obs) if failure else ()
    return Plan(status, delete=delete, events=events, confirm=confirm)


def resume(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Begin a new attempt after a suspension, or with new room in a queue. It costs nothing."""
    reason, message = why_resumed(obs)
    event = Event("Normal", reason, message)
    resumed = with_status(obs, replace(obs.status, conditions=not_suspended(obs)))
    return replace_gang(resumed, spec, Change(reason, event), now)
