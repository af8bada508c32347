"""The size of a run: what the user asks for, or at most what the machine has."""

import pytest
import yaml

from ddpjob.local.manifest import read
from ddpjob.local.sizes import Overrides


def write(tmp_path, **spec):
    path = tmp_path / "job.yaml"
    job = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "j"},
        "spec": {"image": "i", "args": ["a"], **spec},
    }
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.parametrize(
    ("written", "wanted", "cores", "size"),
    [
        ((2, 1), {}, 1, (2, 1)),
        ((2, 2), {}, 1, (2, 2)),
        ((2, 8), {}, 2, (2, 2)),
        ((2, 8), {}, 16, (2, 8)),
        ((100, 1), {}, 8, (8, 1)),
        ((2, 8), {"nproc": 8}, 2, (2, 8)),
        ((100, 1), {"nodes": 6}, 2, (6, 1)),
        ((2, 8), {"nodes": 1}, 2, (1, 4)),
    ],
)
def test_a_job_gets_a_size_that_fits(tmp_path, written, wanted, cores, size):
    nodes, nproc = written
    path = write(tmp_path, nodes=nodes, nprocPerNode=nproc)
    manifest = read(path, Overrides(**wanted), cores)
    assert (manifest.spec.nodes, manifest.spec.nproc_per_node) == size
    assert (manifest.job.spec.nodes, manifest.job.spec.nproc_per_node) == size
    spec = manifest.document["spec"]
    assert (spec["nodes"], spec["nprocPerNode"]) == size


def test_a_smaller_size_is_a_note(tmp_path):
    path = write(tmp_path, nodes=2, nprocPerNode=8)
    note = "the job has 2 x 8 processes, and this machine 2 cores: running 2 x 2"
    assert note in read(path, cores=2).notes[0]
    assert not [one for one in read(path, Overrides(nproc=8), 2).notes if "processes" in one]


def test_what_an_accelerator_supports_does_not_matter_on_this_machine(tmp_path):
    # On a trn1.32xlarge of several nodes only 32 processes work together.
    path = write(tmp_path, nodes=2, accelerator="trn1.32xlarge")
    assert read(path, cores=4).spec.nproc_per_node == 2
    assert read(path, Overrides(nproc=1), 4).spec.nproc_per_node == 1


def test_restarts_and_variables_are_replaced(tmp_path):
    env = [{"name": "B", "value": "2"}, {"name": "A", "value": "$(B)/x"}]
    path = write(tmp_path, env=env, failurePolicy={"maxRestarts": 9, "windowSeconds": 60})
    manifest = read(path, Overrides(max_restarts=0, env={"B": "3", "C": "4"}))
    spec = manifest.document["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 0, "windowSeconds": 60}
    # A refers to B, so B stays before it.
    assert [one["name"] for one in spec["env"]] == ["B", "A", "C"]
    assert spec["env"][0]["value"] == "3"


def test_a_date_is_a_string_as_in_kubernetes(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(write(tmp_path).read_text() + "  env: [{name: DAY, value: 2026-01-01}]\n")
    assert read(path).document["spec"]["env"][0]["value"] == "2026-01-01"


def test_another_kind_is_refused_with_its_name(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: j}\n")
    with pytest.raises(ValueError, match="must contain one DDPJob, got 0; it has PyTorchJob"):
        read(path)
