"""Jobs that nobody disturbs: the examples as they are shipped."""

import pytest

from .builders import example
from .harness import Cluster, Space, poll


def nodes_of(pods: dict) -> set[str]:
    return {pod["spec"]["nodeName"] for pod in pods.values()}


def test_digits_example_completes_on_two_nodes(space: Space):
    space.apply(example("digits.yaml"))

    status = space.wait_for_complete("digits")

    assert float(status["result"]["accuracy"]) >= 0.97
    assert len(nodes_of(space.pods("digits"))) == 2


@pytest.mark.usefixtures("cifar10")
def test_cifar10_example_completes_on_two_nodes(cluster: Cluster):
    """In the namespace of examples/kind/storage.yaml; on part of the data, since it is the path that is tested."""
    space = Space(cluster, "default")
    manifest = example("cifar10.yaml")
    manifest["spec"]["args"] += ["--limit-train", "5000", "--limit-test", "1000", "--checkpoint-every", "10"]
    space.apply(manifest)
    try:
        status = space.wait_for_complete("cifar10", 420)
        pods = space.pods("cifar10")
        checkpoints = space.progress("cifar10-0-0", "checkpoint")
    finally:
        space.kubectl("delete", "ddpjob", "cifar10")
        poll("the job's pods are gone", lambda: not space.pods("cifar10"), 90, space.explain)

    assert float(status["result"]["accuracy"]) > 0.15, "ten classes: chance is 0.1"
    assert status["resolved"]["worldSize"] == 2
    assert len(nodes_of(pods)) == 2
    assert checkpoints


def test_status_tells_the_way_from_apply_to_complete(space: Space):
    space.apply(example("digits.yaml"))
    running = space.wait_for_status("digits", phase="Running", nodesReady="2/2")
    complete = space.wait_for_status("digits", phase="Complete")

    assert running["startTime"] == complete["startTime"]
    assert complete["completionTime"] >= complete["startTime"]
    conditions = {condition["type"]: condition for condition in complete["conditions"]}
    assert conditions["Complete"]["status"] == "True"
    assert conditions["Running"]["status"] == "False"
    assert {condition["observedGeneration"] for condition in conditions.values()} == {1}
    line = space.kubectl("get", "ddp", "digits", "--no-headers").split()
    assert line[:4] == ["digits", "Complete", complete["nodesReady"], "0"]
