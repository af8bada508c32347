"""A DDPJob as a user writes it, beside the one CRD."""

from pathlib import Path
from types import UnionType
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import pytest

from ddpjob import DDPJob
from ddpjob.client.logs import LogLine
from ddpjob.client.reader import Jobs
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.yaml_text import load_yaml
from ddpjob.jobs.user_job import SpecFields

CRD = Path(__file__).parents[2] / "charts/ddpjob-operator/files/crd.yaml"
VERSION = load_yaml(CRD.read_text())["spec"]["versions"][0]
FIELDS = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
HINTS = get_type_hints(SpecFields, include_extras=True)

# Types of JSON Schema, and their Python types.
TYPES = {"integer": int, "string": str, "boolean": bool, "array": list}


def without_required(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Required else hint


def test_the_typed_fields_are_those_of_the_crd():
    assert set(HINTS) == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_typed_field_has_the_type_of_the_crd(name):
    field, hint = FIELDS[name], without_required(HINTS[name])
    if "enum" in field:
        assert list(get_args(hint)) == field["enum"]
    elif field.get("x-kubernetes-int-or-string"):
        assert get_origin(hint) in (Union, UnionType)
        assert get_args(hint) == (int, Literal["auto"])
    elif field["type"] == "object":
        nested = set(getattr(hint, "__annotations__", ()))
        assert nested in (set(), set(field.get("properties", ())))
    else:
        assert (get_origin(hint) or hint) is TYPES[field["type"]]


def test_the_required_fields_are_those_of_the_crd():
    spec = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert SpecFields.__required_keys__ == set(spec["required"])


def test_a_job_becomes_a_manifest_and_back():
    job = DDPJob.create("digits", image="i", args=["train.py"], nodes=2, namespace="team")
    manifest = job.manifest()
    assert manifest["metadata"] == {"name": "digits", "namespace": "team"}
    assert DDPJob.from_manifest(manifest).manifest() == manifest


def test_the_claims_of_a_job_are_those_of_its_checkpoints_its_volumes_and_its_pod_template():
    def volume(name, claim):
        return {"name": name, "persistentVolumeClaim": {"claimName": claim}}

    job = DDPJob.create(
        "digits",
        image="i",
        args=["train.py"],
        checkpoint={"claimName": "ckpt"},
        volumes=[volume("a", "data"), {"name": "b", "emptyDir": {}}, volume("c", "ckpt")],
        podTemplate={"spec": {"volumes": [volume("d", "more")]}},
    )
    assert job.claims == ("ckpt", "data", "more")
    assert DDPJob.create("digits", image="i", args=["train.py"]).claims == ()


def test_what_the_api_server_adds_is_left_out_of_a_manifest():
    metadata = {"name": "j", "uid": "u", "resourceVersion": "7", "labels": {"team": "a"}}
    body = {**DDPJob.create("j", image="i", args=["a"]).manifest(), "metadata": metadata}
    job = DDPJob.from_manifest({**body, "status": {"phase": "Running"}})
    assert job.manifest()["metadata"] == {"name": "j", "labels": {"team": "a"}}
    assert "status" not in job.manifest()
    assert (job.phase, job.uid) == ("Running", "u")


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("j", {"node": 2}, "spec.node: unknown field (did you mean 'nodes'?)"),
        ("j", {"nodes": 0}, "spec.nodes: must be an integer from 1 to 1000, got 0"),
        ("j", {"args": ["python", "x.py"]}, "spec.args: begin with the script or -m"),
        ("J", {}, "metadata.name: must be"),
    ],
)
def test_a_wrong_job_is_refused_at_once(name, spec, message):
    with pytest.raises(SpecError) as refused:
        DDPJob.create(name, **{"image": "i", "args": ["a"], **spec})
    assert message in str(refused.value)


def test_another_kind_is_refused():
    with pytest.raises(SpecError, match=r"expected a ddpjob.dev/v1alpha1 DDPJob"):
        DDPJob.from_manifest({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metadata": {"name": None}}, "metadata.name: is required"),
        ({"metadata": {"name": 5}}, 'metadata.name: must be at most 52 .*, got "5"'),
        ({"metadata": {"name": 10**5000}}, "metadata.name: must be at most 52"),
        ({"kind": 10**5000}, "expected a ddpjob.dev/v1alpha1 DDPJob, got"),
        ({1: 2}, "1: unknown field"),
    ],
)
def test_a_manifest_with_values_of_other_types_is_refused(fields, message):
    manifest = DDPJob.create("j", image="i", args=["a"]).manifest()
    with pytest.raises(SpecError, match=f"^{message}"):
        DDPJob.from_manifest({**manifest, **fields}).check()


