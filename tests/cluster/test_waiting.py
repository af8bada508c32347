"""A job whose second node is not there yet. It waits from the first test on, this looks at it in the last one."""

from .builders import LATE
from .harness import WORKERS, Cluster, Space


def test_a_job_waits_for_a_node_longer_than_torchrun_would(cluster: Cluster, waiting: Space):
    """torchrun's own read_timeout of 60 s gives up after less than twice that time."""
    first, second = WORKERS
    status = waiting.wait_for_status("digits", reason="Unschedulable")
    assert "digits-0-" in status["message"]
    waiting.wait(
        "one node's agent has waited for 130 s", lambda: agent_seconds(waiting, first) > 130, 200
    )
    cluster.kubectl("label", "node", second, f"{LATE}=")
    status = waiting.wait_for_complete("digits")
    assert status["attempt"] == 0


def agent_seconds(space: Space, node: str) -> float:
    """For how long the running pod on `node` has run, by the clock of that pod; 0 while there is none."""
    running = [
        name
        for name, pod in space.pods("digits").items()
        if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running"
    ]
    if not running:
        return 0.0
    started_ticks, uptime = space.kubectl(
        "exec", running[0], "--", "python", "-c",
        "print(open('/proc/1/stat').read().split()[21], open('/proc/uptime').read().split()[0])",
    ).split()  # fmt: skip
    return float(uptime) - int(started_ticks) / 100
