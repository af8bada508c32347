"""The spec of a job: its defaults, what is accepted, and the message for each wrong field."""

import re
from dataclasses import replace
from datetime import date, timedelta

import pytest
from builders.jobs import a_spec

from ddpjob.core.api import names
from ddpjob.core.api.foreign import INSTEAD
from ddpjob.core.api.kubernetes import NEWEST
from ddpjob.core.api.pod_fields import OWNED_POD_FIELDS, OWNED_TRAINER_FIELDS, pod_field_names
from ddpjob.core.api.policy import CleanPodPolicy, FailurePolicy, Lifecycle
from ddpjob.core.api.profiles import catalog
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.spec import Checkpoint, known_fields, refuse_unknown_fields


def trainer_overlay(**fields):
    """Return a podTemplate with fields of the trainer's container."""
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


def sidecar(**fields):
    """Return a podTemplate with another container."""
    return {"spec": {"containers": [{"name": "other", **fields}]}}


# What is refused, and the whole message

A_STRING = "a string that is not empty"
STRINGS = "a list of at least one string (put numbers in quotes)"
FLAGS = "a list of strings (put numbers in quotes)"
OBJECTS = "a list of objects"
NODES = "an integer from 1 to 1000"
PROCESSES = "'auto' or an integer from 1 to 256"
BUDGET = "an integer from 0 to 1000"
SECONDS = "an integer from 1 to 2147483647"
CODES = "a list of integers from 1 to 255"
NAMES = "names of a-z and '_', such as join_timeout"
MOUNT_PATH = "an absolute path other than '/' and without ':'"
OWNED = "is set by the operator; remove it"

# YAML can describe this with an anchor and an alias.
ENDLESS: list = []
ENDLESS.append(ENDLESS)

DEEP: list = []
# Other tests may have raised the limit of the interpreter.
for _ in range(20_000):
    DEEP = [DEEP]

# Python prints no integer of so many digits.
LONG = 10**5000
TOO_LARGE = "a value that is too large to print"

