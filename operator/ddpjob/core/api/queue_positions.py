"""Positions of waiting Workloads in their queues, as Kueue's API of visibility tells them."""

from typing import NamedTuple

from ddpjob.core.api.queue import GROUP
from ddpjob.core.api.readers import Dict, child, children, integer_or_none

# The API that lists the pending Workloads of a queue, in their order. It is a server of its own,
# and an installation of Kueue may lack it.
VISIBILITY_GROUP = f"visibility.{GROUP}"
PENDING_WORKLOADS = "pendingworkloads"


class Position(NamedTuple):
    """The position of a pending Workload, in its LocalQueue and in its ClusterQueue.

    The first is 1.
    """

    in_local_queue: int
    in_cluster_queue: int


def read_positions(answer: Dict, namespace: str) -> dict[str, Position]:
    """Return the positions in a list of pending Workloads, by the names of the Workloads.

    Kueue counts from 0. What is not readable, or of another namespace, is left out.
    """
    found = {}
    for item in children(answer, "items"):
        metadata = child(item, "metadata")
        name = metadata.get("name")
        local = integer_or_none(item.get("positionInLocalQueue"))
        cluster = integer_or_none(item.get("positionInClusterQueue"))
        if not isinstance(name, str) or metadata.get("namespace") != namespace:
            continue
        if local is not None and cluster is not None and min(local, cluster) >= 0:
            found[name] = Position(local + 1, cluster + 1)
    return found
