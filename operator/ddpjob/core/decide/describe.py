"""The status of a job as its pods show it: counts, phase, reason and message."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from ddpjob.core.api import names
from ddpjob.core.api.conditions import Conditions, find_condition, set_condition
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Attempt, PodCounts, Status
from ddpjob.core.decide.budget import LASTING
from ddpjob.core.decide.dead_nodes import describe_cut_off, describe_wait, is_unreachable
from ddpjob.core.decide.meeting import describe_late, is_late
from ddpjob.core.observe.observation import Finding, Observation, Pod, TrainerState
from ddpjob.core.plan import MAX_MESSAGE, counted


def describe(obs: Observation, phase: str, reason: str, message: str) -> Status:
    """Return the status with its pods counted, and with a phase and the reason for it."""
    pods = PodCounts(
        desired=obs.status.pods.desired,
        active=sum(pod.active for pod in obs.pods),
        ready=obs.ready,
        succeeded=len(obs.succeeded),
        failed=sum(pod.failed for pod in obs.current),
    )
    succeeded_nodes = tuple(sorted(obs.succeeded))
    return replace(
        obs.status,
        phase=str(phase),
        reason=str(reason),
        message=message[:MAX_MESSAGE],
        pods=pods,
        attempt=replace(obs.status.attempt, succeeded_nodes=succeeded_nodes),
        result=_result(obs),
    )


def describe_pods(pods: Sequence[Pod]) -> str:
    """Return the name of the first pod with its node, and how many more there are."""
    first = pods[0]
    text = names.pod_on_node(first.name, first.node_name)
    if len(pods) > 1:
        text += f" and {len(pods) - 1} more"
    return text


def recount(obs: Observation) -> Status:
    """Return the status with its pods counted, and with its phase and reason unchanged."""
    status = obs.status
    return describe(obs, status.phase, status.reason, status.message)


def _result(obs: Observation) -> Mapping[str, str]:
    """Return the result of rank 0. It is kept in the status, since the pod may be deleted."""
    for pod in obs.current:
        if pod.index == 0 and pod.state is TrainerState.SUCCEEDED:
            return pod.result
    return obs.status.result


def latched(obs: Observation, status: Status) -> Status:
    """Return the status with the latch of its attempt set, if every pod of it is seen."""
    if obs.missing:
        return status
    attempt = replace(status.attempt, latched=True)
    return replace(status, attempt=attempt)


def latch_run(obs: Observation, now: datetime) -> Attempt:
    """Return the attempt with what is seen for the first time: a pod, and all nodes running.

    It is noted whatever happens to the gang next, such as a drain begun while no operator ran.
    """
    attempt = obs.status.attempt
    if obs.status.finished:
        return attempt
    if obs.pods and attempt.number is not None:
        attempt = replace(attempt, had_pods=True)
    is_known = attempt.running_time is not None
    if is_known or not obs.current or not obs.all_run:
        return attempt
    return replace(attempt, running_time=now)


def describe_existing_pods(obs: Observation, now: datetime) -> Status:
    """Return the status of an attempt with all its pods: starting, blocked or running.

    Once its pods have met, an attempt is running until it ends.
    """
    total = obs.status.pods.desired
    has_met = obs.status.attempt.running_time is not None
    if has_met:
        message = f"attempt {obs.attempt} runs on {counted(total, 'node')}"
        if obs.silent:
            message += f"; {describe_pods(obs.silent)} is not ready"
        message += _describe_unreachable(obs, now)
        status = describe(obs, Phase.RUNNING, Reason.NODES_RUNNING, message)
    else:
        status = _describe_start(obs, now)
    conditions = set_running(obs, has_met, status.reason, status.message)
    return latched(obs, replace(status, conditions=conditions))


def _describe_unreachable(obs: Observation, now: datetime) -> str:
    """Return the end of a message about a pod on an unreachable node, or an empty string."""
    for pod in obs.current:
        if not pod.ended and is_unreachable(obs, pod.node_name):
            wait = describe_wait(obs, pod, now)
            return f"; pod {pod.name} is on {pod.node_name}{wait}"
    return describe_cut_off(obs)


def _describe_start(obs: Observation, now: datetime) -> Status:
    """Return the status of a gang before its meeting, with what one of its pods waits for."""
    blocker = find_blocker(obs)
    if blocker:
        return describe(obs, Phase.PENDING, blocker.reason, blocker.message)
    message = f"{obs.ready} of {obs.status.pods.desired} nodes are ready"
    unreachable = _describe_unreachable(obs, now)
    if is_late(obs, now) and not unreachable:
        message += f"; {describe_late(obs)}"
        return describe(obs, Phase.STARTING, Reason.WAITING_FOR_PEERS, message)
    pending = [pod for pod in obs.current if pod.state is TrainerState.PENDING]
    if pending:
        # A pod without a container is further behind.
        behind = [pod for pod in pending if not pod.sets_up]
        if not behind:
            verb = "runs" if len(pending) == 1 else "run"
            message += f"; {describe_pods(pending)} {verb} spec.setup"
            return describe(obs, Phase.STARTING, Reason.SETTING_UP, message + unreachable)
        message += f"; {_describe_pending(obs, behind[0])}"
    elif obs.silent:
        message += f"; the workers of {describe_pods(obs.silent)} have not met the others yet"
    return describe(obs, Phase.STARTING, Reason.STARTING, message + unreachable)


def find_blocker(obs: Observation) -> Finding | None:
    """Return what keeps the pods of the attempt from starting, or from being created."""
    if obs.refusal and obs.missing:
        return Finding(obs.refusal.reason, obs.refusal.message)
    total = obs.status.pods.desired
    blocked = [(pod.name, pod.blocked) for pod in obs.current if pod.blocked]
    reasons = {finding.reason for _, finding in blocked}
    if obs.waits_for_nodes and reasons <= {Reason.UNSCHEDULABLE}:
        message = f"the scheduler has no room for all {total} pods yet: {obs.waits_for_nodes}"
        return Finding(Reason.UNSCHEDULABLE, message)
    if not blocked:
        return None
    name, first = blocked[0]
    message = f"{len(blocked)} of {total} pods cannot start; {name}: {first.message}"
    return Finding(first.reason, message)


def _describe_pending(obs: Observation, pod: Pod) -> str:
    where = f"is starting on {pod.node_name}" if pod.node_name else "is not scheduled yet"
    command = f"kubectl -n {obs.job.namespace} describe pod {pod.name}"
    text = f"pod {pod.name} {where} (for details: {command})"
    left = [node.name for node in obs.status.unreachable_nodes]
    if pod.has_claims and left:
        text += (
            f"; a ReadWriteOnce volume may still be attached to the unreachable node {left[0]}: "
            "Kubernetes detaches it after 6 minutes, or at once if the node gets the taint "
            "node.kubernetes.io/out-of-service"
        )
    return text


def describe_backoff(obs: Observation) -> Status:
    """Return the status of an attempt during its back-off."""
    status = obs.status
    count = status.backoff.count
    until = status.backoff.until
    assert until
    began = status.attempt.start or until
    wait = until - began
    minutes = int(LASTING.total_seconds() // 60)
    attempts = "failed attempt" if count == 1 else f"{count} failed attempts"
    why = f"the last {attempts} trained for less than {minutes} minutes"
    if not count:
        # The job has lasted, and its error is of a kind that ends a job if it comes again.
        why = "the last error may have passed by then"
    message = f"backing off for {wait.total_seconds():.0f} s before attempt {obs.attempt}: {why}"
    return describe(obs, Phase.RESTARTING, Reason.BACK_OFF, message)


def set_running(obs: Observation, holds: bool, reason: str, message: str) -> Conditions:
    return set_condition(obs.status.conditions, Condition.RUNNING, holds, reason, message)


def stop_running(conditions: Conditions, reason: str, message: str) -> Conditions:
    """Return the conditions with Running set to False, if it was ever set."""
    if find_condition(conditions, Condition.RUNNING) is None:
        return conditions
    return set_condition(conditions, Condition.RUNNING, False, reason, message)


def with_status(obs: Observation, status: Status) -> Observation:
    """Return the same observation with another status of the job."""
    # Most looks change nothing. What is computed from the pods is then kept.
    if status == obs.status:
        return obs
    job = replace(obs.job, status=status)
    return replace(obs, job=job)