REFUSED = {
    "no object": ([], "spec: must be an object, got []"),
    "no image": ({"image": None}, f"spec.image: is required; it must be {A_STRING}"),
    "empty image": ({"image": ""}, f'spec.image: must be {A_STRING}, got ""'),
    "no args": ({"args": []}, f"spec.args: must be {STRINGS}, got []"),
    "args as a string": ({"args": "x.py"}, f'spec.args: must be {STRINGS}, got "x.py"'),
    "number in args": ({"args": ["x.py", 2]}, f'spec.args: must be {STRINGS}, got ["x.py", 2]'),
    "no nodes": ({"nodes": 0}, f"spec.nodes: must be {NODES}, got 0"),
    "too many nodes": ({"nodes": 1001}, f"spec.nodes: must be {NODES}, got 1001"),
    "nodes as a string": ({"nodes": "2"}, f'spec.nodes: must be {NODES}, got "2"'),
    "a date as a key": (
        {"nodes": {date(2026, 1, 1): 1}},
        f"spec.nodes: must be {NODES}, got {{datetime.date(2026, 1, 1): 1}}",
    ),
    "a list that contains itself": (
        {"nodes": ENDLESS},
        f"spec.nodes: must be {NODES}, got [[...]]",
    ),
    "a list within 20,000 others": (
        {"nodes": DEEP},
        f"spec.nodes: must be {NODES}, got {TOO_LARGE}",
    ),
    "such a list in place of a word": (
        {"heartbeat": DEEP},
        "spec: has too many lists or objects within each other",
    ),
    "an integer of 5,000 digits": (
        {"nodes": LONG},
        f"spec.nodes: must be {NODES}, got {TOO_LARGE}",
    ),
    "such a number of seconds": (
        {"hangTimeoutSeconds": LONG},
        f"spec.hangTimeoutSeconds: must be {SECONDS}, got {TOO_LARGE}",
    ),
    "fewer seconds than a time can hold": (
        {"hangTimeoutSeconds": -(10**20)},
        f"spec.hangTimeoutSeconds: must be {SECONDS}, got -100000000000000000000",
    ),
    "a set of words": ({"args": {"x.py"}}, f"spec.args: must be {STRINGS}, got \"{{'x.py'}}\""),
    "a set of exit codes": (
        {"failurePolicy": {"nonRetryableExitCodes": {2}}},
        f'spec.failurePolicy.nonRetryableExitCodes: must be {CODES}, got "{{2}}"',
    ),
    "empty variables": ({"env": ""}, f'spec.env: must be {OBJECTS}, got ""'),
    "nodes as a boolean": ({"nodes": True}, f"spec.nodes: must be {NODES}, got true"),
    "too many processes": (
        {"nprocPerNode": 257},
        f"spec.nprocPerNode: must be {PROCESSES}, got 257",
    ),
    "processes as a string": (
        {"nprocPerNode": "gpu"},
        f'spec.nprocPerNode: must be {PROCESSES}, got "gpu"',
    ),
    "8 processes on each of several trn1 nodes": (
        {"accelerator": "trn1.32xlarge", "nodes": 2, "nprocPerNode": 8},
        "spec.nprocPerNode: must be 32 or auto with accelerator trn1.32xlarge on each of several "
        "nodes, got 8",
    ),
    "16 processes on one trn1 node": (
        {"accelerator": "trn1.32xlarge", "nodes": 1, "nprocPerNode": 16},
        "spec.nprocPerNode: must be 1, 2, 8, 32 or auto with accelerator trn1.32xlarge on one "
        "node, got 16",
    ),
    "several small trn1 nodes": (
        {"accelerator": "trn1.2xlarge", "nodes": 2},
        "spec.nodes: must be 1 with accelerator trn1.2xlarge, which has no EFA to reach another "
        "node, got 2",
    ),
    "unknown accelerator": (
        {"accelerator": "quantum"},
        f'spec.accelerator: unknown profile "quantum"; the profiles are {", ".join(catalog())}',
    ),
    "misspelt accelerator": (
        {"accelerator": "trn1.32xlage"},
        "spec.accelerator: unknown profile \"trn1.32xlage\" (did you mean 'trn1.32xlarge'?); "
        f"the profiles are {', '.join(catalog())}",
    ),
    "empty accelerator": ({"accelerator": ""}, f'spec.accelerator: must be {A_STRING}, got ""'),
    "a second mount at the checkpoints": (
        {
            "checkpoint": {"claimName": "c"},
            "volumeMounts": [{"name": "v", "mountPath": "/checkpoints/"}],
        },
        "spec.volumeMounts: /checkpoints/ is the mount path of spec.checkpoint; remove the mount "
        "or choose another path",
    ),
    "empty command": (
        {"torchrun": {"command": []}},
        f"spec.torchrun.command: must be {STRINGS}, got []",
    ),
    "flags of torchrun as a string": (
        {"torchrun": {"args": "--role=a"}},
        f'spec.torchrun.args: must be {FLAGS}, got "--role=a"',
    ),
    "a number among the flags of torchrun": (
        {"torchrun": {"args": ["--monitor-interval", 1]}},
        f'spec.torchrun.args: must be {FLAGS}, got ["--monitor-interval", 1]',
    ),
    "torchrun as a string": (
        {"torchrun": "torchrun"},
        'spec.torchrun: must be an object, got "torchrun"',
    ),
    "is_host": (
        {"torchrun": {"rdzvConf": {"is_host": "true"}}},
        "spec.torchrun.rdzvConf.is_host: is set by the operator, which chooses the host; remove it",
    ),
    "is_host inside another value": (
        {"torchrun": {"rdzvConf": {"join_timeout": "60,is_host=false"}}},
        "spec.torchrun.rdzvConf.join_timeout: must be a number or a string without comma, '=' and "
        'space, got "60,is_host=false"',
    ),
    "a name that is no setting": (
        {"torchrun": {"rdzvConf": {"Time": 1}}},
        f'spec.torchrun.rdzvConf: must be {NAMES}, got "Time"',
    ),
    "a number as a setting's name": (
        {"torchrun": {"rdzvConf": {1: 2}}},
        f"spec.torchrun.rdzvConf: must be {NAMES}, got 1",
    ),
    "a setting that is no integer of JSON": (
        {"torchrun": {"rdzvConf": {"timeout": 2**64}}},
        "spec.torchrun.rdzvConf.timeout: must be a number or a string without comma, '=' and "
        "space, got 18446744073709551616",
    ),
    "a setting that is neither number nor string": (
        {"torchrun": {"rdzvConf": {"timeout": True}}},
        "spec.torchrun.rdzvConf.timeout: must be a number or a string without comma, '=' and "
        "space, got true",
    ),
    "a settings list": (
        {"torchrun": {"rdzvConf": ["timeout"]}},
        'spec.torchrun.rdzvConf: must be an object, got ["timeout"]',
    ),
    "a long word": (
        {"args": ["x" * 4097]},
        f'spec.args[0]: must be at most 4096 characters long, got "{"x" * 119}…',
    ),
    "too many words": (
        {"args": ["x" * 120] * 257},
        f'spec.args: must be at most 256 items long, got ["{"x" * 118}…',
    ),
    "a quantity that is none": (
        {"resources": {"limits": {"memory": "1GB"}}},
        'spec.resources.limits.memory: must be a quantity such as 500m or 2Gi, got "1GB"',
    ),
    "a quantity with a point": (
        {"resources": {"limits": {"cpu": 0.5}}},
        "spec.resources.limits.cpu: must be a quantity such as 500m or 2Gi, got 0.5; put it in "
        "quotes",
    ),
    "a quantity that is no integer of JSON": (
        {"resources": {"limits": {"cpu": 2**63}}},
        "spec.resources.limits.cpu: must be a quantity such as 500m or 2Gi, got "
        "9223372036854775808",
    ),
    "a date as a variable": (
        {"env": [{"name": "A", "value": date(2026, 1, 1)}]},
        'spec.env[0].value: must be a string, got "2026-01-01"; put it in quotes',
    ),
    "a count of more than 32 bits": (
        {"podTemplate": sidecar(readinessProbe={"failureThreshold": 2**31})},
        "spec.podTemplate.spec.containers[0].readinessProbe.failureThreshold: must be a 32-bit "
        "integer, got 2147483648",
    ),
    "a long name of a claim": (
        {"checkpoint": {"claimName": "x" * 254}},
        f'spec.checkpoint.claimName: must be at most 253 characters long, got "{"x" * 119}…',
    ),
    "checkpoint without a claim": (
        {"checkpoint": {"mountPath": "/x"}},
        f"spec.checkpoint.claimName: is required; it must be {A_STRING}",
    ),
    "code without a name": (
        {"code": {}},
        f"spec.code.configMap: is required; it must be {A_STRING}",
    ),
    "a working directory beside code": (
        {"code": {"configMap": "c"}, "podTemplate": trainer_overlay(workingDir="/app")},
        "spec.podTemplate.spec.containers[trainer].workingDir: with spec.code, the working "
        "directory is the one with the code; remove it",
    ),
    "an empty setup": (
        {"setup": ""},
        f'spec.setup: must be {A_STRING}, got ""',
    ),
    "a setup that may last for two days": (
        {"setupTimeoutSeconds": 172800},
        "spec.setupTimeoutSeconds: must be an integer from 1 to 86400, got 172800",
    ),
    "a startup probe beside setup": (
        {"setup": "true", "podTemplate": trainer_overlay(startupProbe={})},
        "spec.podTemplate.spec.containers[trainer].startupProbe: with spec.setup, the startup "
        "probe asks the agent whether the setup has ended; remove it",
    ),
    "empty checkpoint": (
        {"checkpoint": {}},
        f"spec.checkpoint.claimName: is required; it must be {A_STRING}",
    ),
    "negative maxRestarts": (
        {"failurePolicy": {"maxRestarts": -1}},
        f"spec.failurePolicy.maxRestarts: must be {BUDGET}, got -1",
    ),
    "maxDisruptions as a string": (
        {"failurePolicy": {"maxDisruptions": "many"}},
        f'spec.failurePolicy.maxDisruptions: must be {BUDGET}, got "many"',
    ),
    "too many restarts": (
        {"failurePolicy": {"maxRestarts": 1001}},
        f"spec.failurePolicy.maxRestarts: must be {BUDGET}, got 1001",
    ),
    "too many disruptions": (
        {"failurePolicy": {"maxDisruptions": 1001}},
        f"spec.failurePolicy.maxDisruptions: must be {BUDGET}, got 1001",
    ),
    "an empty window": (
        {"failurePolicy": {"windowSeconds": 0}},
        f"spec.failurePolicy.windowSeconds: must be {SECONDS}, got 0",
    ),
    "a window as a string": (
        {"failurePolicy": {"windowSeconds": "1h"}},
        f'spec.failurePolicy.windowSeconds: must be {SECONDS}, got "1h"',
    ),
    "one exit code": (
        {"failurePolicy": {"nonRetryableExitCodes": 2}},
        f"spec.failurePolicy.nonRetryableExitCodes: must be {CODES}, got 2",
    ),
    "success as an exit code": (
        {"failurePolicy": {"nonRetryableExitCodes": [0]}},
        f"spec.failurePolicy.nonRetryableExitCodes: must be {CODES}, got [0]",
    ),
    "a negative exit code": (
        {"failurePolicy": {"nonRetryableExitCodes": [2, -9]}},
        f"spec.failurePolicy.nonRetryableExitCodes: must be {CODES}, got [2, -9]",
    ),
    "a large exit code": (
        {"failurePolicy": {"nonRetryableExitCodes": [256]}},
        f"spec.failurePolicy.nonRetryableExitCodes: must be {CODES}, got [256]",
    ),
    "no attempt without progress": (
        {"failurePolicy": {"maxAttemptsWithoutProgress": 0}},
        "spec.failurePolicy.maxAttemptsWithoutProgress: must be an integer from 1 to 10, got 0",
    ),
    "more attempts without progress than the history has": (
        {"failurePolicy": {"maxAttemptsWithoutProgress": 11}},
        "spec.failurePolicy.maxAttemptsWithoutProgress: must be an integer from 1 to 10, got 11",
    ),
    "suspend as a string": ({"suspend": "yes"}, 'spec.suspend: must be true or false, got "yes"'),
    "suspend as a number": ({"suspend": 1}, "spec.suspend: must be true or false, got 1"),
    "no active time": (
        {"activeDeadlineSeconds": 0},
        f"spec.activeDeadlineSeconds: must be {SECONDS}, got 0",
    ),
    "an active time as a boolean": (
        {"activeDeadlineSeconds": True},
        f"spec.activeDeadlineSeconds: must be {SECONDS}, got true",
    ),
    "no time to start": (
        {"startupDeadlineSeconds": 0},
        f"spec.startupDeadlineSeconds: must be {SECONDS}, got 0",
    ),
    "a time to start beyond int32": (
        {"startupDeadlineSeconds": 2**31},
        f"spec.startupDeadlineSeconds: must be {SECONDS}, got 2147483648",
    ),
    "a negative time to live": (
        {"ttlSecondsAfterFinished": -1},
        "spec.ttlSecondsAfterFinished: must be an integer from 0 to 2147483647, got -1",
    ),
    "an unknown clean-up": (
        {"cleanPodPolicy": "all"},
        'spec.cleanPodPolicy: must be None, Running or All, got "all"',
    ),
    "a clean-up as a list": (
        {"cleanPodPolicy": ["All"]},
        'spec.cleanPodPolicy: must be None, Running or All, got ["All"]',
    ),
    "an empty manager": ({"managedBy": ""}, f'spec.managedBy: must be {A_STRING}, got ""'),
    "env as an object": (
        {"env": {"A": "b"}},
        f'spec.env: must be {OBJECTS}, got {{"A": "b"}}',
    ),
    "env of strings": ({"env": ["A=b"]}, f'spec.env: must be {OBJECTS}, got ["A=b"]'),
    "variable without a name": (
        {"env": [{"value": "b"}]},
        f"spec.env[0].name: is required; it must be {A_STRING}",
    ),
    "variable with a number": (
        {"env": [{"name": "A", "value": 3}]},
        "spec.env[0].value: must be a string, got 3; put it in quotes",
    ),
    "volumes as an object": (
        {"volumes": {"a": {}}},
        f'spec.volumes: must be {OBJECTS}, got {{"a": {{}}}}',
    ),
    "two volumes of one name": (
        {"volumes": [{"name": "data"}, {"name": "data"}]},
        "spec.volumes: several items have the name data; keep one",
    ),
    "a volume name of the operator": (
        {"volumes": [{"name": "ddpjob-shm"}]},
        "spec.volumes[0].name: the volume name ddpjob-shm is reserved: names that begin with "
        "ddpjob- belong to the operator; choose another name",
    ),
    "mounts of strings": (
        {"volumeMounts": ["/data"]},
        f'spec.volumeMounts: must be {OBJECTS}, got ["/data"]',
    ),
    "mount without a path": (
        {"volumeMounts": [{"name": "data"}]},
        f"spec.volumeMounts[0].mountPath: is required; it must be {A_STRING}",
    ),
    "tolerations": ({"tolerations": "all"}, f'spec.tolerations: must be {OBJECTS}, got "all"'),
    "resources as a string": (
        {"resources": "many"},
        'spec.resources: must be an object, got "many"',
    ),
    "limits as a string": (
        {"resources": {"limits": "many"}},
        'spec.resources.limits: must be an object, got "many"',
    ),
    "requests as a list": (
        {"resources": {"requests": []}},
        "spec.resources.requests: must be an object, got []",
    ),
    "affinity as a list": ({"affinity": []}, "spec.affinity: must be an object, got []"),
    "nodeSelector as a list": (
        {"nodeSelector": ["x"]},
        'spec.nodeSelector: must be an object, got ["x"]',
    ),
    "pull policy as a number": (
        {"imagePullPolicy": 3},
        "spec.imagePullPolicy: must be Always, IfNotPresent or Never, got 3",
    ),
    "service account as a list": (
        {"serviceAccountName": ["x"]},
        'spec.serviceAccountName: must be a string, got ["x"]',
    ),
    "a label of the operator": (
        {"podTemplate": {"metadata": {"labels": {"ddpjob.dev/attempt": "7"}}}},
        f"spec.podTemplate.metadata.labels: ddpjob.dev/attempt {OWNED}",
    ),
    "an annotation of the operator": (
        {"podTemplate": {"metadata": {"annotations": {"ddpjob.dev/x": "7"}}}},
        f"spec.podTemplate.metadata.annotations: ddpjob.dev/x {OWNED}",
    ),
    "containers as an object": (
        {"podTemplate": {"spec": {"containers": {"trainer": {}}}}},
        f'spec.podTemplate.spec.containers: must be {OBJECTS}, got {{"trainer": {{}}}}',
    ),
    "a reserved variable in the template": (
        {"podTemplate": trainer_overlay(env=[{"name": "RANK", "value": "0"}])},
        "spec.podTemplate.spec.containers[trainer].env: RANK is set by torchrun for each process; "
        "remove it",
    ),
    "a container of a PyTorchJob": (
        {"podTemplate": {"spec": {"containers": [{"name": "pytorch", "env": []}]}}},
        "spec.podTemplate.spec.containers[pytorch]: has no image; to change the container that "
        "trains, name it trainer, otherwise give it an image",
    ),
    "a number as a variable in the template": (
        {"podTemplate": trainer_overlay(env=[{"name": "SEED", "value": 0}])},
        "spec.podTemplate.spec.containers[0].env[0].value: must be a string, got 0; put it in "
        "quotes",
    ),
    "a list as a path in a volume": (
        {"volumeMounts": [{"name": "d", "mountPath": "/d", "subPath": [1]}]},
        "spec.volumeMounts[0].subPath: must be a string, got [1]",
    ),
    "a volume name of the operator in the template": (
        {"podTemplate": {"spec": {"volumes": [{"name": "ddpjob-home"}]}}},
        "spec.podTemplate.spec.volumes[0].name: the volume name ddpjob-home is reserved: names "
        "that begin with ddpjob- belong to the operator; choose another name",
    ),
}


