"""A node that dies with nobody at the keyboard, and a job that a queue suspends."""

from collections.abc import Iterator

import pytest

from .builders import digits_with_checkpoints
from .cluster import SYSTEM, WORKERS, Cluster
from .commands import run, wait_until
from .namespace import Namespace

JOB = "digits"


def resumed_step(namespace: Namespace, attempt: int) -> int:
    """Return the step that an attempt resumed from."""
    pod = f"{JOB}-{attempt}-0"
    start = namespace.wait(f"{pod} has started to train", lambda: namespace.progress(pod, "start"))
    return int(start[0]["resumed_step"])


@pytest.fixture
def dying_node(cluster: Cluster) -> Iterator[str]:
    """Return the worker on which the operator does not run. It works again after the test."""
    cluster.install(deadNodeSeconds="5")
    operators = {pod["spec"]["nodeName"] for pod in cluster.read.pods(SYSTEM)}
    node = next(worker for worker in WORKERS if worker not in operators)
    yield node
    run("docker", "unpause", node)
    ready = ("wait", f"node/{node}", "--for=condition=Ready", "--timeout=90s")
    cluster.kubectl(*ready)
    cluster.install()


def test_a_job_goes_on_after_the_death_of_a_node(
    cluster: Cluster, namespace: Namespace, dying_node: str
):
    namespace.claim("checkpoints")
    manifest = digits_with_checkpoints(JOB, 120)
    # Both pods fit on the node that is left.
    manifest["spec"]["topologySpreadConstraints"][0]["whenUnsatisfiable"] = "ScheduleAnyway"
    namespace.apply(manifest)
    namespace.wait_for_checkpoint(JOB)
    nodes = {pod["spec"]["nodeName"] for pod in namespace.pods(JOB).values()}
    assert dying_node in nodes, "the pods are not spread"

    run("docker", "pause", dying_node)
    namespace.wait_for_status(JOB, 240, attempt=1, phase="Running")
    assert resumed_step(namespace, attempt=1) >= 25
    status = namespace.status(JOB)
    assert (status["failures"], status["disruptions"]) == (0, 1)
    assert status["lastFailure"]["cause"] == "Disruption"
    assert status["lastFailure"]["node"] == dying_node
    dead = [pod for pod in namespace.pods(JOB).values() if pod["spec"]["nodeName"] == dying_node]
    assert dead == []

    namespace.kubectl("delete", "ddpjob", JOB)
    wait_until("all pods are gone", lambda: not namespace.pods(JOB), 90, namespace.explain)


def test_a_suspended_job_gives_its_pods_back_and_resumes_from_its_checkpoint(
    namespace: Namespace,
):
    namespace.claim("checkpoints")
    namespace.apply(digits_with_checkpoints(JOB, 35))
    namespace.wait_for_checkpoint(JOB)

    suspend = ("patch", f"ddpjob/{JOB}", "--type=merge", "--patch")
    namespace.kubectl(*suspend, '{"spec": {"suspend": true}}')
    namespace.wait_for_status(JOB, phase="Suspended", nodesReady="0/2")

    def unfinished() -> list[str]:
        phases = {name: pod["status"]["phase"] for name, pod in namespace.pods(JOB).items()}
        return [name for name, phase in phases.items() if phase not in ("Failed", "Succeeded")]

    namespace.wait("no pod runs", lambda: not unfinished(), 90)
    namespace.kubectl(*suspend, '{"spec": {"suspend": false}}')
    assert resumed_step(namespace, attempt=1) >= 25
    status = namespace.wait_for_status(JOB, 300, phase="Complete")
    assert (status["restarts"], status["attempt"]) == (0, 1)
    assert status["attempts"][1]["cause"] == "Suspended"
    assert float(status["result"]["accuracy"]) >= 0.97
