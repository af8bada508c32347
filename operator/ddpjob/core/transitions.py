"""The transitions of a job: how its status, and its pods, change when something has happened.

Each function returns a new Status or a Plan. When a transition applies is decided in decide.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core import names
from ddpjob.core.backoff import exponential_delay
from ddpjob.core.causes import Verdict
from ddpjob.core.names import Cause, Condition, Phase, Reason
from ddpjob.core.observe import Observation, Pod, TrainerState
from ddpjob.core.plan import (
    MAX_MESSAGE,
    Delete,
    Event,
    Plan,
    counted,
    delete_all,
    delete_unfinished,
)
from ddpjob.core.spec import Spec
from ddpjob.core.status import (
    Backoff,
    Conditions,
    PodCounts,
    Status,
    find_condition,
    read_result,
    set_condition,
)
from ddpjob.core.times import format_time

# An attempt that fails within this time after its start makes the next one back off.
EARLY_FAILURE = timedelta(minutes=5)

# Seconds of back-off. There is no wait after the first early failure in a row.
FIRST_DELAY = 10
LONGEST_DELAY = 300

# Grace periods of pods that have nothing to save, in seconds. While torch is imported, process 1
# has no handler for SIGTERM and ends only with the grace period. A rank whose peers have failed
# cannot write a checkpoint. A disrupted gang gets the pods' own grace period and writes one.
NEVER_RAN_GRACE = 5
BROKEN_GANG_GRACE = 15

REASONS = {
    Cause.FAILURE: Reason.FAILURE,
    Cause.DISRUPTION: Reason.DISRUPTION,
    Cause.RENDEZVOUS: Reason.RENDEZVOUS_TIMEOUT,
}


def begin_attempt(obs: Observation, spec: Spec, attempt: int, now: datetime) -> Status:
    """Return the status of an attempt that begins now."""
    job = obs.job
    host = names.hostname(attempt, 0, spec.nodes)
    return replace(
        job.status,
        attempt=attempt,
        attempt_time=now,
        previous_attempt_ran=job.status.has(Condition.RUNNING) if attempt > 0 else None,
        pods=PodCounts(desired=spec.nodes),
        resolved={
            "nprocPerNode": spec.nproc_per_node,
            "worldSize": spec.world_size,
            "accelerator": spec.accelerator,
            "rendezvous": f"{host}.{job.name}:{names.RENDEZVOUS_PORT}",
        },
        succeeded_nodes=(),
        result={},
    )


def describe(obs: Observation, phase: str, reason: str, message: str) -> Status:
    """Return the status with its pods counted, and with a phase and the reason for it."""
    states = [pod.state for pod in obs.current]
    pods = PodCounts(
        desired=obs.status.pods.desired,
        active=sum(not pod.ended for pod in obs.current),
        ready=states.count(TrainerState.RUNNING),
        succeeded=len(obs.succeeded),
        failed=states.count(TrainerState.FAILED),
    )
    return replace(
        obs.status,
        phase=str(phase),
        reason=str(reason),
        message=message[:MAX_MESSAGE],
        pods=pods,
        succeeded_nodes=tuple(sorted(obs.succeeded)),
        result=_result(obs),
    )


def recount(obs: Observation) -> Status:
    """Return the status with its pods counted, and with its phase and reason unchanged."""
    return describe(obs, obs.status.phase, obs.status.reason, obs.status.message)


def _result(obs: Observation) -> Mapping[str, str]:
    """Return the result that rank 0 wrote. It is kept in the status, since the pod may go."""
    for pod in obs.current:
        if pod.index == 0 and pod.state is TrainerState.SUCCEEDED:
            return read_result(pod.message)
    return obs.status.result


def latch(obs: Observation) -> int | None:
    """Return `attempt_started` after this look: the attempt, if every pod of it was seen."""
    return obs.status.attempt_started if obs.missing else obs.attempt


def observe_running(obs: Observation) -> Status:
    """Return the status of an attempt whose pods exist: starting, blocked or running."""
    total = obs.status.pods.desired
    running = [pod for pod in obs.current if pod.state is TrainerState.RUNNING]
    all_run = len(obs.succeeded) + len(running) == total
    if all_run:
        message = f"attempt {obs.attempt} runs on {counted(total, 'node')}"
        status = describe(obs, Phase.RUNNING, Reason.NODES_RUNNING, message)
    else:
        status = _describe_start(obs, total)
    conditions = _set_running(obs, all_run, status.reason, status.message)
    return replace(status, attempt_started=latch(obs), conditions=conditions)


def _describe_start(obs: Observation, total: int) -> Status:
    """Return the status of a gang that does not run yet, with what one of its pods waits for."""
    blocked = 0
    first = None
    for pod in obs.current:
        if pod.blocked:
            blocked += 1
            first = first or pod
    if first and first.blocked:
        reason = first.blocked.reason
        message = f"{blocked} of {total} pods cannot start; {first.name}: {first.blocked.message}"
        return describe(obs, Phase.PENDING, reason, message)
    pending = [pod for pod in obs.current if pod.state is TrainerState.PENDING]
    message = f"{total - len(pending)} of {total} nodes are running"
    if pending:
        message += f"; {_describe_pending(pending[0])}"
    return describe(obs, Phase.STARTING, Reason.STARTING, message)


def _describe_pending(pod: Pod) -> str:
    where = f"is starting on {pod.node_name}" if pod.node_name else "is not scheduled yet"
    return f"pod {pod.name} {where} (for details: kubectl describe pod {pod.name})"


def complete(obs: Observation, now: datetime) -> Plan:
    """End the job as Complete."""
    started = obs.status.start_time or now
    seconds = int((now - started).total_seconds())
    message = (
        f"{counted(len(obs.succeeded), 'node')} succeeded after {seconds} s and "
        f"{counted(obs.status.restarts, 'restart')}"
    )
    status = replace(
        describe(obs, Phase.COMPLETE, Reason.SUCCEEDED, message),
        attempt_started=obs.attempt,
        completion_time=now,
        succeeded_nodes=(),
        conditions=_set_finished(obs, Condition.COMPLETE, Reason.SUCCEEDED, message),
    )
    event = Event("Normal", "Complete", message)
    return Plan(status, delete=delete_unfinished(obs.pods, grace=None), events=(event,))


def fail(obs: Observation, reason: str, message: str, now: datetime) -> Plan:
    """End the job as Failed."""
    message = message[:MAX_MESSAGE]
    status = replace(
        describe(obs, Phase.FAILED, reason, message),
        completion_time=now,
        succeeded_nodes=(),
        result={},
        conditions=_set_finished(obs, Condition.FAILED, reason, message),
    )
    event = Event("Warning", "Failed", message)
    return Plan(status, delete=delete_unfinished(obs.pods, BROKEN_GANG_GRACE), events=(event,))


def restart_or_fail(obs: Observation, spec: Spec, verdict: Verdict, now: datetime) -> Plan:
    """Restart the gang after a failed attempt, or end the job if the budget is used up."""
    policy = spec.failure_policy
    status = replace(obs.status, last_failure=_last_failure(obs, verdict, now))
    obs = with_status(obs, status)
    if verdict.cause is Cause.FAILURE and status.restarts >= policy.max_restarts:
        message = f"{verdict.message}; maxRestarts={policy.max_restarts} is used up"
        return fail(obs, Reason.MAX_RESTARTS, message, now)
    if verdict.cause is Cause.DISRUPTION and status.disruptions >= policy.max_disruptions:
        message = f"{verdict.message}; maxDisruptions={policy.max_disruptions} is used up"
        return fail(obs, Reason.MAX_DISRUPTIONS, message, now)
    begun = replace(
        begin_attempt(obs, spec, obs.attempt + 1, now),
        restarts=status.restarts + (verdict.cause is Cause.FAILURE),
        disruptions=status.disruptions + (verdict.cause is Cause.DISRUPTION),
        backoff=_next_backoff(status, now),
    )
    event = Event("Warning", "Restarting", verdict.message)
    return _replace_gang(obs, begun, REASONS[verdict.cause], event)


def resize(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Begin an attempt with another number of nodes. It costs no budget and no back-off."""
    message = f"nodes changed from {obs.status.pods.desired} to {spec.nodes}"
    begun = replace(begin_attempt(obs, spec, obs.attempt + 1, now), backoff=Backoff())
    return _replace_gang(obs, begun, Reason.RESIZED, Event("Normal", "Resized", message))


