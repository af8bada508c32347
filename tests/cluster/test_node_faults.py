"""Slow faults of nodes and of the control plane in the middle of a training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from .cluster import CONTROL_PLANE, PLAIN, WORKERS, Cluster
from .commands import Object, run, wait_until
from .namespace import Namespace
from .training import (
    JOB,
    LONG,
    assert_resumed,
    assert_same_weights,
    start_training,
    weights,
)

pytestmark = pytest.mark.faults

SURVIVOR, VICTIM = WORKERS

Finish = Callable[..., Object]


@pytest.fixture
def finish(namespace: Namespace, undisturbed: Object) -> Finish:
    """Return a function which waits for the end of a disturbed training and checks its result.

    Its arguments are the expected counters of the job.
    """

    def finish(**counters: int) -> Object:
        status = namespace.wait_for_complete(JOB, **counters)
        namespace.wait_until_nothing_runs(JOB)
        assert_same_weights(weights(namespace), undisturbed)
        return status

    return finish


def pod_on(namespace: Namespace, node: str) -> str:
    """Return the job's pod on a node."""
    (pod,) = (name for name, place in namespace.nodes_of(JOB).items() if place == node)
    return pod


@contextmanager
def drained(cluster: Cluster, node: str) -> Iterator[None]:
    """Drain a node of the job's pods, and let it take pods again at the end of the block."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    try:
        cluster.kubectl("drain", node, f"--pod-selector=ddpjob.dev/job={JOB}", *options)
        yield
    finally:
        cluster.kubectl("uncordon", node)


def test_a_drained_pod_moves_with_its_gang(cluster: Cluster, namespace: Namespace, finish: Finish):
    start_training(namespace, LONG)
    pod = pod_on(namespace, VICTIM)

    with drained(cluster, VICTIM):
        namespace.wait_for_status(JOB, attempt=1, phase="Running")
        assert set(namespace.nodes_of(JOB).values()) == {SURVIVOR}
    assert_resumed(namespace, attempt=1)
    failure = finish(announced=1)["lastFailure"]

    assert (failure["cause"], failure["reason"]) == ("Disruption", "EvictionByEvictionAPI")
    assert (failure["pod"], failure["node"]) == (pod, VICTIM)


def preemptor(node: str) -> tuple[Object, Object]:
    """Return a PriorityClass, and a pod with it. The pod needs most of a node with two cores."""
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "ddpjob-test-urgent"},
        "value": 1000,
    }
    container = {
        "name": "urgent",
        "image": PLAIN,
        "command": ["python", "-c", "import signal; signal.pause()"],
        "resources": {"requests": {"cpu": "1200m"}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": "ddpjob-test-urgent",
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }
    return priority, pod


def test_a_preempted_pod_waits_for_room_and_resumes(namespace: Namespace, finish: Finish):
    start_training(namespace, LONG, resources={"requests": {"cpu": "1"}})
    pod = pod_on(namespace, VICTIM)

    namespace.apply(*preemptor(VICTIM))
    waiting = namespace.wait_for_status(JOB, attempt=1, reason="Unschedulable")
    assert "Insufficient cpu" in waiting["message"]
    namespace.kubectl("delete", "pod", "urgent")
    assert_resumed(namespace, attempt=1)
    failure = finish(announced=1)["lastFailure"]

    assert (failure["cause"], failure["reason"]) == ("Disruption", "PreemptionByScheduler")
    assert (failure["pod"], failure["node"]) == (pod, VICTIM)


def test_a_node_that_restarts_costs_one_disruption(
    cluster: Cluster, namespace: Namespace, finish: Finish
):
    start_training(namespace, LONG)
    pod = pod_on(namespace, VICTIM)

    run("docker", "kill", VICTIM)
    run("docker", "start", VICTIM)
    cluster.wait_for_node(VICTIM)
    assert_resumed(namespace, attempt=1)
    failure = finish(disruptions=1)["lastFailure"]

    # The operator may see the failing peer before the node that is back.
    assert failure["cause"] == "Disruption"
    assert failure["reason"] in ("NodeRestarted", "PeerLost")
    assert (failure["pod"], failure["node"]) == (pod, VICTIM)


@pytest.fixture
def operator_on_survivor(cluster: Cluster) -> Iterator[None]:
    cluster.install(**{r"nodeSelector.kubernetes\.io/hostname": SURVIVOR})
    yield
    cluster.install()


@pytest.mark.usefixtures("operator_on_survivor")
def test_a_frozen_control_plane_costs_nothing(
    cluster: Cluster, namespace: Namespace, finish: Finish
):
    start_training(namespace, LONG)
    lost = "the Lease was not renewed in time"
    before = cluster.operator_log(SURVIVOR).count(lost)

    with cluster.paused(CONTROL_PLANE):
        wait_until(
            "the operator has lost its Lease",
            lambda: cluster.operator_log(SURVIVOR).count(lost) > before,
            90,
        )
    status = finish()

    assert "lastFailure" not in status


def test_an_api_server_that_is_killed_costs_nothing(
    cluster: Cluster, namespace: Namespace, finish: Finish
):
    start_training(namespace, LONG)

    # Its kubelet starts it again.
    run("docker", "exec", CONTROL_PLANE, "pkill", "-KILL", "kube-apiserver")
    cluster.wait_for_node(CONTROL_PLANE)
    status = finish()

    assert "lastFailure" not in status
