"""Find why a pod was deleted, evicted, refused or lost, from its status."""

from datetime import datetime, timedelta

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, children
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.times import parse_time
from ddpjob.core.observe.observation import Finding

# What a container's end says after its kubelet or its runtime has lost it, as in a crash of the
# node: the kubelet's own reason, and containerd's after a restart, with its exit code.
LOST_REASON = "ContainerStatusUnknown"
LOST_BY_CONTAINERD = ("Unknown", 255)

# The first year of Unix time. A runtime reports it, or year 1, for an unknown time.
UNKNOWN_YEAR = 1970

# A kubelet's reason for an evicted pod.
EVICTED = "Evicted"

# The reason of a pod rejected by its kubelet: the node lacks memory, disk or processes. The kubelet
# itself calls it EVICTED too.
NODE_PRESSURE = "NodePressure"
# Part of the kubelet's message about such a rejection (nodeConditionMessageFmt in the kubelet's
# eviction_manager.go).
REJECTION = "The node had condition"

# The reason of the condition DisruptionTarget if a kubelet ends a pod. At an eviction, that is all.
# The kubelet's reason in the status tells the shutdown of a node, and a critical pod in its place.
BY_KUBELET = "TerminationByKubelet"
BY_CRITICAL_POD = "PreemptionByKubelet"
ENDED_BY_KUBELET = {
    "Terminated": str(Reason.NODE_SHUTDOWN),
    "Preempting": BY_CRITICAL_POD,
}


def disruption(body: Dict, end: Dict | None) -> Finding | None:
    """Return why a pod was deleted, evicted or lost, or None if it was not."""
    metadata = child(body, "metadata")
    status = child(body, "status")
    node = child(body, "spec").get("nodeName")
    pod = names.pod_on_node(str(metadata.get("name")), str(node or ""))
    target = _disruption_target(status)
    if target:
        reason = str(target.get("reason") or "Disrupted")
        if reason == BY_KUBELET:
            reason = ENDED_BY_KUBELET.get(str(status.get("reason")), reason)
        message = _with_words(f"{pod} was disrupted", target.get("message"))
        return Finding(reason, message, parse_time(target.get("lastTransitionTime")))
    if end is not None and is_lost(end) and not own_limit(status):
        message = f"{pod} is lost: the node restarted, or its kubelet lost the container"
        return Finding(Reason.NODE_RESTARTED, message, finished_at(end))
    if metadata.get("deletionTimestamp"):
        return Finding("PodDeleted", f"{pod} was deleted", _deletion_time(metadata))
    # A kubelet writes the reason for refusing a pod into the pod's status. The reason of a
    # container's own failure is in the status of the container.
    refused = status.get("reason") or end is None
    if status.get("phase") == "Failed" and refused and not own_limit(status):
        reason = str(status.get("reason") or "PodLost")
        if reason == EVICTED:
            reason = NODE_PRESSURE
        message = _with_words(f"{pod} failed", status.get("message"))
        return Finding(reason, message)
    return None


def finished_at(end: Dict) -> datetime | None:
    """Return when a container ended, or None if the time is not known."""
    time = parse_time(end.get("finishedAt"))
    return time if time and time.year > UNKNOWN_YEAR else None


def own_limit(status: Dict) -> Finding | None:
    """Return the kubelet's words if it evicted the pod for exceeding a limit of its own.

    An eviction under node pressure has the condition DisruptionTarget. The state of the containers
    decides nothing: a slow kubelet writes it later.
    """
    message = str(status.get("message") or "the pod exceeded a limit of its own")
    if status.get("reason") != EVICTED or _disruption_target(status):
        return None
    return None if REJECTION in message else Finding(EVICTED, message)


def is_lost(end: Dict) -> bool:
    reason = end.get("reason")
    if reason == LOST_REASON:
        return True
    return (reason, end.get("exitCode")) == LOST_BY_CONTAINERD


def _disruption_target(status: Dict) -> Dict:
    """Return the condition DisruptionTarget if it is True."""
    condition = condition_of(status, "DisruptionTarget")
    return condition if condition.get("status") == "True" else {}


def _deletion_time(metadata: Dict) -> datetime | None:
    """Return when the deletion was requested.

    `deletionTimestamp` is the end of the grace period.
    """
    deadline = parse_time(metadata.get("deletionTimestamp"))
    grace = metadata.get("deletionGracePeriodSeconds")
    if deadline is None or not isinstance(grace, int):
        return deadline
    try:
        return deadline - timedelta(seconds=grace)
    except OverflowError:
        # The API server accepts any 64-bit number.
        return deadline


def _with_words(message: str, words: object) -> str:
    """Return a message with the words of Kubernetes, if there are any."""
    return f"{message}: {words}" if words else message


def condition_of(status: Dict, kind: str) -> Dict:
    found = (one for one in children(status, "conditions") if one.get("type") == kind)
    return next(found, {})