def refusal_of(fields) -> str:
    with pytest.raises(SpecError) as refused:
        Spec.from_dict(fields)
    return str(refused.value)


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_field_is_refused_with_a_message(fields, message):
    spec = a_spec(**fields) if isinstance(fields, dict) else fields
    assert refusal_of(spec) == message


@pytest.mark.parametrize("path", ["checkpoints", "/", "//", "/a:b"])
def test_a_mount_path_must_be_absolute_and_below_the_root(path):
    message = refusal_of(a_spec(checkpoint={"claimName": "c", "mountPath": path}))
    assert message == f'spec.checkpoint.mountPath: must be {MOUNT_PATH}, got "{path}"'


@pytest.mark.parametrize(("path", "quoted"), [("", '""'), (7, "7")])
def test_a_mount_path_must_be_a_string(path, quoted):
    message = refusal_of(a_spec(checkpoint={"claimName": "c", "mountPath": path}))
    assert message == f"spec.checkpoint.mountPath: must be {MOUNT_PATH}, got {quoted}"


@pytest.mark.parametrize("name", [*sorted(names.RESERVED_VARIABLES), "PET_NNODES", "PET_"])
def test_a_reserved_variable_is_refused_by_name(name):
    env = [{"name": "FINE", "value": ""}, {"name": name, "value": "1"}]
    expected = f"spec.env: {name} is set by torchrun for each process; remove it"
    assert refusal_of(a_spec(env=env)) == expected


