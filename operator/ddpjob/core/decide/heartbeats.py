"""Whether hangs are detected: only in pods that have given heartbeats.

The operator asks the agents, and reports the answer in the condition HangsDetected.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core.api.conditions import find_condition, set_condition
from ddpjob.core.api.names import Condition
from ddpjob.core.api.policy import Heartbeat
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import later
from ddpjob.core.decide.hangs import running_pods
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.plan import Event, Plan

# The first step may take long, for example to compile the model.
SHORTEST_WAIT = timedelta(minutes=10)

# With `heartbeat: Log`, the agents are asked after this many limits. By then a script with steady
# output has written in three of them.
LIMITS_BY_LOG = 4


def checked_from(obs: Observation, spec: Spec) -> datetime | None:
    """Return when to ask the agents for heartbeats; None if there is nothing to find out."""
    limit = spec.lifecycle.hang_timeout
    started = obs.status.attempt.running_time
    if limit is None or started is None or not obs.all_run:
        return None
    if find_condition(obs.status.conditions, Condition.HANGS_DETECTED):
        return None
    wait = limit if _by_file(spec) else LIMITS_BY_LOG * limit
    return later(started, max(wait, SHORTEST_WAIT))


def _by_file(spec: Spec) -> bool:
    return spec.lifecycle.heartbeat is Heartbeat.FILE


def pods_to_check(obs: Observation, spec: Spec, now: datetime) -> tuple[Pod, ...]:
    begins = checked_from(obs, spec)
    if not begins or begins > now:
        return ()
    return running_pods(obs)


def report_heartbeats(obs: Observation, plan: Plan, spec: Spec, now: datetime) -> Plan:
    """Say once whether hangs are detected, as soon as the agents have answered."""
    pods = pods_to_check(obs, spec, now)
    if not pods:
        return plan
    mute = []
    for pod in pods:
        answer = obs.answer_of(pod)
        if not answer:
            return plan
        if not answer.watched:
            mute.append(pod.name)
    problem = _problem(mute, len(pods), spec)
    reason = Reason.NO_HEARTBEAT if problem else Reason.HEARTBEATS_SEEN
    message = problem or "the pods give heartbeats"
    events = plan.events
    if problem:
        events = (*events, Event("Warning", str(reason), message))
    conditions = set_condition(
        plan.status.conditions,
        Condition.HANGS_DETECTED,
        not problem,
        reason,
        message,
    )
    status = replace(plan.status, conditions=conditions)
    return replace(plan, status=status, events=events)


def _problem(mute: Sequence[str], pods: int, spec: Spec) -> str:
    """Return why hangs are not detected in the pods with the names `mute`, or an empty string.

    `pods`: the number of all. With `heartbeat: Log`, output of one pod is enough.
    """
    if _by_file(spec) and mute:
        more = f" and {len(mute) - 1} more have" if len(mute) > 1 else " has"
        return (
            f"{mute[0]}{more} never touched $DDP_HEARTBEAT_FILE, so hangs are not detected there; "
            "touch it at each step, or use heartbeat: Log in a new job"
        )
    if len(mute) == pods:
        return (
            "no pod has written in three times of hangTimeoutSeconds, so hangs are not detected; "
            "write a line at each step, or choose a longer time in a new job"
        )
    return ""
