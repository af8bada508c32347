"""Accelerator profiles are data, and the CRD offers exactly them."""

from pathlib import Path

import pytest
import yaml
from builders import NOW, a_spec

from ddpjob.core import names, profiles
from ddpjob.core.pod_fields import POD_FIELDS
from ddpjob.core.spec import KNOWN_FIELDS, Spec
from ddpjob.core.status import Backoff, PodCounts, Status, set_condition

CRD = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "files" / "crd.yaml"


@pytest.fixture(scope="module")
def schema():
    crd = yaml.safe_load(CRD.read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


# --- the catalog


def test_the_profiles_are():
    assert list(profiles.catalog()) == ["cpu", "gpu", "trn1.32xlarge", "trn1.2xlarge"]


@pytest.mark.parametrize("profile", profiles.catalog().values(), ids=profiles.catalog())
def test_every_profile_is_described_and_sets_no_reserved_variable(profile):
    assert profile.description
    assert all(isinstance(value, str) for value in profile.env.values())
    assert not set(profile.env) & names.RESERVED_VARIABLES
    assert not any(name.startswith(names.RESERVED_PREFIX) for name in profile.env)


def test_a_cpu_node_has_one_process_and_no_device():
    assert profiles.processes("cpu", None, None) == 1
    assert profiles.devices("cpu", None, None) == {}


def test_a_trn1_node_is_whole():
    trn1 = profiles.catalog()["trn1.32xlarge"]
    assert trn1.devices == {"aws.amazon.com/neuron": 16, "vpc.amazonaws.com/efa": 8}
    assert profiles.processes("trn1.32xlarge", None, None) == 32
    assert trn1.instance_types == ("trn1.32xlarge",)
    assert trn1.env == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
        "CCOM_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NEURON_RT_RESET_CORES": "1",
        "XLA_TRANSFER_SEED_ASYNC": "1",
        "MALLOC_ARENA_MAX": "64",
    }


@pytest.mark.parametrize(
    ("asked", "resources", "processes", "gpus"),
    [
        (None, None, 1, 1),
        (None, {"limits": {"nvidia.com/gpu": 8}}, 8, 8),
        (None, {"limits": {"nvidia.com/gpu": "4"}}, 4, 4),
        (None, {"requests": {"nvidia.com/gpu": "2"}}, 2, 2),
        (8, None, 8, 8),
        (1, {"limits": {"nvidia.com/gpu": "8"}}, 1, 8),
        (None, {"limits": {"cpu": "8"}}, 1, 1),
        (None, {"limits": None}, 1, 1),
    ],
)
def test_a_gpu_node_has_one_process_a_gpu(asked, resources, processes, gpus):
    assert profiles.processes("gpu", asked, resources) == processes
    assert profiles.devices("gpu", asked, resources) == {"nvidia.com/gpu": gpus}


@pytest.mark.parametrize(("nodes", "processes"), [(1, 2), (1, 32), (4, 32), (4, None)])
def test_workers_that_can_reach_each_other_on_trn1(nodes, processes):
    assert profiles.complaint("trn1.32xlarge", nodes, processes) is None
    assert Spec.from_dict(a_spec(accelerator="trn1.2xlarge", nodes=1)).processes == 2


def test_who_asks_for_processes_gets_them():
    assert profiles.processes("trn1.32xlarge", 2, None) == 2
    assert Spec.from_dict(a_spec(nprocPerNode=4)).processes == 4


# --- the CRD


def test_the_crd_offers_the_catalog(schema):
    assert schema["spec"]["properties"]["accelerator"]["enum"] == list(profiles.catalog())


def test_the_crd_has_the_fields_of_the_spec_and_no_others(schema):
    assert set(schema["spec"]["properties"]) == set(KNOWN_FIELDS)
    assert set(POD_FIELDS) <= set(schema["spec"]["properties"])


def test_the_crds_defaults_are_the_specs(schema):
    fields, spec = schema["spec"]["properties"], Spec(image="i", args=("a",))
    assert fields["nodes"]["default"] == spec.nodes
    assert fields["accelerator"]["default"] == spec.accelerator
    assert fields["nprocPerNode"]["default"] == "auto"
    assert fields["torchrun"]["properties"]["command"]["default"] == list(spec.command)
    assert fields["checkpoint"]["properties"]["mountPath"]["default"] == "/checkpoints"
    policy = fields["failurePolicy"]["properties"]
    assert policy["maxRestarts"]["default"] == spec.failure_policy.max_restarts
    assert policy["maxDisruptions"]["default"] == spec.failure_policy.max_disruptions


A_FULL_STATUS = Status(
    phase="Failed",
    reason="MaxRestartsExceeded",
    message="why",
    observed_generation=1,
    conditions=set_condition((), names.Condition.FAILED, True, "r", "m", NOW),
    attempt=1,
    attempt_started=1,
    attempt_time=NOW,
    restarts=1,
    disruptions=1,
    pods=PodCounts(2, 1, 1, 0, 1),
    resolved={"nprocPerNode": 1, "worldSize": 2, "accelerator": "cpu", "rendezvous": "x"},
    backoff=Backoff(1, NOW),
    last_failure=dict.fromkeys(
        ("attempt", "cause", "node", "pod", "rank", "exitCode", "reason", "message", "time"), "x"
    ),
    start_time=NOW,
    completion_time=NOW,
    result={"accuracy": "1"},
)


def test_the_crd_keeps_every_field_of_the_status(schema):
    """What the CRD does not know is pruned, and would be forgotten at the next look."""
    known = schema["status"]["properties"]
    status = A_FULL_STATUS.to_dict()
    assert set(status) <= set(known)
    for name in ("nodes", "resolved", "lastFailure", "backoff"):
        assert set(status[name]) <= set(known[name]["properties"]), name
    assert set(status["conditions"][0]) | {"observedGeneration"} <= set(
        known["conditions"]["items"]["properties"]
    )
