"""A worker freezes and comes back, with nobody at the keyboard."""

from collections.abc import Iterator

import pytest

from .cluster import WORKERS, Cluster
from .namespace import Namespace
from .training import (
    JOB,
    SHORT,
    assert_as_good_as_undisturbed,
    assert_resumed,
    start_training,
)

# The job of test_waiting.py holds the first worker, so the second one dies.
SURVIVOR, VICTIM = WORKERS


@pytest.fixture
def impatient_operator(cluster: Cluster) -> Iterator[None]:
    """Run the operator on the survivor, and let it give a silent node up after 5 s."""
    values = {"deadNodeSeconds": "5", r"nodeSelector.kubernetes\.io/hostname": SURVIVOR}
    cluster.install(**values)
    yield
    cluster.install()


@pytest.mark.alone
@pytest.mark.usefixtures("impatient_operator")
def test_a_job_moves_away_from_a_dead_node_and_leaves_nothing_there(
    cluster: Cluster, namespace: Namespace
):
    start_training(namespace, SHORT)
    assert sorted(namespace.nodes_of(JOB).values()) == sorted(WORKERS)
    (lost,) = (pod for pod, node in namespace.nodes_of(JOB).items() if node == VICTIM)
    uid = namespace.pods(JOB)[lost]["metadata"]["uid"]

    with cluster.paused(VICTIM):
        namespace.wait_for_status(JOB, attempt=1, phase="Running")
        assert set(namespace.nodes_of(JOB).values()) == {SURVIVOR}
        assert_resumed(namespace, attempt=1)
        status = namespace.wait_for_complete(JOB, disruptions=1)

    failure = status["lastFailure"]
    assert (failure["cause"], failure["reason"]) == ("Disruption", "NodeUnreachable")
    assert (failure["node"], failure["pod"]) == (VICTIM, lost)
    assert_as_good_as_undisturbed(status)
    namespace.wait_until_nothing_runs(JOB)
    namespace.wait(
        f"{lost} does not run on the node that came back",
        lambda: uid not in cluster.pods_of_kubelet(VICTIM),
        60,
    )
