"""Conclusions from a pod do not depend on the way in which the user has set its fields."""

import pytest
from builders.rendered import DEFAULTS, RESTRICTED, render
from pod_parts import env_of, mounts_of, options_of, trainer_of, volumes_of

from ddpjob.core.api import names
from ddpjob.core.api.pod_fields import pod_field_names
from ddpjob.core.api.readers import SpecError, normal_path
from ddpjob.core.render.job_defaults import read_job_defaults
from ddpjob.core.render.merged_pod import shutdown_seconds
from ddpjob.core.render.pod_context import Settings

REQUIRED_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"
ZONE = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}
ZONE_AFFINITY = {
    "nodeAffinity": {REQUIRED_AFFINITY: {"nodeSelectorTerms": [{"matchExpressions": [ZONE]}]}}
}

# A value of each field that enters the pod. podTemplate may have all but the resources.
VALUES = {
    "imagePullPolicy": "Never",
    "imagePullSecrets": [{"name": "s"}],
    "env": [{"name": "OMP_NUM_THREADS", "value": "7"}],
    "envFrom": [{"secretRef": {"name": "e"}}],
    "volumes": [{"name": "mine", "emptyDir": {}}],
    "volumeMounts": [{"name": "mine", "mountPath": "/dev//shm/"}],
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "mine", "operator": "Exists"}],
    "affinity": ZONE_AFFINITY,
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "k", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "serviceAccountName": "me",
    "priorityClassName": "high",
}
OF_THE_TRAINER = ("imagePullPolicy", "env", "envFrom", "volumeMounts")


@pytest.mark.parametrize(
    "spec",
    [
        {"volumeMounts": [{"name": "lost", "mountPath": "/v"}]},
        {
            "podTemplate": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "volumeDevices": [{"name": "lost", "devicePath": "/v"}],
                        }
                    ]
                }
            }
        },
        {
            "podTemplate": {
                "spec": {
                    "initContainers": [
                        {"name": "a", "volumeMounts": [{"name": "lost", "mountPath": "/v"}]}
                    ]
                }
            }
        },
    ],
)
def test_a_mount_of_a_volume_that_the_pod_does_not_have_is_refused(spec):
    with pytest.raises(SpecError, match='the mount at /v names the volume "lost", which the pod'):
        render(**spec)
    render(volumes=[{"name": "lost", "emptyDir": {}}], **spec)


def overlay(**fields):
    """Return a podTemplate with these fields of the pod's spec and of the trainer."""
    trainer = {
        "name": "trainer",
        **{key: fields.pop(key) for key in OF_THE_TRAINER if key in fields},
    }
    return {"spec": {**fields, "containers": [trainer]}}


def in_both_ways(accelerator="cpu", **fields):
    """Render the same fields as fields of the spec, and as those of podTemplate."""
    return [
        render(accelerator=accelerator, **fields),
        render(accelerator=accelerator, podTemplate=overlay(**fields)),
    ]


def without_order(value):
    if isinstance(value, dict):
        return {key: without_order(item) for key, item in value.items()}
    return sorted(map(without_order, value), key=str) if isinstance(value, list) else value


def test_every_field_has_a_value_here():
    assert set(VALUES) == set(pod_field_names()) - {"resources"}


@pytest.mark.parametrize("accelerator", ["cpu", "trn1.32xlarge"])
@pytest.mark.parametrize("name", VALUES)
def test_a_field_has_the_same_effect_in_either_way(accelerator, name):
    fields = {"volumes": VALUES["volumes"]} if name == "volumeMounts" else {}
    of_spec, of_template = in_both_ways(accelerator, **fields, **{name: VALUES[name]})
    assert without_order(of_spec) == without_order(of_template)
    assert of_spec != render(accelerator=accelerator)


# Init containers


def test_the_status_gets_the_last_line_of_an_init_container_that_sets_nothing():
    own = {"name": "own", "terminationMessagePolicy": "File"}
    pod = render(podTemplate={"spec": {"initContainers": [{"name": "fetch"}, own]}})
    fetch, own = pod["spec"]["initContainers"]
    assert fetch["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert own["terminationMessagePolicy"] == "File"


def test_a_container_beside_the_trainer_keeps_its_policy():
    pod = render(
        podTemplate={"spec": {"containers": [{"name": "proxy", "image": "p"}, {"name": "trainer"}]}}
    )
    (proxy,) = (one for one in pod["spec"]["containers"] if one["name"] == "proxy")
    assert "terminationMessagePolicy" not in proxy


# Nodes


def test_the_tolerations_of_the_profile_are_added_once():
    own = {"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"}
    for given in ([], [{"key": "mine", "operator": "Exists"}], [own]):
        for pod in in_both_ways("trn1.32xlarge", tolerations=given):
            found = pod["spec"]["tolerations"]
            assert all(toleration in found for toleration in given)
            assert found.count(own) == 1


def test_the_users_node_affinity_keeps_the_instance_type_of_the_profile():
    for pod in in_both_ways("trn1.32xlarge", affinity=ZONE_AFFINITY):
        required = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED_AFFINITY]
        terms = required["nodeSelectorTerms"]
        assert len(terms) == 2
        for term in terms:
            assert term["matchExpressions"][0] == ZONE
            assert term["matchExpressions"][1]["key"] == "node.kubernetes.io/instance-type"


