"""The rendered pods and the Service."""

import json
from dataclasses import replace

import pytest
import yaml
from builders.jobs import a_job, a_spec, a_status
from builders.rendered import DEFAULTS, RESTRICTED, render
from builders.times import NOW
from goldens import check_golden
from hypothesis import example, given
from hypothesis import strategies as st
from pod_parts import env_of, mounts_of, options_of, trainer_of, volumes_of

from ddpjob.core.api import names, profiles
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Host
from ddpjob.core.plan import Assign, Owned
from ddpjob.core.render.assignment import assignment
from ddpjob.core.render.objects import agent_config_map, pods, shared

SHARED = [kind for kind in Owned if kind is not Owned.POD]
REQUIRED_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"


def size_of(profile):
    """Return 2 nodes, or 1 if a job with this profile cannot have more."""
    return 1 if profiles.catalog()[profile].one_node else 2


def flags_of(pod):
    """Return torchrun's flags by name, as the assignment of the pod has them."""
    flags = assignment_of(pod)["flags"]
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def assignment_of(pod):
    return json.loads(pod["metadata"]["annotations"][names.ANNOTATION_ASSIGNMENT])


# Golden files


@pytest.mark.parametrize("settings", [DEFAULTS, RESTRICTED], ids=["", "-restricted"])
@pytest.mark.parametrize("profile", profiles.catalog())
def test_a_pod_equals_its_golden_file(profile, settings):
    nodes = size_of(profile)
    pod = render(
        nodes - 1,
        nodes=nodes,
        attempt=1,
        accelerator=profile,
        settings=settings,
        checkpoint={"claimName": "checkpoints"},
        resources={"requests": {"cpu": "4"}},
    )
    suffix = "-restricted" if settings.restricted else ""
    check_golden(f"pod-{profile}{suffix}.yaml", pod)


@pytest.mark.parametrize("kind", SHARED)
def test_what_all_pods_share_equals_its_golden_file(kind):
    check_golden(f"{kind.lower()}.yaml", shared(a_job(), kind))


# The gang


def test_the_pods_of_a_gang_differ_only_in_their_index():
    changed = {
        "n0000": "n0001",
        "digits-0-0": "digits-0-1",
        "is_host=true": "is_host=false",
        "'0'": "'1'",
        '/0"': '/1"',
    }
    first = yaml.safe_dump(render(0), width=1000).splitlines()
    second = yaml.safe_dump(render(1), width=1000).splitlines()
    differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    assert len(differing) == 6
    for a, b in differing:
        assert any(old in a and new in b for old, new in changed.items())


def test_pods_have_the_order_of_the_indices():
    job = a_job(status=a_status(nodes=12), nodes=12)
    rendered = [pod["metadata"]["name"] for pod in pods(job, (11, 3), DEFAULTS)]
    assert rendered == ["digits-0-11", "digits-0-3"]


def test_only_node_0_hosts_the_rendezvous():
    assert "is_host=true" in flags_of(render(0))["rdzv-conf"]
    assert "is_host=false" in flags_of(render(1))["rdzv-conf"]


def test_the_rendezvous_endpoint_is_node_0_of_the_attempt():
    flags = flags_of(render(7, nodes=12, attempt=3))
    assert flags["rdzv-endpoint"] == "n0000-a3.digits:29406"
    assert flags["local-addr"] == "n0007-a3.digits"
    assert flags["rdzv-id"].endswith("-3")
    assert flags["nnodes"] == "12"


def test_the_local_address_of_a_pod_is_its_name_under_the_service():
    pod = render(7, nodes=12, attempt=3)["spec"]
    assert f"{pod['hostname']}.{pod['subdomain']}" == "n0007-a3.digits"
    assert shared(a_job(), Owned.SERVICE)["spec"]["publishNotReadyAddresses"] is True
    assert shared(a_job(), Owned.SERVICE)["spec"]["clusterIP"] == "None"


