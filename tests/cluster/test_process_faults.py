"""Slow faults of processes in the middle of a training: ranks, the operator, and other sizes."""

import signal
from contextlib import suppress

import pytest

from .cluster import Cluster
from .commands import CommandFailed, Object
from .namespace import Namespace
from .training import (
    FIND_RANKS,
    JOB,
    LONG,
    assert_as_good_as_undisturbed,
    assert_resumed,
    assert_same_weights,
    signal_workers,
    start_training,
    weights,
)

pytestmark = pytest.mark.faults

# Run in a pod: fill the memory until the kernel kills a rank. The kernel is told to prefer the
# ranks. Small processes fill it, because a large one would come first.
FILL_MEMORY = (
    FIND_RANKS
    + """
def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]

for rank in ranks:
    with open(f"/proc/{rank}/oom_score_adj", "w") as adjustment:
        adjustment.write("1000")

while all(os.path.exists(f"/proc/{rank}") and state(rank) != "Z" for rank in ranks):
    reader, writer = os.pipe()
    if os.fork() == 0:
        held = bytearray(b"x" * (16 << 20))
        os.write(writer, b"!")
        signal.pause()
    os.close(writer)
    os.read(reader, 1)
"""
)


def test_a_rank_that_runs_out_of_memory_is_a_failure(namespace: Namespace, undisturbed: Object):
    start_training(namespace, LONG, resources={"limits": {"memory": "1Gi"}})
    node = namespace.nodes_of(JOB)[f"{JOB}-0-1"]

    # The program may end with its container.
    with suppress(CommandFailed):
        namespace.python(f"{JOB}-0-1", FILL_MEMORY)
    assert_resumed(namespace, attempt=1)
    status = namespace.wait_for_complete(JOB, failures=1)

    failure = status["lastFailure"]
    assert (failure["cause"], failure["reason"]) == ("Failure", "OOMKilled")
    assert (failure["pod"], failure["node"]) == (f"{JOB}-0-1", node)
    assert "raise resources.limits.memory" in failure["message"]
    namespace.wait_until_nothing_runs(JOB)
    assert_same_weights(weights(namespace), undisturbed)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_rank_hangs_its_job(namespace: Namespace, undisturbed: Object, index: int):
    start_training(namespace, LONG, flags=("--timeout", "5"))
    pod = f"{JOB}-0-{index}"
    node = namespace.nodes_of(JOB)[pod]

    signal_workers(namespace, pod, signal.SIGSTOP)
    assert_resumed(namespace, attempt=1)
    status = namespace.wait_for_complete(JOB, failures=1)

    # The agent of its pod answers, so the pod is not lost.
    failure = status["lastFailure"]
    assert (failure["cause"], failure["reason"]) == ("Hang", "PeerHangs")
    assert (failure["pod"], failure["node"]) == (pod, node)
    namespace.wait_until_nothing_runs(JOB)
    assert_same_weights(weights(namespace), undisturbed)


def test_an_operator_killed_during_restarts_counts_each_of_them_once(
    cluster: Cluster, namespace: Namespace, undisturbed: Object
):
    start_training(namespace, LONG)

    # Killed when it learns of the failure, and again when it has begun to replace the gang.
    signal_workers(namespace, f"{JOB}-0-1", signal.SIGKILL)
    cluster.kill_operator()
    namespace.wait_for_status(JOB, attempt=1)
    cluster.kill_operator()
    assert_resumed(namespace, attempt=1)
    # Until the operator has seen that the pod takes part, its end would use no budget.
    namespace.wait_for_status(JOB, attempt=1, phase="Running")
    # It has stayed since the first attempt.
    namespace.kubectl("delete", "pod", f"{JOB}-0-0", "--wait=false")
    cluster.kill_operator()
    namespace.wait_for_status(JOB, attempt=2)
    cluster.kill_operator()
    assert_resumed(namespace, attempt=2)
    status = namespace.wait_for_complete(JOB, failures=1, disruptions=1)

    causes = [attempt["cause"] for attempt in status["attempts"]]
    assert causes == ["Succeeded", "Disruption", "Failure"]
    assert status["lastFailure"]["pod"] == f"{JOB}-0-0"
    namespace.wait_until_nothing_runs(JOB)
    assert_same_weights(weights(namespace), undisturbed)


def test_a_training_continues_on_more_and_on_fewer_nodes(namespace: Namespace):
    start_training(namespace, LONG)

    for attempt, nodes in ((1, 3), (2, 1)):
        namespace.kubectl("scale", "ddpjob", JOB, f"--replicas={nodes}")
        assert_resumed(namespace, attempt)
        running = namespace.wait_for_status(JOB, phase="Running", nodesReady=f"{nodes}/{nodes}")
        assert running["resolved"]["worldSize"] == nodes
        namespace.wait_for_checkpoint(JOB, attempt)
    status = namespace.wait_for_status(JOB, phase="Complete")

    assert status["budget"] == {"failures": 0, "disruptions": 0, "announced": 0}
    assert (status["attempt"]["number"], status["nodesReady"]) == (2, "1/1")
    causes = [attempt["cause"] for attempt in status["attempts"]]
    assert causes == ["Succeeded", "Resized", "Resized"]
    namespace.wait_until_nothing_runs(JOB)
    assert_as_good_as_undisturbed(status)
