"""The rules that turn an Observation and the time into a Plan.

The rules are one ordered tuple. The first rule that applies gives the plan. Deciding is pure, and
total: it never raises, whatever the pods look like.

The caller first writes the plan's status, under the resourceVersion that it was computed from, and
only then changes pods. So a crash between two writes, a stale view or a second operator can neither
lose nor repeat a restart.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from ddpjob.core import names
from ddpjob.core.causes import Undecided, judge
from ddpjob.core.names import Condition, Phase, Reason
from ddpjob.core.observe import Observation, Refusal, TrainerState
from ddpjob.core.plan import (
    MAX_MESSAGE,
    Event,
    Plan,
    counted,
    delete_all,
    delete_unfinished,
)
from ddpjob.core.spec import Spec
from ddpjob.core.status import stamp_conditions
from ddpjob.core.transitions import (
    begin_attempt,
    complete,
    delete_outdated,
    describe,
    describe_backoff,
    fail,
    latch,
    observe_running,
    previous_grace,
    recount,
    resize,
    restart_or_fail,
    with_status,
)

Rule = Callable[[Observation, Spec, datetime], Plan | None]


def decide(obs: Observation, now: datetime) -> Plan:
    """Return the plan for a job.

    A job that is being deleted, or that has a newer status in the API server, keeps its status
    exactly as it is.
    """
    spec = obs.job.spec
    plan = _first_match(obs, spec, now) if spec else _unreadable_spec(obs)
    if obs.job.deleting or obs.job_is_stale:
        return plan
    if spec and not obs.status.finished:
        plan = _report_ignored_fields(plan, spec)
    generation = obs.job.generation
    status = replace(
        plan.status,
        observed_generation=generation,
        conditions=stamp_conditions(plan.status.conditions, generation, now),
    )
    return replace(plan, status=status)


def _first_match(obs: Observation, spec: Spec, now: datetime) -> Plan:
    for rule in RULES:
        plan = rule(obs, spec, now)
        if plan is not None:
            return plan
    raise AssertionError("the last rule always applies")


def _unreadable_spec(obs: Observation) -> Plan:
    """Change no pod: another version of the CRD accepted a spec that this operator cannot read."""
    if obs.job.deleting or obs.status.finished:
        return Plan(obs.status)
    message = (
        f"{obs.job.spec_error}. The CRD and the operator have different versions: upgrade the "
        "older one."
    )
    status = replace(
        obs.status,
        phase=Phase.PENDING,
        reason=Reason.INVALID_SPEC,
        message=message[:MAX_MESSAGE],
    )
    return Plan(status)


def _report_ignored_fields(plan: Plan, spec: Spec) -> Plan:
    """Keep the fields that this operator does not know in the status, and report them once.

    A newer CRD may give every job a field by its default. That must not stop the jobs.
    """
    if spec.unknown_fields == plan.status.ignored_fields:
        return plan
    events = plan.events
    if not plan.status.ignored_fields:
        message = (
            f"ignored unknown fields: {', '.join(spec.unknown_fields)}. The CRD is newer than the "
            "operator: upgrade the operator to use them."
        )
        events = (*events, Event("Warning", "UnknownFields", message[:MAX_MESSAGE]))
    status = replace(plan.status, ignored_fields=spec.unknown_fields)
    return replace(plan, status=status, events=events)


# The rules, in the order of RULES


def job_is_being_deleted(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    return Plan(obs.status) if obs.job.deleting else None


def job_is_stale(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    return Plan(obs.status) if obs.job_is_stale else None


def job_is_finished(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.status.finished:
        return None
    active = [pod.state for pod in obs.current if not pod.ended]
    ready = active.count(TrainerState.RUNNING)
    pods = replace(obs.status.pods, active=len(active), ready=ready)
    delete = delete_unfinished(obs.pods, grace=None)
    return Plan(replace(obs.status, pods=pods), delete=delete)


def job_is_new(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if obs.status.attempt is not None:
        return None
    status = replace(begin_attempt(obs, spec, 0, now), start_time=now)
    return pods_are_not_created(with_status(obs, status), spec, now)


def older_pods_still_run(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    remaining = [pod for pod in obs.older if not pod.released]
    if not remaining:
        return None
    first = remaining[0]
    what = f"pod {first.name}"
    if first.node_name:
        what += f" on node {first.node_name}"
    if len(remaining) > 1:
        what += f" and {len(remaining) - 1} more"
    message = f"attempt {obs.attempt} waits for {what} to end"
    status = describe(obs, Phase.RESTARTING, Reason.WAITING_FOR_OLD_PODS, message)
    return Plan(status, delete=delete_unfinished(remaining, previous_grace(obs)))


def all_nodes_succeeded(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.succeeded or len(obs.succeeded) < obs.status.pods.desired:
        return None
    return complete(obs, now)


def nodes_were_changed(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if spec.nodes == obs.status.pods.desired:
        return None
    return resize(obs, spec, now)


def attempt_failed(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    # Before the latch, a missing pod was not created yet. After it, a missing pod is lost.
    lost = obs.missing if obs.latched else ()
    not_created = () if obs.latched else obs.missing
    verdict = judge(obs.current, lost, now, not_created)
    if verdict is None:
        return None
    if isinstance(verdict, Undecided):
        status = replace(recount(obs), attempt_started=latch(obs))
        return Plan(status, wake_after=_seconds_until(verdict.until, now))
    plan = restart_or_fail(obs, spec, verdict, now)
    if verdict.pod is not None:
        return plan
    # The verdict is based on missing pods. The API server has to confirm that they are gone.
    confirm = tuple(names.pod_name(obs.job.name, obs.attempt, index) for index in lost)
    return replace(plan, confirm=confirm)


def pods_are_not_created(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if obs.latched or not obs.missing:
        return None
    refusal = obs.refusal
    if refusal and refusal.final:
        return fail(obs, refusal.reason, refusal.message, now)
    until = obs.status.backoff.until
    if until and now < until:
        return Plan(describe_backoff(obs), wake_after=_seconds_until(until, now))
    if refusal:
        return _retry_after_refusal(obs, refusal, now)
    message = f"creating {counted(obs.status.pods.desired, 'pod')} of attempt {obs.attempt}"
    status = describe(obs, Phase.STARTING, Reason.CREATING_PODS, message)
    return Plan(status, create=obs.missing, delete=delete_outdated(obs))


def _retry_after_refusal(obs: Observation, refusal: Refusal, now: datetime) -> Plan:
    status = describe(obs, Phase.PENDING, refusal.reason, refusal.message)
    if now < refusal.retry_at:
        return Plan(status, wake_after=_seconds_until(refusal.retry_at, now))
    # If the quota counts ended pods too, delete them, with their logs, to make room.
    delete = delete_all(obs.older) if refusal.counts_ended_pods else delete_outdated(obs)
    return Plan(status, create=obs.missing, delete=delete)


def all_pods_exist(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    status = observe_running(obs)
    was_running = obs.status.has(Condition.RUNNING)
    if was_running or not status.has(Condition.RUNNING):
        return Plan(status)
    return Plan(status, events=(Event("Normal", "Running", status.message),))


def _seconds_until(moment: datetime, now: datetime) -> float:
    return max(0.0, (moment - now).total_seconds())


RULES: tuple[Rule, ...] = (
    job_is_being_deleted,  # The garbage collector removes the pods.
    job_is_stale,  # A newer status exists: deciding from this one could repeat a restart.
    job_is_finished,  # A finished job never runs again: delete pods that still run.
    job_is_new,  # The first attempt begins.
    older_pods_still_run,  # Two attempts never train at the same time.
    all_nodes_succeeded,  # Before failures: a node that succeeded cannot be lost any more.
    nodes_were_changed,  # An attempt has a fixed size, so a new one begins. It uses no budget.
    attempt_failed,  # The whole gang restarts, or the budget is used up and the job fails.
    pods_are_not_created,  # All at once: gang schedulers and autoscalers must see all of them.
    all_pods_exist,  # Nothing to do but to report how far the pods are.
)