@given(st.integers(1, 1000), st.integers(0, 999))
def test_local_addresses_are_short_and_sorted(nodes, attempt):
    job = a_job(status=a_status(nodes=nodes, attempt=attempt), nodes=nodes, name="j" * 52)
    addresses = [DEFAULTS.addresses.local(job, index) for index in range(nodes)]
    assert addresses == sorted(addresses)
    assert max(map(len, addresses)) <= 63


def test_a_pod_has_the_labels_by_which_the_operator_reads_it():
    labels = render(1, attempt=2)["metadata"]["labels"]
    assert labels[names.LABEL_ATTEMPT] == "2"
    assert labels[names.LABEL_INDEX] == "1"
    assert labels[names.LABEL_MANAGED_BY] == "ddpjob-operator"
    assert labels[names.LABEL_JOB] == "digits"


def test_the_service_selects_node_0_of_every_attempt_and_no_other():
    selector = shared(a_job(), Owned.SERVICE)["spec"]["selector"].items()
    selected = []
    for attempt in (0, 1):
        for index in (0, 1):
            if selector <= render(index, attempt=attempt)["metadata"]["labels"].items():
                selected.append((attempt, index))
    assert selected == [(0, 0), (1, 0)]


@pytest.mark.parametrize("kind", Owned)
def test_the_job_owns_what_was_rendered(kind):
    rendered = render() if kind is Owned.POD else shared(a_job(), kind)
    version = f"{kind.group}/{kind.version}" if kind.group else kind.version
    assert (rendered["kind"], rendered["apiVersion"]) == (kind, version)
    assert rendered["metadata"]["namespace"] == a_job().namespace
    (owner,) = rendered["metadata"]["ownerReferences"]
    assert owner["controller"] is True
    assert (owner["kind"], owner["apiVersion"]) == ("DDPJob", "ddpjob.dev/v1alpha1")
    assert owner["name"] == "digits"
    assert "blockOwnerDeletion" not in owner


# The command and its environment


def test_the_agent_gets_the_arguments_of_the_user():
    args = ["-m", "ddp_trainer", "--epochs", "2"]
    container = trainer_of(render(args=args))
    assert container["command"][:4] == [
        "/bin/sh",
        "/ddpjob/agent/start.sh",
        "torchrun",
        "/ddpjob/agent",
    ]
    assert container["args"] == args


@pytest.mark.parametrize(
    ("command", "started", "flags"),
    [
        (["torchrun"], None, []),
        (["/opt/venv/bin/torchrun", "--role=a"], None, ["--role=a"]),
        (["python3.11", "-m", "torch.distributed.run", "--role=a"], None, ["--role=a"]),
        (["python", "-m", "x"], ["python", "-m", "x"], []),
        (["accelerate", "launch"], ["accelerate", "launch"], []),
    ],
)
def test_the_agent_starts_torchrun_itself_unless_another_program_does(command, started, flags):
    pod = render(torchrun={"command": command})
    assert (options_of(pod)["command"], options_of(pod)["flags"]) == (started, flags)
    assert trainer_of(pod)["command"][2] == command[0]


@pytest.mark.parametrize("command", [["torchrun", "--role=a"], ["my-launcher"]])
def test_flags_of_torchrun_follow_those_in_the_command(command):
    flags = ["--monitor-interval", "1"]
    options = options_of(render(torchrun={"command": command, "args": flags}))
    assert (options["command"] or ["torchrun", *options["flags"][:-2]]) == command
    assert options["flags"][-2:] == flags


def test_with_an_interpreter_of_its_own_the_agent_needs_no_shell():
    command = trainer_of(render(torchrun={"python": "/opt/python"}))["command"]
    assert command[:4] == ["/opt/python", "-IS", "/ddpjob/agent", "agent"]


def test_the_agent_is_told_when_an_attempt_hangs():
    assert options_of(render())["hang_seconds"] is None
    options = options_of(render(hangTimeoutSeconds=600, firstHeartbeatSeconds=60, heartbeat="Log"))
    assert (options["hang_seconds"], options["first_seconds"]) == (600, 60)
    assert options["heartbeat"] == "Log"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"fastStart": False}, False),
        ({"accelerator": "gpu"}, False),
        ({"accelerator": "gpu", "fastStart": True}, True),
        ({"accelerator": "trn1.32xlarge"}, False),
        # Its workers may be anything.
        ({"torchrun": {"command": ["accelerate", "launch"]}}, False),
    ],
)
def test_a_fast_start_is_the_default_without_devices(fields, expected):
    assert options_of(render(**fields))["fast_start"] is expected