def test_a_variable_that_only_resembles_a_reserved_one_is_accepted():
    env = [{"name": name} for name in ("MY_RANK", "RANKS", "PETS", "rank", "DDP_ATTEMPT")]
    assert Spec.from_dict(a_spec(env=env)).pod_fields["env"] == env


@pytest.mark.parametrize("field", OWNED_POD_FIELDS)
def test_a_pod_field_that_the_operator_sets_is_refused(field):
    value = 9 if field == "activeDeadlineSeconds" else "x"
    message = refusal_of(a_spec(podTemplate={"spec": {field: value}}))
    assert message == f"spec.podTemplate.spec.{field}: {OWNED}"


@pytest.mark.parametrize("field", OWNED_TRAINER_FIELDS)
def test_a_trainer_field_that_the_operator_sets_is_refused(field):
    values = {"command": ["x"], "args": ["x"], "resources": {}, "readinessProbe": {}}
    message = refusal_of(a_spec(podTemplate=trainer_overlay(**{field: values.get(field, "x")})))
    assert message == f"spec.podTemplate.spec.containers[trainer].{field}: {OWNED}"


def test_a_sidecar_may_set_what_the_trainer_must_not():
    sidecar = {
        "name": "mesh",
        "image": "m",
        "command": ["x"],
        "env": [{"name": "RANK", "value": "0"}],
    }
    spec = Spec.from_dict(a_spec(podTemplate={"spec": {"containers": [sidecar]}}))
    assert spec.pod_template == {"spec": {"containers": [sidecar]}}


