"""Reports of what pods have said, and of what the operator ignores."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from ddpjob.core.api.history import Steps, with_steps, with_totals, with_training_times
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import MAX_STRAYS
from ddpjob.core.observe.observation import Observation
from ddpjob.core.plan import MAX_MESSAGE, Event, Plan


def reported_steps(obs: Observation) -> Mapping[int, Steps]:
    """Return the first and the last step of attempts, as far as the agents of ended pods know."""
    found: dict[int, Steps] = {}
    for pod in obs.pods:
        found |= pod.steps
    return found


def reported_training(obs: Observation) -> Mapping[int, datetime]:
    """Return the first step or heartbeat of attempts, as far as the agents of ended pods know."""
    found: dict[int, datetime] = {}
    for pod in obs.pods:
        for attempt, time in pod.trained.items():
            known = found.get(attempt, time)
            found[attempt] = min(time, known)
    return found


def reported_totals(obs: Observation) -> Mapping[int, int]:
    """Return the planned steps of attempts, as far as the agents of ended pods know."""
    found = {}
    for pod in obs.pods:
        total = pod.total_steps or 0
        if pod.reported is not None and total > 0:
            found[pod.reported] = total
    return found


def report_steps(obs: Observation, plan: Plan) -> Plan:
    """Keep the steps of ended attempts in the history, as the agents of ended pods name them."""
    attempts = plan.status.attempts
    steps = reported_steps(obs)
    if steps:
        attempts = with_steps(attempts, steps)
    totals = reported_totals(obs)
    if totals:
        attempts = with_totals(attempts, totals)
    times = reported_training(obs)
    if times:
        attempts = with_training_times(attempts, times)
    if attempts is plan.status.attempts:
        return plan
    status = replace(plan.status, attempts=attempts)
    return replace(plan, status=status)


def report_strays(obs: Observation, plan: Plan) -> Plan:
    """Keep the names of stray pods in the status, and report them at each change."""
    strays = obs.strays[:MAX_STRAYS]
    if strays == plan.status.stray_pods:
        return plan
    if strays:
        listed = ", ".join(strays)
        message = (
            f"ignored pods that the operator did not create for this job: {listed}; "
            "delete them if they are copies"
        )
        plan = _with_warning(plan, "StrayPods", message)
    status = replace(plan.status, stray_pods=strays)
    return replace(plan, status=status)


def _with_warning(plan: Plan, reason: str, message: str) -> Plan:
    event = Event("Warning", reason, message[:MAX_MESSAGE])
    return replace(plan, events=(*plan.events, event))


def report_ignored_fields(plan: Plan, spec: Spec) -> Plan:
    """Keep the fields unknown to this operator in the status, and report them once.

    A newer CRD may give every job a field by its default. Such a field must not stop the jobs.
    """
    if spec.unknown_fields == plan.status.ignored_fields:
        return plan
    if not plan.status.ignored_fields:
        listed = ", ".join(spec.unknown_fields)
        message = (
            f"ignored unknown fields: {listed}. The CRD is newer than the "
            "operator: upgrade the operator to use them."
        )
        plan = _with_warning(plan, "UnknownFields", message)
    status = replace(plan.status, ignored_fields=spec.unknown_fields)
    return replace(plan, status=status)


def report_unused_devices(obs: Observation, plan: Plan, spec: Spec) -> Plan:
    """Report requested devices not used by the job's accelerator, when the job begins."""
    begins = obs.status.attempt.number is None and plan.status.attempt.number is not None
    if not begins or not spec.unused_devices:
        return plan
    event = Event("Warning", "DevicesNotUsed", spec.device_advice)
    return replace(plan, events=(*plan.events, event))