def test_the_files_of_the_agent_fit_into_a_config_map_that_the_lease_of_the_namespace_owns():
    config_map = agent_config_map("ml", "uid-of-lease")
    assert config_map["immutable"] is True
    assert {"agent.py", "zygote.py", "start.sh", "words.json"} <= set(config_map["data"])
    assert sum(map(len, config_map["data"].values())) < 132_000
    (owner,) = config_map["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Lease", "uid-of-lease")
    assert "ownerReferences" not in agent_config_map("ml", "")["metadata"]
    (volume,) = (v for v in render()["spec"]["volumes"] if v["name"] == "ddpjob-agent")
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]


def test_pods_that_stay_are_told_where_the_rendezvous_is():
    status = a_status(attempt=4, nodes=3, births=(4, 1, 2), host=Host(1, "10.0.0.7"))
    job = a_job(status=status, nodes=3)
    assign = Assign("digits-1-1", "uid", 1, 45, True, "", NOW)
    told = [json.loads(assignment(job, index, DEFAULTS.addresses, assign)) for index in range(3)]
    (new,) = pods(job, [0], DEFAULTS)
    assert json.loads(assignment(job, 0, DEFAULTS.addresses)) == assignment_of(new)
    assert [flag for entry in told for flag in entry["flags"] if "endpoint" in flag] == (
        ["--rdzv-endpoint=10.0.0.7:29408"] * 3
    )
    assert ["is_host=true" in " ".join(entry["flags"]) for entry in told] == [False, True, False]
    assert [entry["flags"][-1] for entry in told] == [
        "--local-addr=n0000-a4.digits",
        "--local-addr=n0001-a1.digits",
        "--local-addr=n0002-a2.digits",
    ]
    assert {(entry["attempt"], entry["grace"]) for entry in told} == {(4, 45)}


def test_the_rendezvous_times_out_after_an_hour_by_default():
    assert flags_of(render())["rdzv-conf"] == "is_host=true,join_timeout=3600,read_timeout=3600"
    pod = render(torchrun={"rdzvConf": {"join_timeout": 60, "keep_alive_interval": "1"}})
    assert flags_of(pod)["rdzv-conf"] == (
        "is_host=true,join_timeout=60,keep_alive_interval=1,read_timeout=3600"
    )


def test_the_environment_describes_the_job_the_attempt_and_the_node():
    env = env_of(render(1, attempt=2, checkpoint={"claimName": "c", "mountPath": "/ckpt"}))
    expected = {
        "DDP_JOB_NAME": "digits",
        "DDP_JOB_NAMESPACE": "ml",
        "DDP_NODE_INDEX": "1",
        "DDP_CHECKPOINT_DIR": "/ckpt/digits",
        "DDP_NODE_NAME": {"fieldRef": {"fieldPath": "spec.nodeName"}},
    }
    assert {name: env[name] for name in expected} == expected
    # It changes between two attempts of a pod.
    assert assignment_of(render(1, attempt=2))["env"] == {"DDP_ATTEMPT": "2"}


def test_without_a_claim_there_is_no_checkpoint_folder():
    assert "DDP_CHECKPOINT_DIR" not in env_of(render())


@pytest.mark.parametrize("profile", profiles.catalog())
@pytest.mark.parametrize("level", ["None", "Restricted"])
@pytest.mark.parametrize("checkpoint", [{}, {"checkpoint": {"claimName": "c"}}])
def test_the_variables_that_arguments_may_refer_to_are_those_of_the_pod(profile, level, checkpoint):
    nodes, own = size_of(profile), [{"name": "OWN", "value": "1"}]
    fields = {"accelerator": profile, "env": own, "podSecurity": level, **checkpoint}
    pod = render(nodes=nodes, **fields)
    spec = Spec.from_dict(a_spec(nodes=nodes, **fields))
    assert spec.known_variables == set(env_of(pod))


