"""A rendered pod as a command: paths, variables and addresses of this machine."""

import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ddpjob.core.agent_files import agent_files
from ddpjob.core.api.job import Job
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.status import Attempt, PodCounts, Status
from ddpjob.core.render import objects
from ddpjob.local.addresses import LocalAddresses
from ddpjob.local.env import LOOPBACK
from ddpjob.local.run import run_settings
from ddpjob.local.run_files import RunFiles
from ddpjob.local.translate import Command, translate

CLAIM = {"claimName": "c", "mountPath": "/checkpoints"}

DATA = {
    "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}],
    "volumeMounts": [{"name": "d", "mountPath": "/data"}],
}


def make_job(**spec) -> Job:
    fields = {"image": "i", "args": ["train.py"], "nodes": 2, **spec}
    metadata = {"name": "j", "namespace": "n", "uid": "u"}
    job = Job.from_dict({"metadata": metadata, "spec": fields})
    assert not job.spec_error
    return replace(job, status=Status(attempt=Attempt(0), pods=PodCounts(desired=fields["nodes"])))


def command(tmp_path: Path, config_maps=None, claims: Mapping[str, Path] = {}, **spec) -> Command:
    """Return the command of node 0 of a job with the fields `spec`."""
    settings = run_settings(lambda: 5555)
    (pod,) = objects.pods(make_job(**spec), [0], settings)
    pod["spec"]["nodeName"] = "laptop"
    return translate(pod, RunFiles(tmp_path, claims, config_maps or {}))


def mount_of(source: dict, **mount) -> dict:
    """Return the fields of a spec to mount one volume."""
    return {
        "volumes": [{"name": "v", **source}],
        "volumeMounts": [{"name": "v", **mount}],
    }


def overlay(**trainer) -> dict:
    return {"podTemplate": {"spec": {"containers": [{"name": "trainer", **trainer}]}}}


# Claims and paths


def test_a_claim_becomes_a_folder_of_the_run(tmp_path):
    found = command(tmp_path, checkpoint=CLAIM)
    assert found.env["DDP_CHECKPOINT_DIR"] == f"{tmp_path}/claims/c/j"
    assert tmp_path / "claims/c" in found.folders


def test_a_claim_may_be_a_folder_that_the_user_chose(tmp_path):
    found = command(tmp_path, checkpoint=CLAIM, claims={"c": Path("/big/disk")})
    assert found.env["DDP_CHECKPOINT_DIR"] == "/big/disk/j"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/checkpoints", "{claim}"),
        ("/checkpoints/a.pt", "{claim}/a.pt"),
        ("--out=/checkpoints/a", "--out={claim}/a"),
        ("/checkpoints-of-old", "/checkpoints-of-old"),
        ("/mnt/checkpoints", "/mnt/checkpoints"),
        ("a:/checkpoints", "a:{claim}"),
    ],
)
def test_only_paths_below_a_mount_are_rewritten(tmp_path, word, expected):
    found = command(tmp_path, args=["train.py", word], checkpoint=CLAIM)
    assert found.argv[-1] == expected.format(claim=tmp_path / "claims/c")


def test_a_path_in_a_reference_is_rewritten_once(tmp_path):
    env = [{"name": "DATA", "value": "/data/cifar10"}, {"name": "TRAIN", "value": "$(DATA)/train"}]
    # The folder's own path has the mount path in it.
    claims = {"c": Path("/data/sets")}
    found = command(tmp_path, claims=claims, env=env, args=["train.py", "$(DATA)"], **DATA)
    assert found.env["DATA"] == found.argv[-1] == "/data/sets/cifar10"
    assert found.env["TRAIN"] == "/data/sets/cifar10/train"


def test_the_files_of_the_agent_are_in_the_folder_of_the_pod(tmp_path):
    found = command(tmp_path)
    folder = tmp_path / "pods/j-0-0"
    assert found.message == folder / "report.json"
    assert found.assignment == folder / "volumes/ddpjob-pod/assignment"
    assert json.loads(found.files[found.assignment])["attempt"] == 0
    assert {*agent_files(), "assignment"} == {file.name for file in found.files}
    options = json.loads(found.argv[4])
    assert options["message"] == str(found.message)
    assert options["assignment"] == str(found.assignment)
    # The shared memory of the machine is not the pod's.
    assert options["clear"] == str(folder / "volumes/ddpjob-shm")
    # Other programs of the machine have the same files and IPC.
    assert options["work"] == str(folder / "volumes/ddpjob-work")
    assert not options["own_files"]
    assert not options["own_ipc"]


