"""Kubernetes nodes."""

from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import Nodes


def a_node(name="node-0", ready="True", *taints, uid=""):
    """Return a node as the API server shows it. Its taints are given by their keys."""
    return {
        "metadata": {"name": name, "uid": uid or f"uid-of-{name}"},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def nodes_of(*bodies):
    """Return nodes by name, with enough healthy ones that those given are never most of them."""
    healthy = [a_node(f"other-{number}") for number in range(10)]
    return Nodes(map(read_node, [*bodies, *healthy]))