def test_a_namespace_that_is_null_is_chosen_by_the_client():
    manifest = DDPJob.create("j", image="i", args=["a"]).manifest()
    manifest["metadata"]["namespace"] = None
    assert DDPJob.from_manifest(manifest).namespace == ""


def test_the_place_of_checkpoints_is_the_claim_and_the_folder_of_the_job():
    job = DDPJob.create("j", image="i", args=["a"], checkpoint={"claimName": "ckpt"})
    assert job.checkpoint == "claim ckpt, folder j/"
    assert DDPJob.create("j", image="i", args=["a"]).checkpoint == ""


def test_a_notebook_shows_a_job_without_its_markup():
    job = DDPJob.create("j", image="i", args=["a"])
    assert job._repr_html_().startswith("<b>j</b> · Pending · 0/1 nodes")


def test_a_job_and_a_line_are_short_if_they_are_printed():
    status = {"phase": "Running", "nodes": {"desired": 2, "ready": 2}}
    body = DDPJob.create("digits", namespace="team", image="i", args=["a"], nodes=2).manifest()
    job = DDPJob.from_manifest({**body, "status": status})
    assert repr(job) == "<DDPJob team/digits: Running, 2/2 nodes>"
    assert str(LogLine("2026-01-01T00:00:00Z", 0, "digits-0-0", 0, "hello")) == "hello"


def test_jobs_are_printed_as_a_table():
    jobs = Jobs(DDPJob.create(name, image="i", args=["a"], nodes=2) for name in ("b", "longer"))
    header, *rows = str(jobs).splitlines()
    assert header.split()[:3] == ["NAME", "PHASE", "NODES"]
    assert [row.split() for row in rows] == [
        ["b", "Pending", "0/2", "0"],
        ["longer", "Pending", "0/2", "0"],
    ]
    assert jobs._repr_html_().startswith("<pre>NAME")
    assert jobs[0].name == "b"


# A job of a script


@pytest.fixture
def project(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_text("import lib.model\n")
    (tmp_path / "lib" / "model.py").write_text("x = 1\n")
    (tmp_path / "requirements.txt").write_text("tqdm\n")
    return tmp_path


def test_a_script_becomes_a_job_with_its_code(project):
    job = DDPJob.from_script(project / "train.py", ["--epochs", "3"], image="i", nodes=2)
    assert (job.name, job.spec["nodes"], job.spec["args"]) == (
        "train",
        2,
        ["train.py", "--epochs", "3"],
    )
    config_map, manifest = job.documents
    assert config_map["data"] == {"train.py": "import lib.model\n"}
    assert manifest["spec"]["code"] == {"configMap": config_map["metadata"]["name"]}


def test_the_folder_of_a_script_goes_with_it(project):
    script = str(project / "lib" / "model.py")
    job = DDPJob.from_script(script, folder=str(project), image="i", namespace="team")
    assert job.spec["args"] == ["lib/model.py"]
    config_map, manifest = job.documents
    assert "code.zip" in config_map["binaryData"]
    assert config_map["metadata"]["namespace"] == manifest["metadata"]["namespace"] == "team"


def test_a_setup_without_versions_is_advised_against(project):
    setup = "pip install -r requirements.txt"
    job = DDPJob.from_script(project / "train.py", folder=project, image="i", setup=setup)
    assert "tqdm has no version" in job.advice[0]


@pytest.mark.parametrize(
    ("script", "fields", "message"),
    [
        ("nowhere.py", {"image": "i"}, "nowhere.py: the file does not exist"),
        ("lib", {"image": "i"}, "lib: the file is a folder"),
        ("train.py", {}, "spec.image: is required"),
        ("train.py", {"image": "i", "nodez": 2}, r"spec\.nodez: unknown field"),
        ("train.py", {"image": "i", "name": "A_b"}, 'metadata.name: must be .*, got "A_b"'),
    ],
)
def test_a_script_that_cannot_run_is_refused(project, script, fields, message):
    with pytest.raises(SpecError, match=message):
        DDPJob.from_script(project / script, **fields)