def test_an_overlay_cannot_remove_what_the_profile_needs():
    pod = render(
        accelerator="trn1.32xlarge", podTemplate={"spec": {"tolerations": None, "affinity": None}}
    )
    assert pod["spec"]["tolerations"]
    assert pod["spec"]["affinity"] == render(accelerator="trn1.32xlarge")["spec"]["affinity"]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/", "/dev//shm", "//dev/./shm"])
def test_the_users_shared_memory_replaces_that_of_the_operator(path):
    mounted = {
        "volumes": [{"name": "mine", "emptyDir": {}}],
        "volumeMounts": [{"name": "mine", "mountPath": path}],
    }
    for pod in in_both_ways(**mounted):
        mounts = {normal_path(path): name for path, name in mounts_of(pod).items()}
        assert len(mounts) == len(mounts_of(pod))
        assert mounts["/dev/shm"] == "mine"
        # The agent empties the operator's own volume only.
        assert options_of(pod)["clear"] == names.MEMORY_FOLDER
        assert mounts[names.MEMORY_FOLDER] == "ddpjob-shm"


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_the_threads_follow_the_resources_of_the_container_or_else_of_the_pod(kind):
    of_pod = {"spec": {"resources": {kind: {"cpu": "8"}}}}
    assert env_of(render(podTemplate=of_pod, nprocPerNode=2))["OMP_NUM_THREADS"] == "4"
    of_container = {"resources": {"requests": {"cpu": "2"}}}
    assert env_of(render(podTemplate=of_pod, **of_container))["OMP_NUM_THREADS"] == "2"


def test_an_operators_volume_that_nothing_mounts_is_not_in_the_pod():
    mounts = [{"name": "mine", "mountPath": names.HOME}]
    pod = render(
        settings=RESTRICTED, volumes=[{"name": "mine", "emptyDir": {}}], volumeMounts=mounts
    )
    assert set(mounts_of(pod).values()) == set(volumes_of(pod))
    assert "ddpjob-home" not in volumes_of(pod)


@pytest.mark.parametrize(
    "path", ["/checkpoints", "/checkpoints/", "//checkpoints", "/checkpoints/digits"]
)
def test_a_mount_in_place_of_the_checkpoints_is_refused(path):
    trainer = {"name": "trainer", "volumeMounts": [{"name": "mine", "mountPath": path}]}
    volumes = [{"name": "mine", "emptyDir": {}}]
    with pytest.raises(SpecError, match="checkpoints would not get to the claim c"):
        render(
            checkpoint={"claimName": "c"},
            podTemplate={"spec": {"containers": [trainer], "volumes": volumes}},
        )
    # Without a claim, and beside the folder of the job, it is the user's.
    render(podTemplate={"spec": {"containers": [trainer], "volumes": volumes}})
    trainer["volumeMounts"][0]["mountPath"] = "/checkpoints/other"
    render(
        checkpoint={"claimName": "c"},
        podTemplate={"spec": {"containers": [trainer], "volumes": volumes}},
    )


def test_a_mount_in_place_of_the_agent_is_refused():
    mounted = {
        "volumes": [{"name": "mine", "emptyDir": {}}],
        "volumeMounts": [{"name": "mine", "mountPath": "//ddpjob/run"}],
    }
    with pytest.raises(SpecError, match="/ddpjob/run is reserved"):
        render(**mounted)
    with pytest.raises(SpecError, match="/ddpjob/run is reserved"):
        render(podTemplate=overlay(**mounted))


def test_not_even_another_volume_of_the_operator_may_be_mounted_there():
    # The agent would empty the claim of the checkpoints.
    mounts = [{"name": "ddpjob-checkpoint", "mountPath": "//ddpjob/shm"}]
    with pytest.raises(SpecError, match="is reserved"):
        render(checkpoint={"claimName": "c"}, volumeMounts=mounts)