# Fields unknown to this version


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("backoffLimit", "write failurePolicy.maxRestarts"),
        ("command", "write args, which begins with the script, or torchrun.command for a wrapper"),
        ("schedulerName", "write podTemplate.spec.schedulerName"),
        ("initContainers", "write podTemplate.spec.initContainers"),
        ("lifecycle", "it is lifecycle of spec.podTemplate.spec.containers[name=trainer]"),
        ("runPolicy", "that is of a PyTorchJob; ddpjob convert turns it into a DDPJob"),
    ],
)
def test_a_field_of_another_kind_is_refused_with_what_to_write_instead(field, instead):
    with pytest.raises(SpecError) as refused:
        Spec.from_user(a_spec(**{field: 1}))
    assert str(refused.value) == f"spec.{field}: unknown field; {instead}"


def test_a_hint_is_about_a_field_that_a_spec_does_not_have():
    assert not set(INSTEAD) & set(known_fields()["spec"])


@pytest.mark.parametrize(
    ("field", "place"), [("schedulerName", "spec"), ("labels", "metadata"), ("containers", "spec")]
)
def test_a_field_that_stands_a_level_too_high_in_the_template_is_named(field, place):
    with pytest.raises(SpecError) as refused:
        Spec.from_user(a_spec(podTemplate={field: 1}))
    path = f"spec.podTemplate.{field}"
    assert str(refused.value) == f"{path}: unknown field; write podTemplate.{place}.{field}"


UNKNOWN = {
    "a field of a later version": ({"later": True}, "spec.later"),
    "a misspelt field": ({"nodez": 2}, "spec.nodez"),
    "a field of torchrun": ({"torchrun": {"maxRestarts": 1}}, "spec.torchrun.maxRestarts"),
    "a field of the checkpoint": (
        {"checkpoint": {"claimName": "c", "claim": "x"}},
        "spec.checkpoint.claim",
    ),
    "a field of the failure policy": (
        {"failurePolicy": {"later": 1}},
        "spec.failurePolicy.later",
    ),
    "a field of the pod template": ({"podTemplate": {"status": {}}}, "spec.podTemplate.status"),
    "the name of a pod": (
        {"podTemplate": {"metadata": {"name": "x"}}},
        "spec.podTemplate.metadata.name",
    ),
}


