"""Accelerator profiles are data. The CRD has the same profiles, fields and defaults as the core."""

from pathlib import Path

import pytest
from builders.jobs import FULL_STATUS, a_spec

from ddpjob.core.api import names, profiles
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.yaml_text import load_yaml

CRD = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "files" / "crd.yaml"


@pytest.fixture(scope="module")
def schema():
    """Return the properties of a DDPJob in the CRD."""
    crd = load_yaml(CRD.read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


# The catalog


def test_the_default_needs_no_device():
    assert profiles.catalog()[profiles.DEFAULT].all_devices == ()


def test_a_field_that_a_profile_does_not_have_is_refused():
    row = {"description": "d", "backend": "gloo", "trainerImage": "i", "multiNode": True}
    with pytest.raises(TypeError, match="multi_node"):
        profiles._read_profile("x", row)


@pytest.mark.parametrize("profile", profiles.catalog().values(), ids=profiles.catalog())
def test_every_profile_has_a_description_and_sets_no_reserved_variable(profile):
    assert profile.description
    assert profile.backend in ("gloo", "nccl", "xla")
    assert all(isinstance(value, str) for value in profile.env.values())
    assert not set(profile.env) & names.RESERVED_VARIABLES
    assert not any(name.startswith(names.RESERVED_PREFIX) for name in profile.env)


def test_a_cpu_node_has_one_process_and_no_device():
    assert profiles.resolve_processes("cpu", None, {}) == 1
    assert profiles.resolve_devices("cpu", None, {}) == {}


def test_a_trn1_node_has_all_its_devices():
    trn1 = profiles.catalog()["trn1.32xlarge"]
    assert trn1.devices == {"aws.amazon.com/neuron": 16, "vpc.amazonaws.com/efa": 8}
    assert profiles.resolve_processes("trn1.32xlarge", None, {}) == 32
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
    ("requested", "resources", "processes", "gpus"),
    [
        (None, {}, 1, 1),
        (None, {"limits": {"nvidia.com/gpu": 8}}, 8, 8),
        (None, {"limits": {"nvidia.com/gpu": "4"}}, 4, 4),
        (None, {"requests": {"nvidia.com/gpu": "2"}}, 2, 2),
        (8, {}, 8, 8),
        (1, {"limits": {"nvidia.com/gpu": "8"}}, 1, 8),
        (None, {"limits": {"cpu": "8"}}, 1, 1),
        (None, {"limits": None}, 1, 1),
    ],
)
def test_a_gpu_node_has_one_process_per_gpu(requested, resources, processes, gpus):
    assert profiles.resolve_processes("gpu", requested, resources) == processes
    assert profiles.resolve_devices("gpu", requested, resources) == {"nvidia.com/gpu": gpus}


@pytest.mark.parametrize(("nodes", "requested"), [(1, 2), (1, 32), (4, 32), (4, None)])
def test_a_number_of_processes_that_works_on_trn1_is_accepted(nodes, requested):
    profiles.check_size("trn1.32xlarge", nodes, requested)
    nproc = "auto" if requested is None else requested
    spec = Spec.from_dict(a_spec(accelerator="trn1.32xlarge", nodes=nodes, nprocPerNode=nproc))
    assert spec.nproc_per_node == (requested or 32)


def test_a_small_trn1_node_has_two_processes():
    assert Spec.from_dict(a_spec(accelerator="trn1.2xlarge", nodes=1)).nproc_per_node == 2


def test_a_requested_number_of_processes_comes_before_the_profiles():
    assert profiles.resolve_processes("trn1.32xlarge", 2, {}) == 2
    assert Spec.from_dict(a_spec(nprocPerNode=4)).nproc_per_node == 4


def test_auto_and_null_are_the_profiles_number_of_processes():
    for value in ("auto", None):
        spec = Spec.from_dict(a_spec(accelerator="trn1.32xlarge", nprocPerNode=value))
        assert spec.nproc_per_node == 32


def test_a_spec_has_the_devices_of_its_pods():
    resources = {"limits": {"nvidia.com/gpu": "4"}}
    spec = Spec.from_dict(a_spec(accelerator="gpu", resources=resources))
    assert (spec.nproc_per_node, spec.devices) == (4, {"nvidia.com/gpu": 4})


# The CRD


def test_the_defaults_of_the_crd_are_those_of_the_spec(schema):
    defaults = {}
    for name, field in schema["spec"]["properties"].items():
        if "default" in field:
            defaults[name] = field["default"]
    required = {"image": "i", "args": ["a"]}
    assert Spec.from_dict({**required, **defaults}) == Spec.from_dict(required)
    assert Spec.from_dict(required).nodes == defaults["nodes"] == 1


def test_the_crd_has_every_field_of_the_status(schema):
    # The API server drops a field missing in the CRD.
    check_fields(FULL_STATUS.to_dict(), schema["status"])


def check_fields(value, described):
    """Check that a schema has exactly the fields of a value."""
    if isinstance(value, list):
        check_fields(value[0], described["items"])
    elif isinstance(value, dict) and "properties" in described:
        assert set(value) == set(described["properties"])
        for name, inner in value.items():
            check_fields(inner, described["properties"][name])
