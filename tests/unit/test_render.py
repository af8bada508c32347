"""What a planned pod looks like. The golden files are whole pods: `UPDATE_GOLDEN=1 pytest tests/unit` writes them anew."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from builders import a_job, a_status
from hypothesis import example, given
from hypothesis import strategies as st

from ddpjob.core import names, profiles
from ddpjob.core.pod_context import Settings
from ddpjob.core.readers import SpecError
from ddpjob.core.render import pods, service

GOLDEN = Path(__file__).parent / "golden"
RESTRICTED = Settings(restricted=True)


def render(index=0, *, nodes=2, attempt=0, settings=Settings(), name="digits", **spec):  # noqa: B008
    status = a_status(attempt=attempt, nodes=nodes)
    (pod,) = pods(a_job(status=status, nodes=nodes, name=name, **spec), [index], settings)
    return pod


def nodes_of(profile):
    """Two, or one where a job cannot have more."""
    return 2 if profiles.catalog()[profile].multi_node else 1


def trainer_of(pod):
    return next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")


def env_of(pod):
    return {
        item["name"]: item.get("value", item.get("valueFrom")) for item in trainer_of(pod)["env"]
    }


def flags_of(pod):
    return dict(
        flag.removeprefix("--").split("=", 1) for flag in trainer_of(pod)["command"] if "=" in flag
    )


# --- golden files


@pytest.mark.parametrize("settings", [Settings(), RESTRICTED], ids=["", "-restricted"])
@pytest.mark.parametrize("profile", profiles.catalog())
def test_a_pod_is_as_its_golden_file(profile, settings):
    nodes = nodes_of(profile)
    pod = render(
        nodes - 1,
        nodes=nodes,
        attempt=1,
        accelerator=profile,
        settings=settings,
        checkpoint={"claimName": "checkpoints"},
        resources={"requests": {"cpu": "4"}},
    )
    check_golden(f"pod-{profile}{'-restricted' if settings.restricted else ''}.yaml", pod)


def test_the_service_is_as_its_golden_file():
    check_golden("service.yaml", service(a_job()))


def check_golden(name, rendered):
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(yaml.safe_dump(rendered, sort_keys=False, allow_unicode=True, width=120))
    assert rendered == yaml.safe_load(file.read_text())


# --- the gang


def test_the_pods_of_a_gang_differ_in_a_few_words_only():
    first, second = (yaml.safe_dump(render(index)) for index in (0, 1))
    changed = {
        "n0": "n1",
        "digits-0-0": "digits-0-1",
        "is_host=true": "is_host=false",
        "'0'": "'1'",
    }
    differing = [
        (a, b) for a, b in zip(first.splitlines(), second.splitlines(), strict=True) if a != b
    ]
    assert len(differing) == 6
    assert all(any(old in a and new in b for old, new in changed.items()) for a, b in differing)


def test_pods_come_in_the_order_asked_for():
    job = a_job(status=a_status(nodes=12), nodes=12)
    assert [p["metadata"]["name"] for p in pods(job, (11, 3), Settings())] == [
        "digits-0-11",
        "digits-0-3",
    ]


def test_only_node_0_hosts_the_rendezvous():
    assert "is_host=true" in flags_of(render(0))["rdzv-conf"]
    assert "is_host=false" in flags_of(render(1))["rdzv-conf"]


def test_all_nodes_meet_at_node_0_of_their_attempt():
    flags = flags_of(render(7, nodes=12, attempt=3))
    assert flags["rdzv-endpoint"] == "a3-n00.digits:29400"
    assert flags["local-addr"] == "a3-n07.digits"
    assert flags["rdzv-id"].endswith("-3")
    assert flags["nnodes"] == "12"


def test_a_pod_is_found_under_the_name_it_gives():
    pod = render(7, nodes=12, attempt=3)["spec"]
    assert f"{pod['hostname']}.{pod['subdomain']}" == "a3-n07.digits"
    assert service(a_job())["spec"]["publishNotReadyAddresses"] is True
    assert service(a_job())["spec"]["clusterIP"] == "None"


@given(st.integers(1, 1000), st.integers(0, 9999))
def test_local_addresses_stay_short_and_in_order(nodes, attempt):
    job = a_job(status=a_status(nodes=nodes, attempt=attempt), nodes=nodes, name="j" * 52)
    addresses = [Settings().addresses.local(job, attempt, index) for index in range(nodes)]
    assert addresses == sorted(addresses)
    assert max(map(len, addresses)) <= 63


def test_a_pod_carries_the_labels_it_is_known_by():
    pod = render(1, attempt=2)
    labels = pod["metadata"]["labels"]
    assert (labels[names.LABEL_ATTEMPT], labels[names.LABEL_INDEX]) == ("2", "1")
    assert (labels[names.LABEL_MANAGED_BY], labels[names.LABEL_JOB]) == (
        "ddpjob-operator",
        "digits",
    )


def test_the_service_finds_node_0_of_every_attempt_and_no_other():
    selector = service(a_job())["spec"]["selector"].items()
    found = [
        (a, i)
        for a in (0, 1)
        for i in (0, 1)
        if selector <= render(i, attempt=a)["metadata"]["labels"].items()
    ]
    assert found == [(0, 0), (1, 0)]


@pytest.mark.parametrize("rendered", [render(), service(a_job())], ids=["pod", "service"])
def test_ownership_is_the_garbage_collectors(rendered):
    (owner,) = rendered["metadata"]["ownerReferences"]
    assert owner["controller"] is True
    assert (owner["kind"], owner["apiVersion"], owner["name"]) == (
        "DDPJob",
        "ddpjob.dev/v1alpha1",
        "digits",
    )
    assert "blockOwnerDeletion" not in owner


# --- the command and its environment


def test_args_follow_torchruns_own_flags():
    container = trainer_of(
        render(
            args=["-m", "ddp_trainer", "--epochs", "2"], torchrun={"command": ["python", "-m", "x"]}
        )
    )
    assert container["command"][:4] == ["python", "-m", "x", "--nnodes=2"]
    assert container["args"] == ["-m", "ddp_trainer", "--epochs", "2"]


def test_the_rendezvous_waits_an_hour_unless_told_otherwise():
    assert flags_of(render())["rdzv-conf"] == "is_host=true,join_timeout=3600,read_timeout=3600"
    told = render(torchrun={"rdzvConf": {"join_timeout": 60, "keep_alive_interval": "1"}})
    assert (
        flags_of(told)["rdzv-conf"]
        == "is_host=true,join_timeout=60,keep_alive_interval=1,read_timeout=3600"
    )


def test_a_process_learns_where_it_is():
    env = env_of(render(1, attempt=2, checkpoint={"claimName": "c", "mountPath": "/ckpt"}))
    expected = {
        "DDP_JOB_NAME": "digits",
        "DDP_JOB_NAMESPACE": "ml",
        "DDP_ATTEMPT": "2",
        "DDP_NODE_INDEX": "1",
        "DDP_CHECKPOINT_DIR": "/ckpt/digits",
        "DDP_RESULT_FILE": "/dev/termination-log",
        "DDP_HEARTBEAT_FILE": "/dev/shm/ddpjob-heartbeat",
        "DDP_NODE_NAME": {"fieldRef": {"fieldPath": "spec.nodeName"}},
    }
    assert {name: env[name] for name in expected} == expected


def test_without_a_claim_there_is_no_checkpoint_folder():
    assert "DDP_CHECKPOINT_DIR" not in env_of(render())


@pytest.mark.parametrize(
    ("resources", "processes", "threads"),
    [
        (None, 1, "1"),
        ({"requests": {"cpu": "4"}}, 1, "4"),
        ({"requests": {"cpu": 4}}, 3, "1"),
        ({"requests": {"cpu": "2500m"}}, 1, "2"),
        ({"limits": {"cpu": "8"}}, 4, "2"),
        ({"requests": {"cpu": "100m"}}, 1, "1"),
        ({"requests": {"cpu": "a lot"}}, 1, "1"),
        ({"requests": {"cpu": "nan"}}, 1, "1"),
        ({"requests": {"cpu": "inf"}}, 1, "1"),
    ],
)
def test_each_process_gets_its_share_of_the_cores(resources, processes, threads):
    pod = render(nprocPerNode=processes, **({"resources": resources} if resources else {}))
    assert env_of(pod)["OMP_NUM_THREADS"] == threads


def test_the_users_variables_win_over_the_profiles_and_ours():
    theirs = [
        {"name": "FI_PROVIDER", "value": "tcp"},
        {"name": "OMP_NUM_THREADS", "value": "7"},
        {"name": "NCCL_SOCKET_IFNAME", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ]
    pod = render(accelerator="trn1.32xlarge", env=theirs)
    assert [
        item for item in trainer_of(pod)["env"] if item["name"] in {t["name"] for t in theirs}
    ] == theirs


def test_no_variable_is_given_twice():
    names_given = [
        item["name"]
        for item in trainer_of(render(accelerator="trn1.32xlarge", settings=RESTRICTED))["env"]
    ]
    assert len(names_given) == len(set(names_given))


# --- devices and placement


def test_a_trn1_pod_asks_for_every_device_and_its_instance_type():
    pod = render(accelerator="trn1.32xlarge")
    assert trainer_of(pod)["resources"]["limits"] == {
        "aws.amazon.com/neuron": "16",
        "vpc.amazonaws.com/efa": "8",
    }
    assert flags_of(pod)["nproc-per-node"] == "32"
    terms = pod["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert [term["matchExpressions"][0]["operator"] for term in terms] == ["In", "DoesNotExist"]


def test_the_compile_cache_is_one_folder_a_node():
    pod = render(1, accelerator="trn1.32xlarge", checkpoint={"claimName": "c"})
    assert env_of(pod)["NEURON_COMPILE_CACHE_URL"] == "/checkpoints/digits/compile-cache/n1"
    assert "NEURON_COMPILE_CACHE_URL" not in env_of(render(accelerator="trn1.32xlarge"))


def test_the_users_resources_win_over_the_profiles():
    pod = render(accelerator="gpu", resources={"limits": {"nvidia.com/gpu": "2", "memory": "8Gi"}})
    assert trainer_of(pod)["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "8Gi"}


def test_the_users_tolerations_add_to_the_profiles():
    tolerations = render(accelerator="gpu", tolerations=[{"key": "mine", "operator": "Exists"}])[
        "spec"
    ]["tolerations"]
    assert [t["key"] for t in tolerations] == ["mine", "nvidia.com/gpu"]


def test_pod_fields_reach_their_places():
    pod = render(
        imagePullPolicy="Never",
        imagePullSecrets=[{"name": "s"}],
        envFrom=[{"secretRef": {"name": "e"}}],
        nodeSelector={"a": "b"},
        priorityClassName="high",
        topologySpreadConstraints=[{"topologyKey": "k"}],
    )
    assert (trainer_of(pod)["imagePullPolicy"], trainer_of(pod)["envFrom"]) == (
        "Never",
        [{"secretRef": {"name": "e"}}],
    )
    for field in (
        "imagePullSecrets",
        "nodeSelector",
        "priorityClassName",
        "topologySpreadConstraints",
    ):
        assert pod["spec"][field]


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({}, False),
        ({"serviceAccountName": "me"}, True),
        ({"podTemplate": {"spec": {"serviceAccountName": "me"}}}, True),
        (
            {
                "podTemplate": {
                    "spec": {"serviceAccountName": "me", "automountServiceAccountToken": False}
                }
            },
            False,
        ),
    ],
)
def test_a_token_comes_only_with_a_service_account_that_is_named(fields, token):
    assert render(**fields)["spec"]["automountServiceAccountToken"] is token


# --- volumes


def mounts_of(pod):
    return {mount["mountPath"]: mount["name"] for mount in trainer_of(pod)["volumeMounts"]}


def test_every_mount_has_its_volume():
    pod = render(checkpoint={"claimName": "c"}, settings=RESTRICTED)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert set(mounts_of(pod)) == {"/dev/shm", "/checkpoints", "/home/ddpjob"}
    assert set(mounts_of(pod).values()) == set(volumes)
    assert volumes["ddpjob-shm"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["ddpjob-checkpoint"]["persistentVolumeClaim"] == {"claimName": "c"}


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_who_mounts_shared_memory_himself_gets_his_own_only(path):
    mine = {
        "volumes": [{"name": "mine", "emptyDir": {}}],
        "volumeMounts": [{"name": "mine", "mountPath": path}],
    }
    pod = render(**mine)
    assert mounts_of(pod) == {path: "mine"}
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["mine"]


def test_the_users_volumes_join_ours():
    mine = {
        "volumes": [{"name": "data", "emptyDir": {}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    assert mounts_of(render(**mine)) == {"/dev/shm": "ddpjob-shm", "/data": "data"}


# --- the overlay


def test_an_overlay_is_merged_by_kubernetes_own_keys():
    overlay = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "x"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "containers": [
                {
                    "name": "trainer",
                    "workingDir": "/app",
                    "env": [{"name": "OMP_NUM_THREADS", "value": "9"}],
                },
                {"name": "mesh", "image": "mesh:1"},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }
    pod = render(
        podTemplate=overlay, volumes=[{"name": "scratch", "emptyDir": {"medium": "Memory"}}]
    )
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["labels"][names.LABEL_INDEX] == "0"
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert [c["name"] for c in pod["spec"]["containers"]] == ["trainer", "mesh"]
    assert trainer_of(pod)["workingDir"] == "/app"
    assert env_of(pod)["OMP_NUM_THREADS"] == "9"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["scratch"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_an_overlay_can_take_away():
    pod = render(podTemplate={"spec": {"securityContext": None}})
    assert "securityContext" not in pod["spec"]


# --- whatever a user writes

AWKWARD = ["", '"', "'", "{{ job }}", "{% if %}", "{# #}", "a: b", "- x", "\n", "\\n", "\t", "#", "ä", "🏖️", "\x7f\x85",
           "\u2028", "\ufeff", "$(HOME)", "null", "~", "1e3", "0x10", "yes", "<&>", "\ue000index\ue000", "\ue000what\ue000",
           "\\ud83c\\udfd6"]  # fmt: skip


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives(text):
    pod = render(
        args=["x.py", text],
        env=[{"name": "T", "value": text}],
        nodeSelector={"k": text},
        image=f"i{text}",
    )
    mark_free = text.replace("\ue000index\ue000", "0")
    assert trainer_of(pod)["args"] == ["x.py", mark_free]
    assert env_of(pod)["T"] == mark_free
    assert pod["spec"]["nodeSelector"] == {"k": mark_free}
    assert trainer_of(pod)["image"] == f"i{mark_free}"


@given(st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=40))
@example("---\n...\n")
def test_any_text_survives(text):
    pod = render(args=["x.py", text], podTemplate={"metadata": {"annotations": {"note": text}}})
    assert trainer_of(pod)["args"] == ["x.py", text]
    assert pod["metadata"]["annotations"]["note"] == text


# --- hardening


def breaches_of_restricted(pod):
    """What the level `restricted` of the Pod Security Standards forbids, of what a generated pod could do."""
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    allowed = {
        "name",
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
    }
    found += [
        f"volume {v['name']}" for v in spec.get("volumes", []) if set(v) - allowed - {"secret"}
    ]
    for container in spec["containers"] + spec.get("initContainers", []):
        own = container.get("securityContext", {})
        capabilities, seccomp = (
            own.get("capabilities", {}),
            {**whole, **own}.get("seccompProfile", {}),
        )
        checks = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": {**whole, **own}.get("runAsNonRoot") is not True,
            "runAsUser": {**whole, **own}.get("runAsUser") == 0,
            "seccompProfile": seccomp.get("type") not in ("RuntimeDefault", "Localhost"),
            "capabilities": capabilities.get("drop") != ["ALL"]
            or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
            "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
        }
        found += [f"{name} of {container['name']}" for name, breached in checks.items() if breached]
    return found


@pytest.mark.parametrize("profile", profiles.catalog())
def test_restricted_pods_pass_the_level_restricted(profile):
    pod = render(
        nodes=nodes_of(profile),
        accelerator=profile,
        checkpoint={"claimName": "c"},
        settings=RESTRICTED,
    )
    assert breaches_of_restricted(pod) == []


def test_other_pods_keep_the_images_user_and_would_not_pass():
    breaches = breaches_of_restricted(render())
    assert breaches == ["runAsNonRoot of trainer", "capabilities of trainer"]
    assert "runAsUser" not in render()["spec"]["securityContext"]


def test_a_restricted_pod_has_a_home_and_a_name():
    env = env_of(render(settings=RESTRICTED))
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == ("/home/ddpjob", "ddpjob", "ddpjob")


def test_a_claim_is_writable_for_the_group():
    assert render(checkpoint={"claimName": "c"})["spec"]["securityContext"]["fsGroup"] == 1000
    assert "fsGroup" not in render()["spec"]["securityContext"]


def test_a_pod_is_never_restarted_alone_and_has_time_to_say_why_it_ended():
    pod = render()["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > int(
        env_of(render())["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    )
    assert trainer_of(render())["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_other_addresses_can_be_given():
    class Here:
        def endpoint(self, job, attempt):
            return "127.0.0.1:1"

        def local(self, job, attempt, index):
            return f"127.0.0.{index + 1}"

    flags = flags_of(render(1, settings=replace(Settings(), addresses=Here())))
    assert (flags["rdzv-endpoint"], flags["local-addr"]) == ("127.0.0.1:1", "127.0.0.2")


def test_a_restricted_pods_other_containers_are_hardened_too():
    overlay = {
        "spec": {
            "containers": [{"name": "mesh", "image": "m"}],
            "initContainers": [{"name": "i", "image": "m"}],
        }
    }
    pod = render(podTemplate=overlay, settings=RESTRICTED)
    for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_users_node_affinity_keeps_the_profiles_instance_type():
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}
    affinity = {"nodeAffinity": {required: {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}}}
    pod = render(accelerator="trn1.32xlarge", affinity=affinity)
    terms = pod["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert len(terms) == 2
    for term in terms:
        assert term["matchExpressions"][0] == zone
        assert term["matchExpressions"][1]["key"] == "node.kubernetes.io/instance-type"


def test_a_pod_on_the_nodes_network_still_asks_the_clusters_names():
    """Without it the node's resolver alone would be asked, which knows no other node of the gang."""
    overlay = {"podTemplate": {"spec": {"hostNetwork": True}}}
    assert render(0, **overlay)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    overlay["podTemplate"]["spec"]["dnsPolicy"] = "Default"
    assert render(0, **overlay)["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in render(0)["spec"]


def test_fields_of_a_shape_that_no_pod_has_get_a_sentence():
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"nodeSelectorTerms": []}]
        }
    }
    with pytest.raises(SpecError, match="No pod can be made of this spec: AttributeError"):
        render(0, accelerator="trn1.32xlarge", affinity=affinity)
    with pytest.raises(SpecError, match="No pod can be made of this spec: ParserError"):
        render(0, nodeSelector={"k" * 2000: "v"})
