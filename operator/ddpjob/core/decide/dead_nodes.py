"""Lost pods on unreachable Kubernetes nodes, and the time of their loss.

The kubelet of a crashed node cannot confirm the end of a pod, so Kubernetes keeps the pod. The
operator deletes it by force once Kubernetes itself reports the node as unreachable and the
administrator's time has passed. If most nodes are not ready at once, the control plane is probably
cut off, and the nodes are alive. Then no pod is deleted by force.
"""

from datetime import UTC, datetime, timedelta

from ddpjob.core.api.history import UnreachableNode
from ddpjob.core.api.names import Condition
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.times import format_time, later
from ddpjob.core.observe.observation import Finding, NodeHealth, Observation, Pod

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

# A pod is reported as overdue this long after the end of its grace period.
OVERDUE = timedelta(seconds=30)

# The status names an unreachable node for this long after the job has left it. Volumes of the job
# may still be attached there.
REMEMBERED = timedelta(hours=1)


def is_cut_off(obs: Observation) -> bool:
    """Return True if most Kubernetes nodes are not ready."""
    return 2 * obs.unready_nodes > len(obs.nodes or {})


def describe_cut_off(obs: Observation) -> str:
    """Return why no pod is deleted by force, as the end of a message, or an empty string."""
    if not is_cut_off(obs):
        return ""
    return (
        f"; {obs.unready_nodes} of {len(obs.nodes or {})} Kubernetes nodes are not ready, so no "
        "pod is deleted by force"
    )


def is_unreachable(obs: Observation, name: str) -> bool:
    """Return True if Kubernetes cannot reach the node, or does not have it any more."""
    if not obs.nodes or not name:
        return False
    node = obs.nodes.get(name)
    return node is None or node.health is NodeHealth.UNREACHABLE


def is_not_ready(obs: Observation, name: str) -> bool:
    """Return True if the node is not ready, or if Kubernetes does not have it any more."""
    if not obs.nodes or not name:
        return False
    node = obs.nodes.get(name)
    return node is None or node.health is not NodeHealth.READY


def track_unreachable(obs: Observation, now: datetime) -> tuple[UnreachableNode, ...]:
    """Return the unreachable nodes of the job, each with the time of the first observation.

    While most nodes are not ready, no time runs. It begins anew for a new node of the same name.
    """
    if is_cut_off(obs):
        return ()
    known = {node.name: node for node in obs.status.unreachable_nodes}
    pods = (*obs.pods, *obs.leftovers)
    used = {pod.node_name for pod in pods if not pod.released}
    found = []
    for name in sorted(known.keys() | used):
        if not is_unreachable(obs, name):
            continue
        node = _since(obs, name, known.get(name), now)
        is_remembered = now - node.since < REMEMBERED
        if name in used or is_remembered:
            found.append(node)
    return tuple(found)


def _since(
    obs: Observation,
    name: str,
    known: UnreachableNode | None,
    now: datetime,
) -> UnreachableNode:
    """Return an unreachable node as the status keeps it. A removed node keeps its UID."""
    node = obs.node(name)
    uid = node.uid if node else ""
    if known is None or (uid and known.uid and uid != known.uid):
        return UnreachableNode(name, now, uid)
    return UnreachableNode(name, known.since, uid or known.uid)


def is_dead(obs: Observation, pod: Pod, now: datetime) -> bool:
    """Return True if the pod may be deleted by force, because its node is lost."""
    moment = death_of(obs, pod)
    return moment is not None and moment <= now


def death_of(obs: Observation, pod: Pod) -> datetime | None:
    """Return when the pod may be deleted by force; None without a reason for it."""
    wait = obs.policy.dead_node_time
    if wait is None or pod.released:
        return None
    overdue = later(pod.deletion_deadline, wait) if pod.deletion_deadline else None
    if not obs.nodes:
        return overdue if pod.looks_lost else None
    node = obs.nodes.get(pod.node_name)
    # A ready node may have kept the taint by mistake. Kubernetes does not force its pods either.
    if node and node.health is NodeHealth.READY:
        return None
    if node and OUT_OF_SERVICE in node.taints:
        return datetime.min.replace(tzinfo=UTC)
    if is_cut_off(obs):
        return None
    if node and node.health is NodeHealth.NOT_READY:
        return overdue
    lost_since = obs.unreachable_since.get(pod.node_name)
    return later(lost_since, wait) if lost_since else overdue