@pytest.mark.parametrize(
    ("resources", "processes", "threads"),
    [
        ({}, 1, "1"),
        ({"requests": {"cpu": "4"}}, 1, "4"),
        ({"requests": {"cpu": 4}}, 3, "1"),
        ({"requests": {"cpu": "2500m"}}, 1, "2"),
        ({"limits": {"cpu": "8"}}, 4, "2"),
        ({"requests": {"cpu": "100m"}}, 1, "1"),
        ({"requests": {"cpu": "1e999"}}, 1, "1"),
    ],
)
def test_the_processes_share_the_cores_evenly(resources, processes, threads):
    pod = render(nprocPerNode=processes, resources=resources)
    assert env_of(pod)["OMP_NUM_THREADS"] == threads


def test_the_users_variables_replace_those_of_the_profile_and_of_the_operator():
    source = {"configMapKeyRef": {"name": "c", "key": "k"}}
    variables = [
        {"name": "FI_PROVIDER", "value": "tcp"},
        {"name": "OMP_NUM_THREADS", "value": "7"},
        {"name": "NCCL_SOCKET_IFNAME", "valueFrom": source},
    ]
    pod = render(accelerator="trn1.32xlarge", env=variables)
    overridden = {variable["name"] for variable in variables}
    found = [item for item in trainer_of(pod)["env"] if item["name"] in overridden]
    assert found == variables


def test_no_variable_is_set_twice():
    pod = render(accelerator="trn1.32xlarge", settings=RESTRICTED)
    variables = [item["name"] for item in trainer_of(pod)["env"]]
    assert len(variables) == len(set(variables))


# Devices and placement


def test_a_trn1_pod_requests_every_device_and_its_instance_type():
    pod = render(accelerator="trn1.32xlarge")
    assert trainer_of(pod)["resources"]["limits"] == {
        "aws.amazon.com/neuron": "16",
        "vpc.amazonaws.com/efa": "8",
    }
    assert flags_of(pod)["nproc-per-node"] == "32"
    required = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED_AFFINITY]
    terms = required["nodeSelectorTerms"]
    assert [term["matchExpressions"][0]["operator"] for term in terms] == ["In", "DoesNotExist"]


def test_each_node_has_its_own_compile_cache_in_the_claim():
    pod = render(1, accelerator="trn1.32xlarge", checkpoint={"claimName": "c"})
    assert env_of(pod)["NEURON_COMPILE_CACHE_URL"] == "/checkpoints/digits/compile-cache/n1"
    assert "NEURON_COMPILE_CACHE_URL" not in env_of(render(accelerator="trn1.32xlarge"))


def test_the_users_resources_replace_those_of_the_profile():
    limits = {"nvidia.com/gpu": "2", "memory": "8Gi"}
    pod = render(accelerator="gpu", resources={"limits": limits})
    assert trainer_of(pod)["resources"]["limits"] == limits


SPREAD = {"maxSkew": 1, "topologyKey": "k", "whenUnsatisfiable": "DoNotSchedule"}


def test_pod_fields_are_set_in_the_pod_or_in_its_trainer():
    pod_level = {
        "imagePullSecrets": [{"name": "s"}],
        "nodeSelector": {"a": "b"},
        "priorityClassName": "high",
        "topologySpreadConstraints": [SPREAD],
    }
    container_level = {
        "imagePullPolicy": "Never",
        "envFrom": [{"secretRef": {"name": "e"}}],
    }
    pod = render(**pod_level, **container_level)
    assert {key: pod["spec"][key] for key in pod_level} == pod_level
    assert {key: trainer_of(pod)[key] for key in container_level} == container_level


# Volumes


