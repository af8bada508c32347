"""A job on two whole nodes, with the devices of a trn1.32xlarge."""

import json
from collections.abc import Iterator

import pytest

from .builders import script, script_job
from .cluster import WORKERS, Cluster
from .namespace import Namespace

DEVICES = {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"}
INSTANCE_TYPE = "node.kubernetes.io/instance-type"

# Every Trn1 recipe of AWS sets these for several nodes. The last is the network interface for
# Neuron's bootstrap on EKS.
AWS_SAMPLE = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "CCOM_SOCKET_IFNAME": "eth0",
}


def set_devices(cluster: Cluster, node: str, devices: dict[str, str | None]) -> None:
    patch = json.dumps({"status": {"capacity": devices, "allocatable": devices}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "--patch", patch)


@pytest.fixture
def trn1_nodes(cluster: Cluster) -> Iterator[None]:
    """Give both workers the devices and the label of a trn1.32xlarge."""
    for node in WORKERS:
        set_devices(cluster, node, dict(DEVICES))
        cluster.kubectl("label", "node", node, f"{INSTANCE_TYPE}=trn1.32xlarge")
    yield
    for node in WORKERS:
        set_devices(cluster, node, dict.fromkeys(DEVICES))
        cluster.kubectl("label", "node", node, f"{INSTANCE_TYPE}-")


@pytest.mark.usefixtures("trn1_nodes")
def test_a_trn1_job_takes_two_whole_nodes_and_its_processes_see_the_fabric(namespace: Namespace):
    # No spreading is needed: a node has devices for one pod.
    spec = {"accelerator": "trn1.32xlarge", "topologySpreadConstraints": []}
    namespace.apply(*script_job("trn1", script("print_environment.py"), **spec))

    status = namespace.wait_for_status("trn1", phase="Complete")
    pods = namespace.pods("trn1")

    assert status["resolved"] == status["resolved"] | {"nprocPerNode": 32, "worldSize": 64}
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == set(WORKERS)
    for pod in pods.values():
        (trainer,) = (one for one in pod["spec"]["containers"] if one["name"] == "trainer")
        assert DEVICES.items() <= trainer["resources"]["limits"].items()

    processes = []
    for name in pods:
        processes += namespace.json_lines(name)
    assert sorted(process["RANK"] for process in processes) == list(range(64))
    assert all(AWS_SAMPLE.items() <= process.items() for process in processes)
    first = namespace.json_lines("trn1-0-0")
    assert {process["RANK"] for process in first} == set(range(32)), "pod 0 has ranks 0 to 31"
