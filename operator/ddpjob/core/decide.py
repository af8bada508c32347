"""What to do about a job: (Observation, now) → Plan. Pure and total; the rules are one ordered tuple, first match wins.

Whoever carries a plan out writes its status first, under the resourceVersion that it was computed from, and only then
touches pods. So a crash between two writes, a stale view or a second operator can neither lose nor double a restart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ddpjob.core import names
from ddpjob.core.api import Backoff, Job, Nodes, Spec, Status, time_to_text
from ddpjob.core.causes import Undecided, Verdict, judge
from ddpjob.core.conditions import observed_at, set_condition
from ddpjob.core.names import Cause, Condition, Phase, Reason
from ddpjob.core.observe import Fate, Observation, Pod
from ddpjob.core.results import read_result

YOUNG = timedelta(seconds=300)
"""An attempt that dies younger than this makes the next one wait."""

FIRST_DELAY, LONGEST_DELAY = 10, 300
"""Seconds before the attempt after the second young death in a row, doubled each time; the first costs no wait."""

NEVER_RAN_GRACE, BROKEN_GANG_GRACE = 5, 15
"""Seconds a pod gets to end. While torch imports, PID 1 has no SIGTERM handler and dies only at the end of its grace;
and a rank whose peers are gone has nothing left to agree on. A disrupted gang gets the pods' own time: it checkpoints."""


@dataclass(frozen=True)
class Delete:
    """A pod to delete, by UID; `grace` in seconds, None for the pod's own."""

    name: str
    uid: str
    grace: int | None = None


@dataclass(frozen=True)
class Event:
    """A transition worth telling: `kind` Normal or Warning."""

    kind: str
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The status the job should have, and what to do once it is written.

    `create`: indices of the attempt `status.attempt`. `confirm`: names of pods that must be known to be gone, or the
    plan does not hold. `wake_after`: seconds until time itself may change the answer.
    """

    status: Status
    create: tuple[int, ...] = ()
    delete: tuple[Delete, ...] = ()
    events: tuple[Event, ...] = ()
    confirm: tuple[str, ...] = ()
    wake_after: float | None = None


REASONS = {
    Cause.FAILURE: Reason.FAILURE,
    Cause.DISRUPTION: Reason.DISRUPTION,
    Cause.RENDEZVOUS: Reason.RENDEZVOUS_TIMEOUT,
}

Conditions = tuple[Mapping[str, Any], ...]
Rule = Callable[[Observation, Spec, datetime], Plan | None]


def decide(obs: Observation, now: datetime) -> Plan:
    """The first rule that applies; its status is stamped with the generation it was computed from.

    A job that is being deleted, or of which a newer status exists, is left exactly as it is.
    """
    spec = obs.job.spec
    plan = (
        next(p for p in (rule(obs, spec, now) for rule in RULES) if p)
        if spec
        else _unreadable(obs, now)
    )
    hands_off = obs.job.deleting or obs.job_is_stale
    return plan if hands_off else replace(plan, status=_stamped(plan.status, obs.job))


def _stamped(status: Status, job: Job) -> Status:
    return replace(
        status,
        observed_generation=job.generation,
        conditions=observed_at(status.conditions, job.generation),
    )


def _unreadable(obs: Observation, now: datetime) -> Plan:
    """A spec that this operator cannot read, though the API server took it: another version's. Nothing is touched."""
    if obs.job.deleting or obs.job.status.finished:
        return Plan(obs.job.status)
    message = f"{obs.job.spec_error} The CRD and this operator are of different versions; upgrade the older one."
    return Plan(
        replace(
            obs.job.status, phase=Phase.PENDING, reason=Reason.INVALID_SPEC, message=message[:1024]
        )
    )


# --- the rules, in their order


