"""Jobs that nobody disturbs: the examples as they are shipped."""

import uuid

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


IN_LITTLE = {
    "toy": [],
    "skewed": ["--steps", "4"],
    "messages": [],
    "model-parallel": ["--steps", "20"],
    "elastic": [],
    "mnist-fake": ["--rounds", "2", "--steps", "2"],
    "resnet50": ["--rounds", "1", "--steps", "1", "--image-size", "32", "--batch-size", "4"],
}
"""The examples that need no data, with what makes them short. Flags given again later win."""


def test_the_workloads_without_data_complete_as_jobs(space: Space):
    """Side by side, since each by itself leaves the machine idle most of the time."""
    for name, flags in IN_LITTLE.items():
        manifest = example(f"{name}.yaml")
        manifest["spec"]["args"] += flags
        space.apply(manifest)

    results = {name: space.wait_for_complete(name, 420)["result"] for name in IN_LITTLE}

    assert len(nodes_of(space.pods("toy"))) == 2
    assert results["messages"] == {"checked": "16"}
    assert float(results["toy"]["loss"]) == pytest.approx(
        float(results["model-parallel"]["loss"]), rel=0.1
    )
    assert float(results["model-parallel"]["gradient_difference"]) <= 1e-5
    assert space.progress("elastic-0-0", "start")[0]["world_size"] == 16
    assert "ddp_overhead" in results["mnist-fake"]
    assert "ddp_overhead" in results["resnet50"]


def test_a_rank_slower_than_the_time_out_is_named_in_the_status(space: Space):
    manifest = example("skewed.yaml")
    manifest["spec"]["args"] += ["--skew", "30", "--timeout", "5"]
    space.apply(manifest)

    status = space.wait_for_status("skewed", phase="Failed")

    assert "rank 1 on node 1 (a0-n1) is slow or stuck" in status["lastFailure"]["message"]


@pytest.mark.usefixtures("data_claim")
def test_the_workloads_with_data_complete_as_jobs(cluster: Cluster):
    """In the namespace of examples/kind/storage.yaml; on part of the data, since it is the path that is tested."""
    run = uuid.uuid4().hex[:6]  # in a kept cluster the checkpoints of earlier jobs are still there
    cifar10, mnist, hymenoptera = jobs = [
        f"{name}-{run}" for name in ("cifar10", "mnist", "hymenoptera")
    ]
    little = {
        cifar10: ["--limit-train", "5000", "--limit-test", "1000", "--checkpoint-every", "10"],
        mnist: ["--epochs", "1"],
        hymenoptera: [
            "--weights",
            f"/checkpoints/{cifar10}/model.pth",
            "--epochs",
            "1",
            "--image-size",
            "32",
        ],
    }
    space = Space(cluster, "default")

    def start(name: str) -> None:
        manifest = example(f"{name.partition('-')[0]}.yaml")
        manifest["metadata"]["name"] = name
        manifest["spec"]["args"] += little[name]
        space.apply(manifest)

    try:
        start(cifar10)
        results = {cifar10: space.wait_for_complete(cifar10, 420)["result"]}
        start(mnist)
        start(hymenoptera)  # from what cifar10 has learnt and kept in the claim of the checkpoints
        results |= {name: space.wait_for_complete(name)["result"] for name in (mnist, hymenoptera)}
        spread = [len(nodes_of(space.pods(name))) for name in jobs]
        (fine_tuning,) = space.progress(f"{hymenoptera}-0-0", "start")
    finally:
        space.kubectl("delete", "ddpjob", *jobs, "--ignore-not-found")
        poll(
            "the jobs' pods are gone",
            lambda: not any(space.pods(name) for name in jobs),
            90,
            space.explain,
        )

    assert float(results[cifar10]["accuracy"]) > 0.15, "ten classes: chance is 0.1"
    assert float(results[mnist]["accuracy"]) > 0.7, "after one epoch of 8,000 digits"
    assert "best_accuracy" in results[hymenoptera]
    assert (fine_tuning["train_samples"], fine_tuning["test_samples"]) == (244, 153)
    assert fine_tuning["world_size"] == 2
    assert spread == [2, 2, 2]


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