def _replace_gang(obs: Observation, begun: Status, reason: Reason, event: Event) -> Plan:
    """Return the plan of a new attempt: its status, and the deletion of the old pods."""
    message = event.message[:MAX_MESSAGE]
    conditions = begun.conditions
    if find_condition(conditions, Condition.RUNNING):
        conditions = _set_running(obs, False, reason, message)
    status = replace(
        begun,
        phase=Phase.RESTARTING,
        reason=reason,
        message=message,
        conditions=conditions,
    )
    announcement = f"attempt {begun.attempt} begins: {event.message}"[:MAX_MESSAGE]
    return Plan(
        status,
        delete=delete_unfinished(obs.pods, _current_grace(obs)),
        events=(replace(event, message=announcement),),
        wake_after=0.0,
    )


def _set_running(obs: Observation, holds: bool, reason: str, message: str) -> Conditions:
    return set_condition(obs.status.conditions, Condition.RUNNING, holds, reason, message)


def _set_finished(obs: Observation, kind: Condition, reason: str, message: str) -> Conditions:
    """Set Complete or Failed. A finished job is not Running."""
    conditions = set_condition(obs.status.conditions, kind, True, reason, message)
    return set_condition(conditions, Condition.RUNNING, False, reason, message)


def _last_failure(obs: Observation, verdict: Verdict, now: datetime) -> dict[str, object]:
    pod = verdict.pod
    finished = pod.finished if pod else None
    fields = {
        "attempt": obs.attempt,
        "cause": str(verdict.cause),
        "node": pod.node_name if pod else "",
        "pod": names.pod_name(obs.job.name, obs.attempt, verdict.index),
        "rank": verdict.rank,
        "exitCode": verdict.exit_code,
        "reason": verdict.reason,
        "message": verdict.message[:MAX_MESSAGE],
        "time": format_time(finished or now),
    }
    return {key: value for key, value in fields.items() if value not in (None, "")}


