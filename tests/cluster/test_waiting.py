"""A job without its second node from the first test on, until the node comes in this last one."""

from collections.abc import Iterator

import pytest

from .builders import LATE, WAITING
from .cluster import WORKERS, Cluster
from .namespace import Namespace

SECONDS_SINCE_START = (
    "print(open('/proc/1/stat').read().split()[21], open('/proc/uptime').read().split()[0])"
)


@pytest.fixture
def waiting(cluster: Cluster) -> Iterator[Namespace]:
    """Return the namespace of the job waiting since the cluster was created."""
    namespace = Namespace(cluster, WAITING)
    yield namespace
    namespace.delete()


def test_a_job_waits_for_a_node_longer_than_torchrun_would(cluster: Cluster, waiting: Namespace):
    """Wait for more than twice the default read_timeout of torchrun (60 s)."""
    first, second = WORKERS
    status = waiting.wait_for_status("digits", reason="Unschedulable")
    assert "digits-0-" in status["message"]
    waiting.wait(
        "one node's agent has waited for 130 s", lambda: agent_seconds(waiting, first) > 130, 200
    )
    cluster.kubectl("label", "node", second, f"{LATE}=")
    status = waiting.wait_for_complete("digits")
    assert status["attempt"]["number"] == 0


def agent_seconds(namespace: Namespace, node: str) -> float:
    """Return how long the pod on `node` has run, by its own clock, or 0 if none runs there."""
    for name, pod in namespace.pods("digits").items():
        if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running":
            command = ("exec", name, "--", "python", "-c", SECONDS_SINCE_START)
            # Field 22 of /proc/PID/stat is the start of the process, in hundredths of a second.
            started, uptime = namespace.kubectl(*command).split()
            return float(uptime) - int(started) / 100
    return 0.0
