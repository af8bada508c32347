"""A rendered pod as a process: paths, variables and addresses of this machine."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ddpjob.core import render
from ddpjob.core.api import Job, Nodes, SpecError, Status
from ddpjob.local.translate import LOOPBACK, Command, Folders, LocalAddresses, translate

CLAIM = {"claimName": "c", "mountPath": "/checkpoints"}


def job(**spec) -> Job:
    fields = {"image": "i", "args": ["train.py"], "nodes": 2, **spec}
    made = Job.from_dict({"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": fields})
    assert not made.spec_error
    return replace(made, status=Status(attempt=0, nodes=Nodes(desired=fields["nodes"])))


def command(tmp_path: Path, config_maps=None, index: int = 0, claims=None, **spec) -> Command:
    settings = render.Settings(addresses=LocalAddresses(lambda: 5555))
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