def _next_backoff(status: Status, now: datetime) -> Backoff:
    """Return the back-off before the next attempt: 0, 10, 20, 40 … 300 s.

    It grows with each attempt in a row that failed early. The age of an attempt does not include
    its own back-off.
    """
    starts = [time for time in (status.attempt_time, status.backoff.until) if time]
    if not starts or now - max(starts) >= EARLY_FAILURE:
        return Backoff()
    count = status.backoff.count + 1
    delay = exponential_delay(count - 1, FIRST_DELAY, LONGEST_DELAY)
    return Backoff(count, now + timedelta(seconds=delay))


def describe_backoff(obs: Observation) -> Status:
    """Return the status of an attempt that waits for the end of its back-off."""
    count = obs.status.backoff.count
    delay = exponential_delay(count - 1, FIRST_DELAY, LONGEST_DELAY)
    minutes = int(EARLY_FAILURE.total_seconds() // 60)
    message = (
        f"backing off for {delay:.0f} s before attempt {obs.attempt}: the last {count} attempts "
        f"failed within {minutes} minutes"
    )
    return describe(obs, Phase.RESTARTING, Reason.BACK_OFF, message)


def previous_grace(obs: Observation) -> int | None:
    """Return the grace period of the previous attempt's pods in seconds; None is their own."""
    return _grace(obs.status, obs.attempt - 1, obs.status.previous_attempt_ran)


def _current_grace(obs: Observation) -> int | None:
    return _grace(obs.status, obs.attempt, obs.status.has(Condition.RUNNING))


def _grace(status: Status, attempt: int, ran: bool | None) -> int | None:
    failure = status.last_failure
    if failure.get("cause") == Cause.FAILURE and failure.get("attempt") == attempt:
        return BROKEN_GANG_GRACE
    # If it is not known whether the attempt ran, its pods may need time for a checkpoint.
    return NEVER_RAN_GRACE if ran is False else None


def delete_outdated(obs: Observation) -> tuple[Delete, ...]:
    """Delete ended pods whose logs are no longer of interest.

    The previous attempt and the one in `lastFailure` keep theirs for `kubectl logs`.
    """
    kept = (obs.attempt - 1, obs.status.last_failure.get("attempt"))
    return delete_all(pod for pod in obs.older if pod.attempt not in kept)


def with_status(obs: Observation, status: Status) -> Observation:
    """Return the same observation with another status of the job."""
    return Observation(replace(obs.job, status=status), obs.pods, obs.refusal)
