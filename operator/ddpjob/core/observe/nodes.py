"""Read a Kubernetes node, as the API server shows it, into a Node."""

from ddpjob.core.api.readers import Dict, child, children
from ddpjob.core.observe.observation import Node, NodeHealth

# Effects of taints against new pods.
REPELLING = ("NoSchedule", "NoExecute")


def read_node(body: Dict) -> Node:
    """Read a node. Never raises: without the condition Ready, the kubelet has not reported yet."""
    metadata = child(body, "metadata")
    health = NodeHealth.NOT_READY
    for condition in children(child(body, "status"), "conditions"):
        if condition.get("type") == "Ready" and condition.get("status") in list(NodeHealth):
            health = NodeHealth(condition["status"])
    taints = children(child(body, "spec"), "taints")
    keys = [str(taint.get("key", "")) for taint in taints if taint.get("effect") in REPELLING]
    return Node(
        name=str(metadata.get("name", "")),
        health=health,
        taints=tuple(sorted(set(keys))),
        uid=str(metadata.get("uid", "")),
    )