def test_every_mount_has_a_volume():
    pod = render(checkpoint={"claimName": "c"}, settings=RESTRICTED)
    volumes = volumes_of(pod)
    own = {f"/ddpjob/{folder}" for folder in ("agent", "run", "pod", "shm")}
    assert set(mounts_of(pod)) == {"/ddpjob", *own, "/dev/shm", "/checkpoints", "/home/ddpjob"}
    assert set(mounts_of(pod).values()) == set(volumes)
    assert volumes["ddpjob-shm"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["ddpjob-checkpoint"]["persistentVolumeClaim"] == {"claimName": "c"}


def test_system_v_ipc_of_the_node_is_not_touched():
    assert options_of(render())["own_ipc"]
    assert not options_of(render(podTemplate={"spec": {"hostIPC": True}}))["own_ipc"]


def test_code_is_mounted_for_the_agent_which_unpacks_it_into_the_working_directory():
    pod = render(code={"configMap": "train-1"})
    assert volumes_of(pod)["ddpjob-code"]["configMap"] == {"name": "train-1"}
    assert mounts_of(pod)["/ddpjob/code"] == "ddpjob-code"
    options = options_of(pod)
    assert (options["code"], options["work"]) == ("/ddpjob/code", "/ddpjob")
    assert options_of(render())["code"] is None
    assert "ddpjob-code" not in volumes_of(render())


def test_the_users_volumes_are_added_to_those_of_the_operator():
    pod = render(
        volumes=[{"name": "data", "emptyDir": {}}],
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
    )
    assert mounts_of(pod) == {**mounts_of(render()), "/data": "data"}


# The overlay


def test_the_overlay_is_merged_into_the_pod():
    trainer = {
        "name": "trainer",
        "workingDir": "/app",
        "env": [{"name": "OMP_NUM_THREADS", "value": "9"}],
    }
    overlay = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "x"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "containers": [trainer, {"name": "mesh", "image": "mesh:1"}],
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }
    volumes = [{"name": "scratch", "emptyDir": {"medium": "Memory"}}]
    pod = render(podTemplate=overlay, volumes=volumes)
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["labels"][names.LABEL_INDEX] == "0"
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer", "mesh"]
    assert trainer_of(pod)["workingDir"] == "/app"
    assert env_of(pod)["OMP_NUM_THREADS"] == "9"
    scratch = volumes_of(pod)["scratch"]
    assert scratch["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_the_overlay_can_remove_a_field():
    pod = render(podTemplate={"spec": {"securityContext": None}})
    assert "securityContext" not in pod["spec"]


def test_unknown_fields_of_the_overlay_are_not_rendered():
    overlay = {"metadata": {"name": "mine", "labels": {"team": "a"}}, "status": {"phase": "x"}}
    pod = render(podTemplate=overlay)
    assert pod["metadata"]["name"] == "digits-0-0"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert "status" not in pod


# Text with a meaning in YAML, in Jinja or in the skeleton's placeholders

AWKWARD = [
    *("", '"', "'", "\n", "\\n", "\t", "#", "ä", "🏖️", "\x7f\x85", "\u2028", "\ufeff"),
    *("{{ job }}", "{% if %}", "{# #}", "a: b", "- x", "$(HOME)", "<&>"),
    *("null", "~", "1e3", "0x10", "yes"),
    *("\ue000index\ue000", "\ue000what\ue000", "\\ud83c\\udfd6"),
]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_is_rendered_unchanged(text):
    pod = render(
        args=["x.py", text],
        env=[{"name": "T", "value": text}],
        nodeSelector={"k": text},
        image=f"i{text}",
    )
    # A placeholder in the user's text is replaced too.
    expected = text.replace("\ue000index\ue000", "0")
    assert trainer_of(pod)["args"] == ["x.py", expected]
    assert env_of(pod)["T"] == expected
    assert pod["spec"]["nodeSelector"] == {"k": expected}
    assert trainer_of(pod)["image"] == f"i{expected}"


@given(st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=40))
@example("---\n...\n")
def test_any_text_is_rendered_unchanged(text):
    pod = render(args=["x.py", text], podTemplate={"metadata": {"annotations": {"note": text}}})
    assert trainer_of(pod)["args"] == ["x.py", text]
    assert pod["metadata"]["annotations"]["note"] == text


