"""Two nodes that say they are trn1.32xlarge, and a job that takes them whole."""

import json
from collections.abc import Iterator

import pytest

from .builders import script, script_job
from .harness import WORKERS, Cluster, Space

DEVICES = {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"}
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
AWS_SAMPLE = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "CCOM_SOCKET_IFNAME": "eth0",
}
"""What every Trn1 recipe of AWS sets for several nodes, and the interface that Neuron's bootstrap takes on EKS."""


def set_devices(cluster: Cluster, node: str, devices: dict[str, str | None]) -> None:
    patch = json.dumps({"status": {"capacity": devices, "allocatable": devices}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "--patch", patch)


@pytest.fixture
def trn1_nodes(cluster: Cluster) -> Iterator[None]:
    """Both workers have the devices and the label of a trn1.32xlarge."""
    for node in WORKERS:
        set_devices(cluster, node, dict(DEVICES))
        cluster.kubectl("label", "node", node, f"{INSTANCE_TYPE}=trn1.32xlarge")
    yield
    for node in WORKERS:
        set_devices(cluster, node, dict.fromkeys(DEVICES))
        cluster.kubectl("label", "node", node, f"{INSTANCE_TYPE}-")


@pytest.mark.usefixtures("trn1_nodes")
def test_a_trn1_job_takes_two_whole_nodes_and_its_processes_see_the_fabric(space: Space):
    # No spreading: a node has devices for one pod.
    space.apply(
        *script_job(
            "trn1",
            script("print_environment.py"),
            accelerator="trn1.32xlarge",
            topologySpreadConstraints=[],
        )
    )

    status = space.wait_for_status("trn1", phase="Complete")
    pods = space.pods("trn1")

    assert status["resolved"] == status["resolved"] | {"nprocPerNode": 32, "worldSize": 64}
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == set(WORKERS)
    for pod in pods.values():
        trainer = next(one for one in pod["spec"]["containers"] if one["name"] == "trainer")
        assert DEVICES.items() <= trainer["resources"]["limits"].items()
    processes = [
        json.loads(line)
        for name in pods
        for line in space.logs(name).splitlines()
        if line.startswith("{")
    ]
    assert sorted(process["RANK"] for process in processes) == list(range(64))
    assert all(AWS_SAMPLE.items() <= process.items() for process in processes)
    first = [
        json.loads(line) for line in space.logs("trn1-0-0").splitlines() if line.startswith("{")
    ]
    assert {process["RANK"] for process in first} == set(range(32)), (
        "rank 0 is on pod 0, its node holds ranks 0 to 31"
    )