def deleted(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Whose job is being deleted: the garbage collector has it from here."""
    return Plan(obs.job.status) if obs.job.deleting else None


def job_is_stale(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Pods of an attempt this view of the job does not know: a newer status is on its way."""
    return Plan(obs.job.status) if obs.job_is_stale else None


def finished(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Finished is final: what still runs is deleted, nothing is ever created."""
    if not obs.job.status.finished:
        return None
    living = [p.fate for p in obs.current if not p.ended]
    nodes = replace(obs.job.status.nodes, active=len(living), ready=living.count(Fate.RUNNING))
    return Plan(replace(obs.job.status, nodes=nodes), delete=_deletions(obs.pods, grace=None))


def stale_attempts_pods(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Two attempts never train at once: nothing is created before the last pod of an older one has ended."""
    left = [p for p in obs.older if not p.released]
    if not left:
        return None
    first = left[0]
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    where = f" on node {first.node}" if first.node else ""
    message = f"attempt {obs.attempt} starts when pod {first.name}{where}{more} has ended"
    status = _counted(
        obs, phase=Phase.RESTARTING, reason=Reason.WAITING_FOR_OLD_PODS, message=message
    )
    grace = _grace(obs.job.status, obs.attempt - 1, ran=_ran_before(obs.job.status))
    return Plan(status, delete=_deletions(left, grace))


def first_attempt(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """A job nobody has worked on yet: its first attempt begins."""
    if obs.job.status.attempt is not None:
        return None
    status = replace(obs.job.status, attempt=0, start_time=now)
    return start(_with_status(obs, _begun(status, obs.job, spec, now)), spec, now)


def all_succeeded(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Every node's trainer ended with 0."""
    if not obs.succeeded or len(obs.succeeded) < obs.job.status.nodes.desired:
        return None
    seconds = int((now - (obs.job.status.start_time or now)).total_seconds())
    message = f"all {len(obs.succeeded)} nodes succeeded after {seconds} s, {obs.job.status.restarts} restarts"
    status = replace(
        _counted(obs, phase=Phase.COMPLETE, reason=Reason.SUCCEEDED, message=message),
        completion_time=now,
        attempt_started=obs.attempt,
        succeeded_nodes=(),
        conditions=_ended(obs, Condition.COMPLETE, Reason.SUCCEEDED, message, now),
    )
    return Plan(
        status, delete=_deletions(obs.pods, None), events=(Event("Normal", "Complete", message),)
    )


def resized(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Another number of nodes is another gang: a new attempt, counted against nothing."""
    if spec.nodes == obs.job.status.nodes.desired:
        return None
    message = f"nodes changed from {obs.job.status.nodes.desired} to {spec.nodes}"
    return _next_attempt(obs, spec, Reason.RESIZED, message, now, Backoff(), _grace_now(obs))


def attempt_ended(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Something went wrong in this attempt: the whole gang restarts, or the job fails."""
    vanished = obs.missing if obs.latched else ()
    unborn = () if obs.latched else obs.missing
    verdict = judge(obs.current, vanished, now, unborn)
    if verdict is None:
        return None
    if isinstance(verdict, Undecided):
        was = obs.job.status
        counted = _counted(obs, phase=was.phase, reason=was.reason, message=was.message)
        counted = replace(counted, attempt_started=_latch(obs))
        return Plan(counted, wake_after=max(0.0, (verdict.until - now).total_seconds()))
    plan = _restart_or_fail(obs, spec, verdict, now)
    gone = tuple(names.pod_name(obs.job.name, obs.attempt, index) for index in vanished)
    return replace(plan, confirm=gone if verdict.pod is None else ())


def start(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Pods that were never created are created, all at once, unless it is too early to try (again)."""
    if obs.latched or not obs.missing:
        return None
    status, refusal = obs.job.status, obs.refusal
    if refusal and refusal.final:
        return _fail(obs, refusal.reason, refusal.message, now)
    if status.backoff.until and now < status.backoff.until:
        message = f"attempt {obs.attempt} starts at {time_to_text(status.backoff.until)}: {status.backoff.count} died young"
        waiting = _counted(obs, phase=Phase.RESTARTING, reason=Reason.BACK_OFF, message=message)
        return Plan(waiting, wake_after=(status.backoff.until - now).total_seconds())
    if refusal:
        waiting = _counted(obs, phase=Phase.PENDING, reason=refusal.reason, message=refusal.message)
        wait = (refusal.retry_at - now).total_seconds()
        if wait > 0:
            return Plan(waiting, wake_after=wait)
        # This quota counts ended pods too: their logs make room for the attempt.
        ended = _ended_before(obs) if "count/pods" in refusal.message else _outlived(obs)
        return Plan(waiting, create=obs.missing, delete=ended)
    message = f"creating {status.nodes.desired} pods of attempt {obs.attempt}"
    starting = _counted(obs, phase=Phase.STARTING, reason=Reason.CREATING_PODS, message=message)
    return Plan(starting, create=obs.missing, delete=_outlived(obs))


def steady(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    """Every pod is there: say how far they are."""
    status = _steady_status(obs, now)
    joined = status.has(Condition.RUNNING) and not obs.job.status.has(Condition.RUNNING)
    return Plan(status, events=(Event("Normal", "Running", status.message),) if joined else ())


RULES: tuple[Rule, ...] = (
    deleted,
    job_is_stale,
    finished,
    first_attempt,
    stale_attempts_pods,
    all_succeeded,
    resized,
    attempt_ended,
    start,
    steady,
)


# --- what the rules are made of


def _with_status(obs: Observation, status: Status) -> Observation:
    return Observation(replace(obs.job, status=status), obs.pods, obs.refusal)


def _begun(status: Status, job: Job, spec: Spec, now: datetime) -> Status:
    """The status of an attempt that begins now."""
    attempt = status.attempt or 0
    resolved = {
        "nprocPerNode": spec.processes,
        "worldSize": spec.nodes * spec.processes,
        "accelerator": spec.accelerator,
        "rendezvous": f"{names.hostname(attempt, 0, spec.nodes)}.{job.name}:{names.RENDEZVOUS_PORT}",
    }
    nodes = Nodes(desired=spec.nodes)
    return replace(
        status, attempt_time=now, nodes=nodes, resolved=resolved, succeeded_nodes=(), result={}
    )


def _counted(obs: Observation, *, phase: str, reason: str, message: str) -> Status:
    """The job's status with the current attempt's pods counted, what they leave behind, and why it is so."""
    fates = [p.fate for p in obs.current]
    nodes = Nodes(
        desired=obs.job.status.nodes.desired,
        active=sum(not p.ended for p in obs.current),
        ready=fates.count(Fate.RUNNING),
        succeeded=len(obs.succeeded),
        failed=fates.count(Fate.FAILED),
    )
    kept = replace(
        obs.job.status, succeeded_nodes=tuple(sorted(obs.succeeded)), result=_result(obs)
    )
    return replace(kept, phase=str(phase), reason=str(reason), message=message[:1024], nodes=nodes)


def _result(obs: Observation) -> Mapping[str, str]:
    """What rank 0 wrote at its end, which its pod may not outlive."""
    ended = [p for p in obs.current if p.index == 0 and p.fate is Fate.SUCCEEDED]
    return read_result(ended[0].message) if ended else obs.job.status.result


def _ended(
    obs: Observation, kind: Condition, reason: str, message: str, now: datetime
) -> Conditions:
    """The conditions of a job that is now Complete or Failed, and therefore no longer Running."""
    conditions = set_condition(obs.job.status.conditions, kind, True, reason, message, now)
    return set_condition(conditions, Condition.RUNNING, False, reason, message, now)


def _running(obs: Observation, true: bool, reason: str, message: str, now: datetime) -> Conditions:
    return set_condition(obs.job.status.conditions, Condition.RUNNING, true, reason, message, now)


def _steady_status(obs: Observation, now: datetime) -> Status:
    """Phase, reason and Running condition of an attempt whose pods are there, and the latch."""
    up = len(obs.succeeded) + sum(p.fate is Fate.RUNNING for p in obs.current)
    total = obs.job.status.nodes.desired
    if up == total:
        said: tuple[str, str, str] = (
            Phase.RUNNING,
            Reason.NODES_RUNNING,
            f"attempt {obs.attempt} runs on {total} nodes",
        )
    else:
        said = _what_is_missing(obs.current, total)
    phase, reason, message = said
    status = _counted(obs, phase=phase, reason=reason, message=message)
    return replace(
        status,
        attempt_started=_latch(obs),
        conditions=_running(obs, up == total, reason, message, now),
    )


def _latch(obs: Observation) -> int | None:
    """`attempt_started` after this look: the attempt, once every pod of it was seen."""
    return obs.job.status.attempt_started if obs.missing else obs.attempt


def _what_is_missing(pods: Sequence[Pod], total: int) -> tuple[Phase, str, str]:
    blocked = [p for p in pods if p.blocked]
    if blocked and blocked[0].blocked:
        sign = blocked[0].blocked
        return (
            Phase.PENDING,
            sign.reason,
            f"{len(blocked)} of {total} pods cannot start; {blocked[0].name}: {sign.message}",
        )
    waiting = [p for p in pods if p.fate is Fate.PENDING]
    where = waiting[0].node or "(none yet)" if waiting else ""
    first = (
        f"; {waiting[0].name} on node {where} is being set up (kubectl describe it for more)"
        if waiting
        else ""
    )
    return Phase.STARTING, Reason.STARTING, f"{total - len(waiting)} of {total} nodes run{first}"


def _restart_or_fail(obs: Observation, spec: Spec, verdict: Verdict, now: datetime) -> Plan:
    status, policy = obs.job.status, spec.failure_policy
    obs = _with_status(obs, replace(status, last_failure=_last_failure(obs, verdict, now)))
    if verdict.cause is Cause.FAILURE and status.restarts >= policy.max_restarts:
        return _fail(
            obs,
            Reason.MAX_RESTARTS,
            f"{verdict.message}; no restart is left of maxRestarts={policy.max_restarts}",
            now,
        )
    if verdict.cause is Cause.DISRUPTION and status.disruptions >= policy.max_disruptions:
        message = (
            f"{verdict.message}; no restart is left of maxDisruptions={policy.max_disruptions}"
        )
        return _fail(obs, Reason.MAX_DISRUPTIONS, message, now)
    return _next_attempt(
        obs,
        spec,
        REASONS[verdict.cause],
        verdict.message,
        now,
        _backoff(status, now),
        _grace_now(obs),
        verdict.cause,
    )


def _last_failure(obs: Observation, verdict: Verdict, now: datetime) -> dict[str, object]:
    pod = verdict.pod
    fields = {
        "attempt": obs.attempt,
        "cause": str(verdict.cause),
        "node": pod.node if pod else "",
        "pod": names.pod_name(obs.job.name, obs.attempt, verdict.index),
        "rank": verdict.rank,
        "exitCode": verdict.exit_code,
        "reason": verdict.reason,
        "message": verdict.message[:1024],
        "time": time_to_text((pod.finished if pod else None) or now),
    }
    return {key: value for key, value in fields.items() if value is not None and value != ""}


def _next_attempt(
    obs: Observation,
    spec: Spec,
    reason: Reason,
    message: str,
    now: datetime,
    backoff: Backoff,
    grace: int | None,
    cause: Cause | None = None,
) -> Plan:
    """A new attempt begins: the status says so, the old attempt's unfinished pods go."""
    old = obs.job.status
    ran = any(c.get("type") == Condition.RUNNING for c in old.conditions)  # or was about to
    status = replace(
        _begun(replace(old, attempt=obs.attempt + 1), obs.job, spec, now),
        phase=Phase.RESTARTING,
        reason=reason,
        message=message[:1024],
        restarts=old.restarts + (cause is Cause.FAILURE),
        disruptions=old.disruptions + (cause is Cause.DISRUPTION),
        backoff=backoff,
        conditions=_running(obs, False, reason, message[:1024], now) if ran else old.conditions,
    )
    kind = "Normal" if cause is None else "Warning"
    event = Event(
        kind,
        "Resized" if cause is None else "Restarting",
        f"attempt {status.attempt} begins: {message}"[:1024],
    )
    return Plan(status, delete=_deletions(obs.pods, grace), events=(event,), wake_after=0.0)


def _fail(obs: Observation, reason: str, message: str, now: datetime) -> Plan:
    status = replace(
        _counted(obs, phase=Phase.FAILED, reason=reason, message=message),
        completion_time=now,
        succeeded_nodes=(),
        result={},
        conditions=_ended(obs, Condition.FAILED, reason, message[:1024], now),
    )
    return Plan(
        status,
        delete=_deletions(obs.pods, BROKEN_GANG_GRACE),
        events=(Event("Warning", "Failed", message[:1024]),),
    )


def _backoff(status: Status, now: datetime) -> Backoff:
    """0, 10, 20, 40 … 300 s after attempts in a row that died young; an attempt's age does not count its own wait."""
    began = max((t for t in (status.attempt_time, status.backoff.until) if t), default=None)
    if began is None or now - began >= YOUNG:
        return Backoff()
    count = status.backoff.count + 1
    delay = min(FIRST_DELAY * 2 ** min(count - 2, 10), LONGEST_DELAY) if count > 1 else 0
    return Backoff(count, now + timedelta(seconds=delay))


def _deletions(pods: Sequence[Pod], grace: int | None) -> tuple[Delete, ...]:
    """Pods that still hold something and that nobody is deleting yet."""
    return tuple(Delete(p.name, p.uid, grace) for p in pods if not p.released and not p.deleting)


def _grace(status: Status, attempt: int, *, ran: bool) -> int | None:
    """Seconds for the living pods of an attempt that is over: enough to checkpoint only where all of them still can."""
    if (
        status.last_failure.get("cause") == Cause.FAILURE
        and status.last_failure.get("attempt") == attempt
    ):
        return BROKEN_GANG_GRACE
    return None if ran else NEVER_RAN_GRACE


def _grace_now(obs: Observation) -> int | None:
    return _grace(obs.job.status, obs.attempt, ran=obs.job.status.has(Condition.RUNNING))


def _ran_before(status: Status) -> bool:
    """Whether the attempt before this one ran: then the condition Running fell just when this one began."""
    fell = next(
        (
            c.get("lastTransitionTime")
            for c in status.conditions
            if c.get("type") == Condition.RUNNING
        ),
        None,
    )
    return status.attempt_time is not None and fell == time_to_text(status.attempt_time)


def _ended_before(obs: Observation) -> tuple[Delete, ...]:
    """All ended pods of earlier attempts."""
    return tuple(Delete(p.name, p.uid) for p in obs.older if not p.deleting)


def _outlived(obs: Observation) -> tuple[Delete, ...]:
    """Ended pods of attempts before the last: only it and the one that `lastFailure` tells of keep their logs."""
    kept = (obs.attempt - 1, obs.job.status.last_failure.get("attempt"))
    return tuple(
        Delete(p.name, p.uid) for p in obs.older if p.attempt not in kept and not p.deleting
    )


def is_transition(old: Status, new: Status) -> bool:
    """Whether the change is more than progress (counts, words, nodes that are done) and has to be written at once."""

    def essence(status: Status) -> Status:
        conditions = tuple({**c, "message": ""} for c in status.conditions)
        still = replace(
            status, message="", nodes=Nodes(desired=status.nodes.desired), conditions=conditions
        )
        return replace(still, succeeded_nodes=(), result={})

    return essence(old) != essence(new)
