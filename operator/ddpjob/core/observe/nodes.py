"""Read a Kubernetes node, as the API server shows it, into a Node."""

from ddpjob.core.api.readers import Dict, child, children
from ddpjob.core.observe.observation import Node, NodeHealth

# Effects of taints against new pods.
REPELLING = ("NoSchedule", "NoExecute")


def read_node(body: Dict) -> Node:
    """Read a node. Never raises: without the condition Ready, the kubelet has not reported yet."""
    metadata = child(body, "metadata")
    spec = child(body, "spec")
    status = child(body, "status")
    return Node(
        name=str(metadata.get("name", "")),
        health=_health(status),
        taints=tuple(sorted(_repelling_taints(spec))),
        uid=str(metadata.get("uid", "")),
    )


def _health(status: Dict) -> NodeHealth:
    health = NodeHealth.NOT_READY
    for condition in children(status, "conditions"):
        reported = condition.get("status")
        if condition.get("type") == "Ready" and reported in list(NodeHealth):
            health = NodeHealth(reported)
    return health


def _repelling_taints(spec: Dict) -> set[str]:
    """Return the keys of the taints against new pods."""
    keys = set()
    for taint in children(spec, "taints"):
        if taint.get("effect") in REPELLING:
            keys.add(str(taint.get("key", "")))
    return keys
