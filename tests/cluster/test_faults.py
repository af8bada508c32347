"""Faults in the middle of a job: it resumes from its checkpoint and reports the cause."""

from collections import Counter
from collections.abc import Callable

import pytest

from .builders import digits_with_checkpoints
from .cluster import WORKERS, Cluster
from .namespace import Namespace

# Run in a pod, whose process 1 is torchrun: send SIGKILL to its children.
KILL_WORKERS = """
import os
for name in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{name}/stat") as stat:
        parent = stat.read().rpartition(")")[2].split()[1]
    if parent == "1":
        os.kill(int(name), 9)
"""

JOB = "digits"


@pytest.fixture
def start(namespace: Namespace) -> Callable[[int], None]:
    """Return a function that starts a job of so many epochs and waits for its first checkpoint.

    Most steps are still to come then. An epoch takes about a third of a second.
    """

    def start(epochs: int) -> None:
        namespace.claim("checkpoints")
        namespace.apply(digits_with_checkpoints(JOB, epochs))
        namespace.wait_for_checkpoint(JOB)

    return start


def resumed_step(namespace: Namespace, attempt: int) -> int:
    """Return the step that an attempt resumed from."""
    pod = f"{JOB}-{attempt}-0"
    start = namespace.wait(f"{pod} has started to train", lambda: namespace.progress(pod, "start"))
    return int(start[0]["resumed_step"])


def assert_no_index_was_refilled(seen: list[str]) -> None:
    """Assert that there were two attempts of two pods, and no name was given to two pods."""
    pods_by_name = Counter(line.split()[0] for line in seen)
    expected = {f"{JOB}-{attempt}-{index}": 1 for attempt in (0, 1) for index in (0, 1)}
    assert pods_by_name == expected


def test_a_killed_worker_process_costs_one_restart_and_no_checkpoint(
    namespace: Namespace, start: Callable[[int], None]
):
    start(35)
    namespace.python(f"{JOB}-0-1", KILL_WORKERS)

    assert namespace.wait_for_status(JOB, attempt=1)["restarts"] == 1
    assert resumed_step(namespace, attempt=1) >= 25
    status = namespace.wait_for_complete(JOB, 300, failures=1)

    failure = status["lastFailure"]
    assert (failure["attempt"], failure["cause"]) == (0, "Failure")
    assert (failure["pod"], failure["rank"], failure["exitCode"]) == (f"{JOB}-0-1", 1, -9)
    assert failure["node"] in WORKERS
    assert float(status["result"]["accuracy"]) >= 0.97


def test_a_deleted_pod_costs_one_disruption_and_its_index_is_not_refilled(
    namespace: Namespace, start: Callable[[int], None]
):
    start(35)
    with namespace.watching_pods() as seen:
        namespace.kubectl("delete", "pod", f"{JOB}-0-1", "--wait=false")
        assert resumed_step(namespace, attempt=1) >= 25
        status = namespace.wait_for_complete(JOB, 300, disruptions=1)

    assert status["lastFailure"]["cause"] == "Disruption"
    assert status["lastFailure"]["pod"] == f"{JOB}-0-1"
    assert_no_index_was_refilled(seen)


def test_a_pod_force_deleted_while_the_operator_is_down_costs_one_disruption(
    cluster: Cluster, namespace: Namespace, start: Callable[[int], None]
):
    # More epochs: the job must still train when the operator's pod is gone.
    start(60)
    with namespace.watching_pods() as seen:
        with cluster.operator_down():
            namespace.kubectl("delete", "pod", f"{JOB}-0-1", "--force", "--grace-period=0")
            namespace.wait("the pod is gone", lambda: f"{JOB}-0-1" not in namespace.pods(JOB))
        assert resumed_step(namespace, attempt=1) >= 25
        status = namespace.wait_for_complete(JOB, 300, disruptions=1)

    assert status["lastFailure"]["cause"] == "Disruption"
    assert status["lastFailure"]["pod"] == f"{JOB}-0-1"
    assert_no_index_was_refilled(seen)