def test_the_fields_of_a_pod_can_be_files(tmp_path):
    items = [{"path": "n", "fieldRef": {"fieldPath": "metadata.labels['ddpjob.dev/index']"}}]
    mount = mount_of({"downwardAPI": {"items": items}}, mountPath="/fields")
    assert users_files(command(tmp_path, **mount)) == {"n": "0"}


def test_a_working_folder_below_a_mount_is_used(tmp_path):
    found = command(
        tmp_path, claims={"c": Path("/big")}, **overlay(workingDir="/data/code"), **DATA
    )
    assert found.cwd == Path("/big/code")


def test_a_working_folder_of_the_image_is_not_used(tmp_path):
    assert command(tmp_path, **overlay(workingDir="/not/on/this/machine")).cwd is None
    name_too_long = "/" + "x" * 300
    assert command(tmp_path, **overlay(workingDir=name_too_long)).cwd is None


# ConfigMaps


def users_files(found):
    """Return the content of the user's files by their names."""
    own = ("ddpjob-agent", "ddpjob-pod")
    files = found.files.items()
    return {path.name: text for path, text in files if path.parent.name not in own}


def test_config_maps_become_files(tmp_path):
    mount = mount_of({"configMap": {"name": "m"}}, mountPath="/src")
    found = command(tmp_path, {"m": {"train.py": "print()"}}, args=["/src/train.py"], **mount)
    script = Path(found.argv[-1])
    assert found.files[script] == "print()"


def test_a_script_mounted_by_sub_path_is_a_file(tmp_path):
    source = {"configMap": {"name": "m"}}
    mount = mount_of(source, mountPath="/src/train.py", subPath="train.py")
    found = command(tmp_path, {"m": {"train.py": "print()"}}, args=["/src/train.py"], **mount)
    script = Path(found.argv[-1])
    assert script in found.files
    assert script not in found.folders


def test_projected_config_maps_become_files(tmp_path):
    second = {"name": "n", "items": [{"key": "b", "path": "deep/b"}]}
    sources = [{"configMap": {"name": "m"}}, {"configMap": second}]
    mount = mount_of({"projected": {"sources": sources}}, mountPath="/src")
    found = command(tmp_path, {"m": {"a": "1"}, "n": {"b": "2"}}, **mount)
    assert users_files(found) == {"a": "1", "b": "2"}
    assert any(path.parts[-2:] == ("deep", "b") for path in found.files)


def test_an_item_of_a_config_map_needs_a_path(tmp_path):
    mount = mount_of({"configMap": {"name": "m", "items": [{"key": "k"}]}}, mountPath="/src")
    with pytest.raises(SpecError, match=r"volume v: configMap.items\[\].path: is required"):
        command(tmp_path, {"m": {"k": "text"}}, **mount)


def test_a_config_map_that_is_not_in_the_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match='ConfigMap "m" not found in the manifest'):
        command(tmp_path, envFrom=[{"configMapRef": {"name": "m"}}])


def test_paths_in_config_maps_are_rewritten_but_references_in_them_are_not_expanded(tmp_path):
    reference = {"configMapKeyRef": {"name": "m", "key": "SETS"}}
    found = command(
        tmp_path,
        {"m": {"SETS": "/data/$(HOME)"}},
        claims={"c": Path("/big")},
        envFrom=[{"configMapRef": {"name": "m"}}],
        env=[{"name": "FROM", "valueFrom": reference}, {"name": "OURS", "value": "$(SETS)"}],
        **DATA,
    )
    assert found.env["SETS"] == found.env["FROM"] == found.env["OURS"] == "/big/$(HOME)"


# Refused mounts


def test_a_mount_without_its_volume_is_refused(tmp_path):
    with pytest.raises(SpecError, match='at /x names the volume "x", which the pod does not have'):
        command(tmp_path, volumeMounts=[{"name": "x", "mountPath": "/x"}])


