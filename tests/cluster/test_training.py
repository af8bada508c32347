"""Jobs without faults: the examples as they are shipped."""

import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from .builders import example
from .cluster import Cluster
from .commands import Object
from .namespace import Namespace


def nodes_of(pods: dict[str, Object]) -> set[str]:
    return {pod["spec"]["nodeName"] for pod in pods.values()}


@pytest.fixture(scope="module")
def digits(cluster: Cluster) -> Iterator[SimpleNamespace]:
    """Run the example `digits` once and return its status while it ran and afterwards."""
    namespace = Namespace(cluster, f"digits-{uuid.uuid4().hex[:6]}")
    namespace.apply(example("digits.yaml"))
    running = namespace.wait_for_status("digits", phase="Running", nodesReady="2/2")
    complete = namespace.wait_for_complete("digits")
    yield SimpleNamespace(namespace=namespace, running=running, complete=complete)
    namespace.delete()


def test_digits_example_completes_on_two_nodes(digits: SimpleNamespace):
    assert float(digits.complete["result"]["accuracy"]) >= 0.97
    assert len(nodes_of(digits.namespace.pods("digits"))) == 2


def test_status_shows_the_way_from_apply_to_complete(digits: SimpleNamespace):
    complete = digits.complete
    assert digits.running["startTime"] == complete["startTime"]
    assert complete["completionTime"] >= complete["startTime"]
    conditions = {condition["type"]: condition for condition in complete["conditions"]}
    assert conditions["Complete"]["status"] == "True"
    assert conditions["Running"]["status"] == "False"
    assert {condition["observedGeneration"] for condition in conditions.values()} == {1}
    line = digits.namespace.kubectl("get", "ddp", "digits", "--no-headers").split()
    assert line[:4] == ["digits", "Complete", complete["nodesReady"], "0"]


# The examples without data, with flags for a short run. The last of two equal flags wins. `elastic`
# is the example `toy` with more processes per node.
SHORT = {
    "skewed": ["--steps", "4"],
    "messages": [],
    "model-parallel": ["--steps", "20"],
    "elastic": [],
    "mnist-fake": ["--rounds", "2", "--steps", "2"],
    "resnet50": ["--rounds", "1", "--steps", "1", "--image-size", "32", "--batch-size", "4"],
}

# Of `elastic` instead of 8. Each process imports torch, and two cores run all of them.
PROCESSES_OF_ELASTIC = 2


def test_the_workloads_without_data_complete_as_jobs(namespace: Namespace):
    """Run all examples at the same time, since each alone mostly waits."""
    for name, flags in SHORT.items():
        manifest = example(f"{name}.yaml")
        manifest["spec"]["args"] += flags
        if name == "elastic":
            assert manifest["spec"]["nprocPerNode"] == 8
            manifest["spec"]["nprocPerNode"] = PROCESSES_OF_ELASTIC
        namespace.apply(manifest)

    results = {name: namespace.wait_for_complete(name)["result"] for name in SHORT}

    assert len(nodes_of(namespace.pods("elastic"))) == 2
    assert results["messages"] == {"checked": "16"}
    toy_loss = float(results["elastic"]["loss"])
    assert toy_loss == pytest.approx(float(results["model-parallel"]["loss"]), rel=0.1)
    assert float(results["model-parallel"]["gradient_difference"]) <= 1e-5
    world_size = namespace.progress("elastic-0-0", "start")[0]["world_size"]
    assert world_size == 2 * PROCESSES_OF_ELASTIC
    assert "ddp_overhead" in results["mnist-fake"]
    assert "ddp_overhead" in results["resnet50"]


def test_a_rank_slower_than_the_timeout_is_named_in_the_status(namespace: Namespace):
    manifest = example("skewed.yaml")
    manifest["spec"]["args"] += ["--skew", "30", "--timeout", "5"]
    namespace.apply(manifest)

    status = namespace.wait_for_status("skewed", phase="Failed")

    assert "rank 1 on node 1 (n0001-a0) is slow or stuck" in status["lastFailure"]["message"]


@pytest.fixture
def default_namespace(cluster: Cluster) -> Iterator[Namespace]:
    """Return the namespace of examples/kind/storage.yaml. Its jobs are deleted at the end."""
    namespace = Namespace(cluster, "default")
    yield namespace
    namespace.kubectl("delete", "ddpjobs", "--all")
    selector = "app.kubernetes.io/managed-by=ddpjob-operator"
    namespace.wait(
        "the jobs' pods are gone", lambda: not cluster.read.pods("default", selector), 90
    )


@pytest.mark.usefixtures("data_claim")
def test_the_workloads_with_data_complete_as_jobs(default_namespace: Namespace):
    """Run them on a part of the data: the test is about the path, not about the accuracy."""
    namespace = default_namespace
    # In a kept cluster the checkpoints of earlier jobs still exist, so the names are new.
    run = uuid.uuid4().hex[:6]
    cifar10 = f"cifar10-{run}"
    mnist = f"mnist-{run}"
    hymenoptera = f"hymenoptera-{run}"

    def start(name: str, *flags: str) -> None:
        manifest = example(f"{name.partition('-')[0]}.yaml")
        manifest["metadata"]["name"] = name
        manifest["spec"]["args"] += flags
        manifest["spec"]["fastStart"] = True
        namespace.apply(manifest)

    size = ("--epochs", "1", "--limit-train", "1000", "--limit-test", "300")
    start(cifar10, *size, "--batch-size", "16", "--checkpoint-every", "20")
    start(mnist, "--epochs", "1")
    results = {name: namespace.wait_for_complete(name)["result"] for name in (cifar10, mnist)}
    # Fine-tune what cifar10 has learnt and kept in the claim of the checkpoints.
    weights = f"/checkpoints/{cifar10}/model.pth"
    start(hymenoptera, "--weights", weights, "--epochs", "1", "--image-size", "32")
    results[hymenoptera] = namespace.wait_for_complete(hymenoptera)["result"]
    (fine_tuning,) = namespace.progress(f"{hymenoptera}-0-0", "start")

    assert float(results[cifar10]["accuracy"]) > 0.15, "ten classes: chance is 0.1"
    assert float(results[mnist]["accuracy"]) > 0.7, "after one epoch of 8,000 digits"
    assert "best_accuracy" in results[hymenoptera]
    assert (fine_tuning["train_samples"], fine_tuning["test_samples"]) == (244, 153)
    assert fine_tuning["world_size"] == 2
    for name in (cifar10, mnist, hymenoptera):
        assert len(nodes_of(namespace.pods(name))) == 2