@pytest.mark.parametrize(("fields", "path"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_field_is_ignored_and_listed(fields, path):
    assert Spec.from_dict(a_spec(**fields)).unknown_fields == (path,)


@pytest.mark.parametrize(
    "fields",
    [
        {1: "x"},
        {None: "x"},
        {(1, 2): "x"},
        {"processes": "x"},
        {"failure_policy": {"maxRestarts": 7}},
        {"failurePolicy": {"max_restarts": 7}},
        {"torchrun": {1: "x"}},
    ],
)
def test_a_key_that_is_no_name_in_the_crd_is_ignored(fields):
    spec = Spec.from_dict(a_spec() | fields)
    assert replace(spec, unknown_fields=()) == Spec.from_dict(a_spec())
    (unknown,) = spec.unknown_fields
    with pytest.raises(SpecError, match=f"^{re.escape(unknown)}: unknown field"):
        Spec.from_user(a_spec() | fields)


def test_an_object_in_place_of_a_list_has_no_unknown_fields():
    with pytest.raises(SpecError) as refused:
        Spec.from_user(a_spec(env={"A": "b"}))
    assert str(refused.value) == f'spec.env: must be {OBJECTS}, got {{"A": "b"}}'


def test_an_unknown_field_is_refused_before_a_wrong_one():
    with pytest.raises(SpecError, match=r"^spec\.imagee: unknown field \(did you mean 'image'\?\)"):
        Spec.from_user({"imagee": "i", "args": []})


@pytest.mark.parametrize(
    "source",
    [
        {"configMap": {"name": ENDLESS}},
        {"configMap": {"name": DEEP}},
        {"configMap": {"name": {"x": ENDLESS}}},
        {"projected": {"sources": ENDLESS}},
        {"projected": {"sources": DEEP}},
    ],
)
def test_values_of_any_shape_may_be_deep(source):
    volume = {"name": "v", **source}
    assert Spec.from_user(a_spec(volumes=[volume])).pod_fields["volumes"] == [volume]


def test_unknown_fields_are_listed_in_alphabetical_order():
    fields = a_spec(zebra=1, torchrun={"x": 1}, ant=2)
    assert Spec.from_dict(fields).unknown_fields == ("spec.ant", "spec.torchrun.x", "spec.zebra")


def test_unknown_fields_do_not_enter_the_pod_template():
    template = {"metadata": {"name": "x", "labels": {"team": "a"}}, "status": {}}
    spec = Spec.from_dict(a_spec(podTemplate=template))
    assert spec.pod_template == {"metadata": {"labels": {"team": "a"}}}


def test_fields_of_kubernetes_own_shapes_are_not_checked():
    spec = Spec.from_dict(a_spec(podTemplate={"spec": {"anything": 1}}, affinity={"other": {}}))
    assert spec.unknown_fields == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodez": 2}, "spec.nodez: unknown field (did you mean 'nodes'?)"),
        (
            {"torchrun": {"rdzvConfig": {}}},
            "spec.torchrun.rdzvConfig: unknown field (did you mean 'rdzvConf'?)",
        ),
        (
            {"torchrun": {"maxRestarts": 1}},
            "spec.torchrun.maxRestarts: unknown field; spec.torchrun has args, command, python, "
            "rdzvConf",
        ),
        (
            {"podTemplate": {"metadata": {"name": "x"}}},
            "spec.podTemplate.metadata.name: unknown field; spec.podTemplate.metadata has "
            "annotations, labels",
        ),
        (
            {"env": [{"name": "A"}, {"name": "B", "vlaue": "1"}]},
            "spec.env[1].vlaue: unknown field (did you mean 'value'?)",
        ),
        (
            {"podTemplate": {"spec": {"later": {}}}},
            "spec.podTemplate.spec.later: unknown field (DDPJobs have the pod fields of "
            f"Kubernetes {NEWEST})",
        ),
        (
            {"volumes": [{"name": "d", "persistentVolumeClaim": {"readonly": True}}]},
            "spec.volumes[0].persistentVolumeClaim.readonly: unknown field (did you mean "
            "'readOnly'?)",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"nam": "s"}}}]},
            "spec.env[0].valueFrom.secretKeyRef.nam: unknown field (did you mean 'name'?)",
        ),
        (
            {"podTemplate": {"spec": {"containers": [{"securityContext": {"runAsUsr": 1}}]}}},
            "spec.podTemplate.spec.containers[0].securityContext.runAsUsr: unknown field (did you "
            "mean 'runAsUser'?)",
        ),
        (
            {"podTemplate": {"spec": {"securityContext": {"later": {}}}}},
            f"spec.podTemplate.spec.securityContext.later: unknown field; Kubernetes {NEWEST} has "
            "none of this name. If the cluster has it, create the job with kubectl apply",
        ),
        (
            {"podTemplate": {"metadata": {"ddpjob.dev/x": "7"}}},
            "spec.podTemplate.metadata.ddpjob.dev/x: unknown field; spec.podTemplate.metadata has "
            "annotations, labels",
        ),
    ],
)
def test_refuse_unknown_fields_names_the_field_and_what_may_be_meant(fields, message):
    with pytest.raises(SpecError) as refused:
        refuse_unknown_fields(a_spec(**fields))
    assert str(refused.value) == message