def test_fields_of_a_shape_that_no_pod_has_are_refused():
    affinity = {"nodeAffinity": {REQUIRED_AFFINITY: [{"nodeSelectorTerms": []}]}}
    with pytest.raises(SpecError) as refused:
        render(accelerator="trn1.32xlarge", affinity=affinity)
    assert str(refused.value) == (
        "spec: cannot render a pod from it (AttributeError: 'list' object has no attribute 'get'); "
        "check the types of nested pod fields, such as affinity"
    )
    with pytest.raises(SpecError, match=r"^spec: cannot render a pod from it \(ParserError: "):
        render(nodeSelector={"k" * 2000: "v"})


# Security

RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations_of_restricted(pod):
    """Return what the level `restricted` of the Pod Security Standards forbids in a pod."""
    spec = pod["spec"]
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", []):
        if set(volume) - RESTRICTED_VOLUMES - {"name"}:
            found.append(f"volume {volume['name']}")
    for container in spec["containers"] + spec.get("initContainers", []):
        for check in container_violations(container, spec.get("securityContext", {})):
            found.append(f"{check} of {container['name']}")
    return found


def container_violations(container, pod_context):
    own = container.get("securityContext", {})
    effective = {**pod_context, **own}
    capabilities = own.get("capabilities", {})
    added = set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}
    seccomp = effective.get("seccompProfile", {}).get("type")
    violated = {
        "privileged": own.get("privileged", False),
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
        "runAsNonRoot": effective.get("runAsNonRoot") is not True,
        "runAsUser": effective.get("runAsUser") == 0,
        "seccompProfile": seccomp not in ("RuntimeDefault", "Localhost"),
        "capabilities": capabilities.get("drop") != ["ALL"] or added,
        "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
    }
    return [check for check, is_violated in violated.items() if is_violated]


@pytest.mark.parametrize("profile", profiles.catalog())
def test_restricted_pods_pass_the_level_restricted(profile):
    pod = render(
        nodes=size_of(profile),
        accelerator=profile,
        checkpoint={"claimName": "c"},
        settings=RESTRICTED,
    )
    assert violations_of_restricted(pod) == []


def test_other_pods_keep_the_user_of_the_image():
    violations = violations_of_restricted(render())
    assert violations == ["runAsNonRoot of trainer", "capabilities of trainer"]
    assert "runAsUser" not in render()["spec"]["securityContext"]


def test_a_restricted_pod_has_a_home_folder_and_a_user_name():
    env = env_of(render(settings=RESTRICTED))
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == ("/home/ddpjob", "ddpjob", "ddpjob")


def test_the_claim_is_writable_for_the_group():
    assert render(checkpoint={"claimName": "c"})["spec"]["securityContext"]["fsGroup"] == 1000
    assert "fsGroup" not in render()["spec"]["securityContext"]


def test_all_containers_of_a_restricted_pod_are_restricted():
    overlay = {
        "spec": {
            "containers": [{"name": "mesh", "image": "m"}],
            "initContainers": [{"name": "i", "image": "m"}],
        }
    }
    spec = render(podTemplate=overlay, settings=RESTRICTED)["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


# The end of a pod, and its network


def test_a_pod_is_never_restarted_and_has_time_to_write_its_failure_summary():
    pod = render()
    shutdown = int(env_of(pod)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["terminationGracePeriodSeconds"] > shutdown
    assert trainer_of(pod)["terminationMessagePolicy"] == "FallbackToLogsOnError"


class LoopbackAddresses:
    """Addresses of agents, all on this machine."""

    def endpoint(self, job):
        return "127.0.0.1:1"

    def local(self, job, index):
        return f"127.0.0.{index + 1}"

    def port(self, job, index):
        return 7000 + index


def test_the_addresses_come_from_the_settings():
    settings = replace(DEFAULTS, addresses=LoopbackAddresses())
    pod = render(1, settings=settings)
    flags = flags_of(pod)
    assert options_of(pod)["port"] == "7001"
    assert (flags["rdzv-endpoint"], flags["local-addr"]) == ("127.0.0.1:1", "127.0.0.2")