def next_death(obs: Observation, now: datetime) -> datetime | None:
    """Return when the next pod may be deleted by force."""
    pods = (*obs.pods, *obs.leftovers)
    moments = [death_of(obs, pod) for pod in pods]
    future = [moment for moment in moments if moment and moment > now]
    return min(future, default=None)


def next_overdue(obs: Observation, now: datetime) -> datetime | None:
    """Return when the next awaited pod is overdue. The status then reports it."""
    own = obs.pods if obs.status.has(Condition.SUSPENDED) else obs.older
    waited_for = [pod for pod in (*own, *obs.leftovers) if not pod.released]
    deadlines = [pod.deletion_deadline for pod in waited_for]
    moments = [later(deadline, OVERDUE) for deadline in deadlines if deadline]
    future = [moment for moment in moments if moment > now]
    return min(future, default=None)


def describe_wait(obs: Observation, pod: Pod, now: datetime) -> str:
    """Return the end of a message about an unfinished pod: what its end waits for."""
    wait = obs.policy.dead_node_time
    by_hand = (
        "if the node is down, delete the pod: kubectl "
        f"-n {obs.job.namespace} delete pod {pod.name} --force"
    )
    end = f"after {wait.total_seconds():.0f} s the pod is deleted by force" if wait else by_hand
    lost_since = obs.unreachable_since.get(pod.node_name)
    if lost_since:
        return f"; the node is unreachable since {format_time(lost_since)}; {end}"
    if is_cut_off(obs):
        return describe_cut_off(obs)
    deadline = pod.deletion_deadline
    if deadline is None or now < later(deadline, OVERDUE):
        return ""
    what = f"; it should have ended at {format_time(deadline)}"
    if not obs.nodes:
        return f"{what}, and the operator may not read nodes; {by_hand}"
    node = obs.nodes.get(pod.node_name)
    if node and node.health is NodeHealth.READY:
        return f"{what}; its node is ready: ask the administrator to check the kubelet there"
    return f"{what}; {end}"


def describe_death(obs: Observation, pod: Pod) -> str:
    """Return why a pod may be deleted by force. `is_dead` must be true for it."""
    name = pod.node_name
    node = obs.node(name)
    if node and OUT_OF_SERVICE in node.taints:
        return f"node {name} has the taint {OUT_OF_SERVICE}"
    if obs.nodes and name and node is None:
        return f"node {name} does not exist any more"
    if node and node.health is NodeHealth.UNREACHABLE:
        return f"node {name} is unreachable"
    deadline = pod.deletion_deadline
    ended = f"the pod should have ended at {format_time(deadline)}" if deadline else ""
    return f"{ended}, and its node {name or '(none)'} is not ready"


def find_end_of_node(obs: Observation, pod: Pod, now: datetime) -> Finding | None:
    """Return why a pod is lost or must move because of its node, or None."""
    if pod.ended or pod.released or not pod.node_name:
        return None
    if is_dead(obs, pod, now):
        message = f"pod {pod.name} is lost: {describe_death(obs, pod)}"
        return Finding(Reason.NODE_UNREACHABLE, message)
    node = obs.node(pod.node_name)
    if node is None:
        return None
    for taint in node.taints:
        tolerated = taint in pod.tolerated or "" in pod.tolerated
        if taint in obs.policy.disruption_taints and not tolerated:
            message = (
                f"node {pod.node_name} of pod {pod.name} is about to end: it has taint {taint}"
            )
            return Finding(Reason.NODE_ENDING, message)
    return None
