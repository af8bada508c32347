"""Statuses of pods by what the scheduler, their kubelet or the control plane did to them."""

from ddpjob.core.api.times import format_time

from .containers import ended
from .times import NOW


def not_scheduled(reason, message):
    entry = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"phase": "Pending", "conditions": [entry]}


def unschedulable(message="0/3 nodes are available: 3 Insufficient cpu."):
    return not_scheduled("Unschedulable", message)


def scheduling_gated():
    """Return the status of a pod held by a queue with a scheduling gate."""
    return not_scheduled(
        "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"
    )


def disruption_target(reason="EvictionByEvictionAPI", message="Eviction API: evicting", when=NOW):
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_time(when),
    }


def not_ready(status):
    """Return the status that the control plane gives a running pod of an unreachable node.

    The kubelet's last word was that the containers are ready.
    """
    ready = {"type": "Ready", "status": "False"}
    containers_ready = {"type": "ContainersReady", "status": "True"}
    return {**status, "conditions": [ready, containers_ready]}


def evicted(**fields):
    """Return the status after an eviction by the kubelet because of pressure on its node."""
    message = "The node was low on resource: memory."
    target = disruption_target("TerminationByKubelet", message)
    return {**over_own_limit(message, **fields), "conditions": [target]}


def shut_down():
    """Return the status of a pod ended by its kubelet for a shutdown of the node."""
    message = "Pod was terminated in response to imminent node shutdown."
    target = disruption_target("TerminationByKubelet", message)
    ended_pod = {**ended(143), "phase": "Failed", "reason": "Terminated", "message": message}
    return {**ended_pod, "conditions": [target]}


def preempted_by_kubelet():
    """Return the status of a pod ended by its kubelet for a critical pod."""
    message = "Preempted in order to admit critical pod"
    target = disruption_target("TerminationByKubelet", message)
    ended_pod = {**ended(143), "phase": "Failed", "reason": "Preempting", "message": message}
    return {**ended_pod, "conditions": [target]}


def over_own_limit(message="Usage of EmptyDir volume exceeds the limit 1Gi.", **fields):
    """Return the status after the kubelet evicted a pod for exceeding a limit of its own."""
    return {**ended(137, **fields), "phase": "Failed", "reason": "Evicted", "message": message}


REJECTIONS = {
    "UnexpectedAdmissionError": "Allocate failed: no devices left",
    "Evicted": "The node had condition: [DiskPressure]. ",
}


def rejected_by_kubelet(reason="UnexpectedAdmissionError"):
    """Return the status of a pod rejected by the kubelet: no container was started."""
    message = f"Pod was rejected: {REJECTIONS.get(reason, 'no room')}"
    return {"phase": "Failed", "reason": reason, "message": message}
