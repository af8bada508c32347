"""A rendered pod as a process: paths, variables and addresses of this machine."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ddpjob.core import render
from ddpjob.core.job import Job
from ddpjob.core.pod_context import Settings
from ddpjob.core.readers import SpecError
from ddpjob.core.status import PodCounts, Status
from ddpjob.local.translate import LOOPBACK, Command, Folders, LocalAddresses, translate

CLAIM = {"claimName": "c", "mountPath": "/checkpoints"}


def job(**spec) -> Job:
    fields = {"image": "i", "args": ["train.py"], "nodes": 2, **spec}
    made = Job.from_dict({"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": fields})
    assert not made.spec_error
    return replace(made, status=Status(attempt=0, pods=PodCounts(desired=fields["nodes"])))


def command(tmp_path: Path, config_maps=None, index: int = 0, claims=None, **spec) -> Command:
    settings = Settings(addresses=LocalAddresses(lambda: 5555))
    (pod,) = render.pods(job(**spec), [index], settings)
    return translate(pod, Folders(tmp_path, claims or {}), config_maps or {}, "laptop")


def test_a_claim_becomes_a_folder_of_the_run(tmp_path):
    made = command(tmp_path, checkpoint=CLAIM)
    assert made.env["DDP_CHECKPOINT_DIR"] == f"{tmp_path}/claims/c/j"
    assert tmp_path / "claims/c" in made.folders


def test_a_claim_may_be_a_folder_of_the_users(tmp_path):
    made = command(tmp_path, checkpoint=CLAIM, claims={"c": Path("/big/disk")})
    assert made.env["DDP_CHECKPOINT_DIR"] == "/big/disk/j"


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("/checkpoints", "{claim}"),
        ("/checkpoints/a.pt", "{claim}/a.pt"),
        ("--out=/checkpoints/a", "--out={claim}/a"),
        ("/checkpoints-of-old", "/checkpoints-of-old"),
        ("/mnt/checkpoints", "/mnt/checkpoints"),
        ("a:/checkpoints", "a:{claim}"),
    ],
)
def test_paths_below_a_mount_are_rewritten_and_no_others(tmp_path, word, becomes):
    made = command(tmp_path, args=["train.py", word], checkpoint=CLAIM)
    assert made.argv[-1] == becomes.format(claim=tmp_path / "claims/c")


def test_config_maps_become_files(tmp_path):
    mount = {
        "volumes": [{"name": "s", "configMap": {"name": "m"}}],
        "volumeMounts": [{"name": "s", "mountPath": "/src"}],
    }
    made = command(tmp_path, {"m": {"train.py": "print()"}}, args=["/src/train.py"], **mount)
    assert list(made.files.values()) == ["print()"]
    assert made.argv[-1] == str(next(iter(made.files)))


def test_a_config_map_that_is_not_in_the_file_is_named(tmp_path):
    with pytest.raises(SpecError, match="ConfigMap 'm' is not in the manifest"):
        command(tmp_path, envFrom=[{"configMapRef": {"name": "m"}}])


def test_a_mount_without_its_volume_is_named(tmp_path):
    with pytest.raises(SpecError, match="volumeMounts names the volume 'x'"):
        command(tmp_path, volumeMounts=[{"name": "x", "mountPath": "/x"}])


def test_the_pods_own_fields_have_values_here(tmp_path):
    env = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    made = command(tmp_path, env=env)
    assert made.env["POD"] == "j-0-0"
    assert made.env["DDP_NODE_NAME"] == "laptop"


def test_references_between_variables_are_expanded(tmp_path):
    env = [{"name": "A", "value": "x"}, {"name": "B", "value": "$(A)-$(NOT_THERE)-$$(A)"}]
    made = command(tmp_path, env=env, args=["train.py", "$(B)"])
    assert made.env["B"] == "x-$(NOT_THERE)-$(A)"


def test_processes_meet_on_the_loopback_interface_whatever_the_profile_says(tmp_path):
    made = command(tmp_path, accelerator="gpu")
    assert made.env["NCCL_SOCKET_IFNAME"] == made.env["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_result_and_heartbeat_are_files_of_the_run(tmp_path):
    made = command(tmp_path)
    assert made.result == tmp_path / "pods/j-0-0/result.json"
    assert made.env["DDP_HEARTBEAT_FILE"].startswith(str(tmp_path))


def test_local_addresses_sort_by_index_and_are_all_this_machine():
    addresses = LocalAddresses(lambda: 1)
    spelt = [addresses.local(job(), 0, index) for index in range(20)]
    assert spelt == sorted(spelt)
    assert spelt[0] == "127.0.0.1"
    assert {socket.getaddrinfo(text, 80)[0][4][0] for text in spelt} == {"127.0.0.1"}


def test_every_attempt_meets_at_a_port_of_its_own():
    ports = iter([1, 2])
    addresses = LocalAddresses(lambda: next(ports))
    assert [addresses.endpoint(job(), attempt) for attempt in (0, 0, 1)] == [
        "127.0.0.1:1",
        "127.0.0.1:1",
        "127.0.0.1:2",
    ]


def test_a_script_mounted_by_sub_path_is_a_file(tmp_path):
    mount = {
        "volumes": [{"name": "s", "configMap": {"name": "m"}}],
        "volumeMounts": [{"name": "s", "mountPath": "/src/train.py", "subPath": "train.py"}],
    }
    made = command(tmp_path, {"m": {"train.py": "print()"}}, args=["/src/train.py"], **mount)
    (script,) = made.files
    assert made.argv[-1] == str(script)
    assert script not in made.folders


def test_projected_config_maps_become_files(tmp_path):
    sources = [
        {"configMap": {"name": "m"}},
        {"configMap": {"name": "n", "items": [{"key": "b", "path": "deep/b"}]}},
    ]
    mount = {
        "volumes": [{"name": "s", "projected": {"sources": sources}}],
        "volumeMounts": [{"name": "s", "mountPath": "/src"}],
    }
    made = command(tmp_path, {"m": {"a": "1"}, "n": {"b": "2"}}, **mount)
    assert {path.name: text for path, text in made.files.items()} == {"a": "1", "b": "2"}
    assert any(path.parts[-2:] == ("deep", "b") for path in made.files)


DATA = {
    "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}],
    "volumeMounts": [{"name": "d", "mountPath": "/data"}],
}


def test_a_path_is_placed_once_however_it_is_spelt(tmp_path):
    env = [{"name": "DATA", "value": "/data/cifar10"}, {"name": "TRAIN", "value": "$(DATA)/train"}]
    made = command(
        tmp_path, claims={"c": Path("/data/sets")}, env=env, args=["train.py", "$(DATA)"], **DATA
    )
    assert made.env["DATA"] == made.argv[-1] == "/data/sets/cifar10"
    assert made.env["TRAIN"] == "/data/sets/cifar10/train"


def test_values_of_config_maps_are_placed_and_taken_as_they_are(tmp_path):
    reference = {"configMapKeyRef": {"name": "m", "key": "SETS"}}
    made = command(
        tmp_path,
        {"m": {"SETS": "/data/$(HOME)"}},
        claims={"c": Path("/big")},
        envFrom=[{"configMapRef": {"name": "m"}}],
        env=[{"name": "FROM", "valueFrom": reference}, {"name": "OURS", "value": "$(SETS)"}],
        **DATA,
    )
    assert made.env["SETS"] == made.env["FROM"] == made.env["OURS"] == "/big/$(HOME)"


def test_a_working_folder_below_a_mount_is_honoured(tmp_path):
    template = {"spec": {"containers": [{"name": "trainer", "workingDir": "/data/code"}]}}
    made = command(tmp_path, claims={"c": Path("/big")}, podTemplate=template, **DATA)
    assert made.cwd == Path("/big/code")


def test_a_working_folder_of_the_image_leaves_the_current_one(tmp_path):
    template = {"spec": {"containers": [{"name": "trainer", "workingDir": "/not/on/this/machine"}]}}
    assert command(tmp_path, podTemplate=template).cwd is None


def host_path(path: Path) -> dict:
    return {
        "volumes": [{"name": "h", "hostPath": {"path": str(path)}}],
        "volumeMounts": [{"name": "h", "mountPath": "/h"}],
    }


def test_a_host_path_that_is_not_there_is_said_and_not_made(tmp_path):
    with pytest.raises(SpecError, match="is not on this machine"):
        command(tmp_path, **host_path(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    assert command(tmp_path, args=["/h"], **host_path(tmp_path)).argv[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ({"mountPath": "/d", "subPathExpr": "$(POD)"}, "not subPathExpr"),
        ({"mountPath": "/"}, "absolute path other than /"),
        ({"mountPath": "/d", "subPath": "../../up"}, "without '..'"),
    ],
)
def test_a_mount_that_cannot_be_had_here_gets_a_sentence(tmp_path, mount, says):
    with pytest.raises(SpecError, match=says):
        command(tmp_path, volumes=DATA["volumes"], volumeMounts=[{"name": "d", **mount}])


def test_a_number_in_the_overlays_env_gets_a_sentence(tmp_path):
    template = {
        "spec": {"containers": [{"name": "trainer", "env": [{"name": "SEED", "value": 0}]}]}
    }
    with pytest.raises(SpecError, match="env SEED must be a text"):
        command(tmp_path, podTemplate=template)