def test_empty_lists_of_other_containers_are_no_error():
    template = {"spec": {"initContainers": [{"name": "i", "volumeMounts": None}]}}
    assert render(podTemplate=template)["spec"]["initContainers"][0]["name"] == "i"


def test_the_options_of_a_mount_may_change():
    mount = {"name": "ddpjob-checkpoint", "mountPath": "/checkpoints", "readOnly": True}
    trainer = {"name": "trainer", "volumeMounts": [mount]}
    pod = render(checkpoint={"claimName": "c"}, podTemplate={"spec": {"containers": [trainer]}})
    assert mount in trainer_of(pod)["volumeMounts"]


# Other consequences


@pytest.mark.parametrize(
    ("grace", "seconds"), [(0, 1), (1, 1), (10, 7), (30, 20), (45, 30), (120, 105)]
)
def test_workers_have_the_grace_period_of_the_pod_less_the_time_for_a_report(grace, seconds):
    assert shutdown_seconds(grace) == seconds
    pod = render(podTemplate={"spec": {"terminationGracePeriodSeconds": grace}})
    assert env_of(pod)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(seconds)


def test_the_users_own_shutdown_time_counts():
    trainer = {"name": "trainer", "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "9"}]}
    pod = render(podTemplate={"spec": {"containers": [trainer]}})
    assert env_of(pod)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "9"


@pytest.mark.parametrize(
    ("fields", "mounted"),
    [
        ({}, False),
        ({"serviceAccountName": "me"}, True),
        ({"serviceAccountName": "me", "automountServiceAccountToken": False}, False),
        ({"automountServiceAccountToken": True}, True),
    ],
)
def test_a_token_is_mounted_only_if_the_user_names_a_service_account(fields, mounted):
    pod = render(podTemplate={"spec": fields})
    assert pod["spec"]["automountServiceAccountToken"] is mounted


def test_a_pod_on_the_network_of_its_node_still_resolves_the_names_of_the_cluster():
    # By default it would ask only the node's resolver, which does not know the gang's names.
    template = {"spec": {"hostNetwork": True}}
    assert render(podTemplate=template)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    template["spec"]["dnsPolicy"] = "Default"
    assert render(podTemplate=template)["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in render()["spec"]


# The administrator's defaults

REGISTRY = {"name": "registry"}
TRAINING = {"key": "training", "operator": "Exists"}
DEFAULTS_FOR_ALL = Settings(
    defaults={
        "imagePullSecrets": [REGISTRY],
        "tolerations": [TRAINING],
        "nodeSelector": {"pool": "training", "zone": "a"},
        "priorityClassName": "batch",
    }
)


def test_a_job_gets_the_defaults_of_the_administrator():
    spec = render(settings=DEFAULTS_FOR_ALL)["spec"]
    assert spec["imagePullSecrets"] == [REGISTRY]
    assert spec["tolerations"] == [TRAINING]
    assert spec["nodeSelector"] == {"pool": "training", "zone": "a"}
    assert spec["priorityClassName"] == "batch"


@pytest.mark.parametrize(
    "way", [lambda fields: fields, lambda fields: {"podTemplate": {"spec": fields}}]
)
def test_what_a_job_sets_stays_beside_the_defaults(way):
    own = {
        "imagePullSecrets": [{"name": "own"}],
        "tolerations": [{"key": "own"}, TRAINING],
        "nodeSelector": {"zone": "b"},
        "priorityClassName": "urgent",
    }
    spec = render(settings=DEFAULTS_FOR_ALL, **way(own))["spec"]
    assert spec["imagePullSecrets"] == [{"name": "own"}, REGISTRY]
    assert spec["tolerations"] == [{"key": "own"}, TRAINING]
    assert spec["nodeSelector"] == {"pool": "training", "zone": "b"}
    assert spec["priorityClassName"] == "urgent"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object with fields of imagePullSecrets"),
        ({"affinity": {}}, "affinity: unknown field; there are defaults for imagePullSecrets"),
        ({"tolerations": {}}, "spec.tolerations: must be"),
    ],
)
def test_wrong_defaults_are_refused_with_a_sentence(data, message):
    with pytest.raises(SpecError, match=message):
        read_job_defaults(data)


# Pod Security of one job


@pytest.mark.parametrize(
    ("settings", "choice", "user"),
    [
        (DEFAULTS, {}, None),
        (DEFAULTS, {"podSecurity": "Restricted"}, 1000),
        (RESTRICTED, {}, 1000),
        (RESTRICTED, {"podSecurity": "None"}, None),
    ],
)
def test_a_job_chooses_its_pod_security(settings, choice, user):
    context = render(settings=settings, **choice)["spec"]["securityContext"]
    assert context.get("runAsUser") == user