def test_a_host_path_that_does_not_exist_is_refused_and_not_created(tmp_path):
    missing = mount_of({"hostPath": {"path": str(tmp_path / "nowhere")}}, mountPath="/h")
    with pytest.raises(SpecError, match=": does not exist on this machine"):
        command(tmp_path, **missing)
    assert not (tmp_path / "nowhere").exists()


def test_a_host_path_that_exists_is_used(tmp_path):
    mount = mount_of({"hostPath": {"path": str(tmp_path)}}, mountPath="/h")
    assert command(tmp_path, args=["/h"], **mount).argv[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        ({"mountPath": "/d", "subPathExpr": "$(POD)"}, "subPathExpr: is not supported"),
        ({"mountPath": "/"}, "mountPath: must be an absolute path other than '/'"),
        ({"mountPath": "/d", "subPath": "../../up"}, "subPath: must be a relative path without"),
    ],
)
def test_a_mount_that_cannot_work_here_is_refused(tmp_path, mount, message):
    with pytest.raises(SpecError, match=message):
        command(tmp_path, volumes=DATA["volumes"], volumeMounts=[{"name": "d", **mount}])


# Variables


def test_fields_of_the_pod_have_values_of_this_machine(tmp_path):
    env = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    found = command(tmp_path, env=env)
    assert found.env["POD"] == "j-0-0"
    assert found.env["DDP_NODE_NAME"] == "laptop"


def test_a_field_of_the_pod_that_this_machine_does_not_have_is_refused(tmp_path):
    env = [{"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]
    message = "env CPU: source resourceFieldRef is not available on this machine"
    with pytest.raises(SpecError, match=message):
        command(tmp_path, env=env)


def test_references_between_variables_are_expanded(tmp_path):
    env = [{"name": "A", "value": "x"}, {"name": "B", "value": "$(A)-$(NOT_THERE)-$$(A)"}]
    found = command(tmp_path, env=env, args=["train.py", "$(B)"])
    assert found.env["B"] == "x-$(NOT_THERE)-$(A)"


def test_an_overlay_may_remove_all_variables(tmp_path):
    found = command(tmp_path, **overlay(env=None))
    assert "DDP_JOB_NAME" not in found.env
    assert found.message == tmp_path / "pods/j-0-0/report.json"


def test_an_overlay_must_not_remove_the_trainer(tmp_path):
    message = "spec.podTemplate.spec.containers: must not remove the container trainer"
    with pytest.raises(SpecError, match=message):
        command(tmp_path, podTemplate={"spec": {"containers": None}})


# Addresses


def test_processes_use_the_loopback_interface_with_any_profile(tmp_path):
    found = command(tmp_path, accelerator="gpu")
    assert found.env["NCCL_SOCKET_IFNAME"] == found.env["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_local_addresses_sort_by_index_and_are_all_this_machine():
    addresses = LocalAddresses(lambda: 1)
    spellings = [addresses.local(make_job(), index) for index in range(20)]
    assert spellings == sorted(spellings)
    assert spellings[0] == "127.0.0.1"
    assert {socket.getaddrinfo(text, 80)[0][4][0] for text in spellings} == {"127.0.0.1"}


def test_each_attempt_has_a_rendezvous_port_of_its_own():
    ports = iter([1, 2])
    addresses = LocalAddresses(lambda: next(ports))
    jobs = [replace(make_job(), status=Status(attempt=Attempt(attempt))) for attempt in (0, 0, 1)]
    endpoints = [addresses.endpoint(job) for job in jobs]
    assert endpoints == ["127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:2"]


def test_each_pod_has_a_port_for_its_agent():
    ports = iter([1, 2, 3])
    addresses = LocalAddresses(lambda: next(ports))
    # The pod of node 0 has stayed since attempt 0.
    old = replace(make_job(), status=Status(attempt=Attempt(0)))
    new = replace(make_job(), status=Status(attempt=Attempt(1, births=(0, 1))))
    found = [addresses.port(job, index) for job, index in ((old, 0), (old, 1), (new, 0), (new, 1))]
    assert found == [1, 2, 1, 3]