def test_refuse_unknown_fields_accepts_a_spec_without_them():
    refuse_unknown_fields(a_spec())


# What is accepted


def test_the_smallest_spec_has_the_documented_defaults():
    assert Spec.from_dict({"image": "i", "args": ["a"]}) == Spec(
        image="i",
        args=("a",),
        nodes=1,
        nproc_per_node=1,
        fast_start=True,
        accelerator="cpu",
        devices={},
        command=("torchrun",),
        checkpoint=None,
        failure_policy=FailurePolicy(max_restarts=3, max_disruptions=20),
    )


def test_every_field_is_read():
    spec = Spec.from_dict(
        a_spec(
            nodes=4,
            nprocPerNode=2,
            torchrun={
                "command": ["python", "-m", "torch.distributed.run"],
                "args": ["--monitor-interval", "1"],
                "rdzvConf": {"join_timeout": 60},
            },
            checkpoint={"claimName": "ckpt", "mountPath": "/c/"},
            failurePolicy={"maxRestarts": 0},
        )
    )
    assert (spec.nodes, spec.nproc_per_node, spec.world_size) == (4, 2, 8)
    assert spec.command == ("python", "-m", "torch.distributed.run")
    assert spec.torchrun_args == ("--monitor-interval", "1")
    assert spec.rdzv_conf == {"join_timeout": "60"}
    assert spec.checkpoint == Checkpoint("ckpt", "/c")
    assert spec.failure_policy == FailurePolicy(0, 20)


def test_by_default_a_job_waits_for_nothing_and_only_running_pods_are_cleaned_up():
    assert Spec.from_dict(a_spec()).lifecycle == Lifecycle(
        suspended=False,
        active_deadline=None,
        startup_deadline=None,
        time_to_live=None,
        clean_pods=CleanPodPolicy.RUNNING,
        managed_by="ddpjob.dev/operator",
    )


def test_every_field_of_the_lifecycle_is_read():
    spec = Spec.from_dict(
        a_spec(
            suspend=True,
            activeDeadlineSeconds=1,
            startupDeadlineSeconds=2,
            ttlSecondsAfterFinished=0,
            cleanPodPolicy="All",
            managedBy="kueue.x-k8s.io/multikueue",
        )
    )
    assert spec.lifecycle == Lifecycle(
        suspended=True,
        active_deadline=timedelta(seconds=1),
        startup_deadline=timedelta(seconds=2),
        time_to_live=timedelta(0),
        clean_pods=CleanPodPolicy.ALL,
        managed_by="kueue.x-k8s.io/multikueue",
    )
    assert spec.unknown_fields == ()


@pytest.mark.parametrize("policy", CleanPodPolicy)
def test_every_clean_up_is_known(policy):
    assert Spec.from_dict(a_spec(cleanPodPolicy=str(policy))).lifecycle.clean_pods is policy


@pytest.mark.parametrize(
    "field",
    [
        "suspend",
        "activeDeadlineSeconds",
        "startupDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "cleanPodPolicy",
        "managedBy",
    ],
)
def test_a_field_of_the_lifecycle_that_is_null_has_its_default(field):
    assert Spec.from_dict(a_spec(**{field: None})).lifecycle == Lifecycle()


def test_every_field_of_the_failure_policy_is_read():
    policy = {
        "maxRestarts": 1000,
        "maxDisruptions": 0,
        "windowSeconds": 2**31 - 1,
        "nonRetryableExitCodes": [1, 255],
        "maxAttemptsWithoutProgress": 10,
    }
    assert Spec.from_dict(a_spec(failurePolicy=policy)).failure_policy == FailurePolicy(
        max_restarts=1000,
        max_disruptions=0,
        window=timedelta(seconds=2**31 - 1),
        non_retryable=(1, 255),
        max_attempts_without_progress=10,
    )


def test_a_list_of_exit_codes_may_be_empty():
    policy = Spec.from_dict(a_spec(failurePolicy={"nonRetryableExitCodes": []})).failure_policy
    assert policy.non_retryable == ()


def test_a_list_of_exit_codes_is_bounded():
    codes = list(range(1, 34))
    message = refusal_of(a_spec(failurePolicy={"nonRetryableExitCodes": codes}))
    assert "must be at most 32 items long" in message
    policy = Spec.from_dict(a_spec(failurePolicy={"nonRetryableExitCodes": codes[:32]}))
    assert len(policy.failure_policy.non_retryable) == 32


def test_pod_fields_are_kept_unchanged():
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    fields = {
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "x"}],
        "env": [{"name": "x", "valueFrom": {"deep": {"er": [1]}}}],
        "envFrom": [{"secretRef": {"name": "x"}}],
        "resources": {"limits": {"cpu": 1}},
        "volumes": [{"name": "x", "later": {"deep": {"er": [1]}}}],
        "volumeMounts": [{"name": "x", "mountPath": "/x"}],
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [spread],
        "serviceAccountName": "x",
        "priorityClassName": "x",
    }
    assert set(fields) == set(pod_field_names())
    assert Spec.from_dict(a_spec(**fields)).pod_fields == fields


def test_a_field_that_is_null_or_an_empty_string_counts_as_absent():
    assert Spec.from_dict(a_spec(**dict.fromkeys(pod_field_names()))).pod_fields == {}
    assert Spec.from_dict(a_spec(serviceAccountName="", priorityClassName="")).pod_fields == {}
    setting = {"rdzvConf": {"join_timeout": None}, "command": None}
    assert Spec.from_dict(a_spec(torchrun=setting)) == Spec.from_dict(a_spec())
    objects = dict.fromkeys(("checkpoint", "failurePolicy", "torchrun", "podTemplate"))
    assert Spec.from_dict(a_spec(**objects)) == Spec.from_dict(a_spec())


@pytest.mark.parametrize(
    ("accelerator", "resources", "unused"),
    [
        ("cpu", {"limits": {"nvidia.com/gpu": "1"}}, ("nvidia.com/gpu",)),
        ("cpu", {"requests": {"cpu": "1"}}, ()),
        ("gpu", {"limits": {"nvidia.com/gpu": 8}}, ()),
        ("gpu", {"limits": {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}}, ()),
        ("gpu", {"limits": {"aws.amazon.com/neuron": 16}}, ("aws.amazon.com/neuron",)),
    ],
)
def test_devices_that_the_accelerator_does_not_use_are_known(accelerator, resources, unused):
    spec = Spec.from_dict(a_spec(accelerator=accelerator, resources=resources))
    assert spec.unused_devices == unused
    assert bool(spec.device_advice) == bool(unused)


def test_the_advice_for_a_gpu_names_the_accelerator():
    spec = Spec.from_dict(a_spec(resources={"limits": {"nvidia.com/gpu": "1"}}))
    assert "set spec.accelerator to gpu, or remove it" in spec.device_advice


OUT = {"env": [{"name": "OUT", "value": "/data"}]}
SERVICE_LINKS = {"podTemplate": {"spec": {"enableServiceLinks": True}}}
SECRETS = {"envFrom": [{"secretRef": {"name": "s"}}]}
OUT_TRAINER = {"name": "trainer", **OUT}
CHECKPOINT = {"checkpoint": {"claimName": "ckpt"}}


@pytest.mark.parametrize(
    ("args", "fields", "advice"),
    [
        (["a.py", "$DDP_CHECKPOINT_DIR/x"], CHECKPOINT, "write $(DDP_CHECKPOINT_DIR)"),
        (["a.py", "$DDP_CHECKPOINT_DIR/x"], {}, "set spec.checkpoint (--checkpoints CLAIM) and"),
        (["a.py", "$(DDP_CHECKPOINT_DIR)/x"], {}, "set spec.checkpoint (--checkpoints CLAIM)"),
        (["a.py", "$(DDP_CHECKPOINT_DIR)/x"], CHECKPOINT, ""),
        (["a.py", "--out=${OUT}"], {}, "spec.args: ${OUT} reaches the script as it is"),
        (["a.py", "--out=${OUT}"], {}, "set OUT in spec.env and write $(OUT)"),
        (["a.py", "$(OUT)"], {}, "$(OUT) reaches the script as it is; set OUT in spec.env"),
        (["a.py", "--rank", "$RANK"], {}, 'read os.environ["RANK"] in the script'),
        (["a.py", "${WORLD_SIZE}"], SECRETS, 'read os.environ["WORLD_SIZE"] in the script'),
        (["a.py", "seed=$SLURM_PROCID"], {}, 'read os.environ["RANK"] in the script'),
        (["a.py", "${SLURM_ARRAY_TASK_ID}"], {}, "set SLURM_ARRAY_TASK_ID in spec.env"),
        (["a.py", "$SLURM_JOB_ID"], {}, "write $(DDP_JOB_NAME)"),
        (["a.py", "$(DDP_ATTEMPT)"], {}, 'read os.environ["DDP_ATTEMPT"] in the script'),
        (["a.py", "$(KUBERNETES_SERVICE_HOST)"], {}, ""),
        (["a.py", "$(REDIS_SERVICE_HOST)"], SERVICE_LINKS, ""),
        (["a.py", "$(OUT)"], OUT, ""),
        (["a.py", "--out=${OUT}"], OUT, "no shell reads args; write $(OUT)"),
        (["a.py", "$(OUT)"], SECRETS, ""),
        (["a.py", "$(OUT)"], {"podTemplate": {"spec": {"containers": [OUT_TRAINER]}}}, ""),
        (["a.py", "$(DDP_NODE_INDEX)", "$$OUT", "$$(OUT)", "cost: 5$", "$1"], {}, ""),
        (["bash", "-c", "echo $OUT"], {"torchrun": {"args": ["--no-python"]}}, ""),
        (["bash", "-c", "echo $(date)"], {"torchrun": {"args": ["--no-python"]}}, ""),
    ],
)
def test_a_variable_that_nothing_expands_is_warned_about(args, fields, advice):
    spec = Spec.from_dict(a_spec(args=args, **fields))
    assert advice in spec.variable_advice
    assert bool(spec.advice) == bool(advice)
