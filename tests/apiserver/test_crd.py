"""The CRD in a real API server: rules, messages, immutability, defaults, columns, subresources."""

import copy
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from envtest import APPLY, CRD, MERGE, Answer, ApiServer

from ddpjob import DDPJob
from ddpjob.core.api.kinds import kinds
from ddpjob.core.api.kubernetes import NEWEST, NEWEST_MINOR
from ddpjob.core.api.profiles import catalog
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.spec import refuse_unknown_fields
from ddpjob.core.api.torchrun_flags import FLAGS
from ddpjob.core.api.yaml_text import load_yaml

IMMUTABLE = "is immutable; delete the job and create it again"
RESERVED = "remove them from env"
RESERVED_VOLUME = (
    'names that begin with "ddpjob-" are reserved for the operator; choose another name'
)
RESERVED_PATH = "paths below /ddpjob are reserved for the operator; choose another path"
SUSPEND_FIRST = "can be changed only while spec.suspend is true"
MUTABLE = {
    "nodes",
    "failurePolicy",
    "suspend",
    "retries",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "cleanPodPolicy",
    "recovery",
    "podSecurity",
}
# Fields for scheduling. Queues change them while a job is suspended.
SCHEDULING = {"nodeSelector", "tolerations", "affinity", "priorityClassName", "scheduling"}

DEFINITION = load_yaml(CRD.read_text())
SCHEMA = DEFINITION["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]


# -- builders


def job(name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return a DDPJob with the required fields and `spec`."""
    spec = {"image": "trainer:1", "args": ["train.py"], **spec}
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def overlay(**container: Any) -> dict[str, Any]:
    """Return a podTemplate that changes the container trainer."""
    return {"spec": {"containers": [{"name": "trainer", **container}]}}


class Jobs:
    """The DDPJobs of one namespace by plain HTTP."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.path = f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs"

    def create(self, manifest: dict[str, Any]) -> Answer:
        return self.server.request("POST", self.path, manifest)

    def made(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create a job, which must be accepted, and return its object."""
        answer = self.create(manifest)
        assert answer.code == 201, answer.body["message"]
        return answer.body

    def get(self, name: str = "job") -> dict[str, Any]:
        return self.server.request("GET", f"{self.path}/{name}").body

    def patch(self, spec: dict[str, Any], name: str = "job") -> Answer:
        return self.server.request("PATCH", f"{self.path}/{name}", {"spec": spec}, MERGE)

    def replace(self, manifest: dict[str, Any], subresource: str = "") -> Answer:
        return self.server.request(
            "PUT", f"{self.path}/{manifest['metadata']['name']}{subresource}", manifest
        )


@pytest.fixture
def jobs(apiserver: ApiServer, namespace: str) -> Jobs:
    return Jobs(apiserver, namespace)


@pytest.fixture(scope="module")
def shared_jobs(apiserver: ApiServer) -> Iterator[Jobs]:
    """Jobs of one namespace for many small tests, each with a name of its own."""
    name = f"shared-{uuid.uuid4().hex[:10]}"
    assert apiserver.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}}).code == 201
    yield Jobs(apiserver, name)
    apiserver.delete_jobs(name)


# -- rules and their sentences

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no nodes": (
        {"nodes": 0},
        "spec.nodes: Invalid value: 0: spec.nodes in body should be greater than or equal to 1",
    ),
    "a level that does not exist": (
        {"podSecurity": "restricted"},
        'spec.podSecurity: Unsupported value: "restricted": supported values: "None", "Restricted"',
    ),
    "too many nodes": ({"nodes": 1001}, "should be less than or equal to 1000"),
    "no processes": ({"nprocPerNode": 0}, 'must be "auto" or an integer from 1 to 256'),
    "too many processes": (
        {"nprocPerNode": 257},
        'must be "auto" or an integer from 1 to 256',
    ),
    "processes in words": (
        {"nprocPerNode": "gpu"},
        'must be "auto" or an integer from 1 to 256',
    ),
    "processes quoted": (
        {"nprocPerNode": "2"},
        'must be "auto" or an integer from 1 to 256',
    ),
    "unknown accelerator": (
        {"accelerator": "p9.48xlarge"},
        'spec.accelerator: Unsupported value: "p9.48xlarge": supported values: "'
        + '", "'.join(catalog()),
    ),
    "empty image": ({"image": ""}, "spec.image in body should be at least 1 chars long"),
    "no image": ({"image": None}, "spec.image: Required value"),
    "no args": ({"args": None}, "spec.args: Required value"),
    "empty args": ({"args": []}, "spec.args in body should have at least 1 items"),
    "too many args": (
        {"args": ["-"] * 257},
        "spec.args: Too many: 257: must have at most 256 items",
    ),
    "an endless arg": (
        {"args": ["x" * 4097]},
        "spec.args[0]: Too long: may not be more than 4096 bytes",
    ),
    "checkpoint without claim": ({"checkpoint": {}}, "spec.checkpoint.claimName: Required value"),
    "negative restarts": (
        {"failurePolicy": {"maxRestarts": -1}},
        "should be greater than or equal to 0",
    ),
    "negative disruptions": (
        {"failurePolicy": {"maxDisruptions": -1}},
        "should be greater than or equal to 0",
    ),
    "too many restarts": (
        {"failurePolicy": {"maxRestarts": 1001}},
        "should be less than or equal to 1000",
    ),
    "a window of no time": (
        {"failurePolicy": {"windowSeconds": 0}},
        "should be greater than or equal to 1",
    ),
    "an exit code of success": (
        {"failurePolicy": {"nonRetryableExitCodes": [0]}},
        "should be greater than or equal to 1",
    ),
    "no attempt without progress": (
        {"failurePolicy": {"maxAttemptsWithoutProgress": 0}},
        "should be greater than or equal to 1",
    ),
    "more attempts without progress than the history has": (
        {"failurePolicy": {"maxAttemptsWithoutProgress": 11}},
        "should be less than or equal to 10",
    ),
    "suspend as a string": ({"suspend": "yes"}, "must be of type boolean"),
    "a deadline of no time": (
        {"activeDeadlineSeconds": 0},
        "should be greater than or equal to 1",
    ),
    "a startup deadline of no time": (
        {"startupDeadlineSeconds": 0},
        "should be greater than or equal to 1",
    ),
    "a negative time to live": (
        {"ttlSecondsAfterFinished": -1},
        "should be greater than or equal to 0",
    ),
    "another clean-up": ({"cleanPodPolicy": "Some"}, "Unsupported value"),
    "a quantity of another world": (
        {"resources": {"limits": {"memory": "1GB"}}},
        "spec.resources.limits.memory in body should match",
    ),
    "empty launcher": (
        {"torchrun": {"command": []}},
        "spec.torchrun.command in body should have at least 1 items",
    ),
    "a container without an image": (
        {"podTemplate": {"spec": {"containers": [{"name": "pytorch"}]}}},
        "to change the container that trains, name it trainer, otherwise give it an image",
    ),
    "two volumes of a name": (
        {"volumes": [{"name": "v", "emptyDir": {}}, {"name": "v", "configMap": {"name": "c"}}]},
        'spec.volumes[1]: Duplicate value: {"name":"v"}',
    ),
    "two mounts at a path": (
        {"volumeMounts": [{"name": "v", "mountPath": "/x"}, {"name": "w", "mountPath": "/x"}]},
        'spec.volumeMounts[1]: Duplicate value: {"mountPath":"/x"}',
    ),
    "is_host": (
        {"torchrun": {"rdzvConf": {"is_host": "1"}}},
        "is_host is set by the operator, which chooses the host; remove it",
    ),
    "the operator's volume": (
        {"volumes": [{"name": "ddpjob-shm", "emptyDir": {}}]},
        RESERVED_VOLUME,
    ),
    "the operator's volume in the overlay": (
        {"podTemplate": {"spec": {"volumes": [{"name": "ddpjob-home", "emptyDir": {}}]}}},
        RESERVED_VOLUME,
    ),
    "a mount in the operator's folder": (
        {"volumeMounts": [{"name": "v", "mountPath": "/ddpjob/run"}]},
        RESERVED_PATH,
    ),
    "a mount in the operator's folder in the overlay": (
        {
            "podTemplate": {
                "spec": {
                    "initContainers": [
                        {"name": "i", "volumeMounts": [{"name": "v", "mountPath": "/ddpjob"}]}
                    ]
                }
            }
        },
        RESERVED_PATH,
    ),
    "a recovery that does not exist": (
        {"recovery": "inplace"},
        'Unsupported value: "inplace": supported values: "InPlace", "Recreate"',
    ),
    "a second mount at the checkpoints": (
        {
            "checkpoint": {"claimName": "c"},
            "volumeMounts": [{"name": "v", "mountPath": "/checkpoints"}],
        },
        "a mount has the path of checkpoint.mountPath; remove the mount or choose another path",
    ),
    "a second mount at the checkpoints, with a slash": (
        {
            "checkpoint": {"claimName": "c"},
            "volumeMounts": [{"name": "v", "mountPath": "/checkpoints/"}],
        },
        "a mount has the path of checkpoint.mountPath; remove the mount or choose another path",
    ),
    "a second mount at checkpoints with a slash": (
        {
            "checkpoint": {"claimName": "c", "mountPath": "/mnt/x/"},
            "volumeMounts": [{"name": "v", "mountPath": "/mnt/x"}],
        },
        "a mount has the path of checkpoint.mountPath; remove the mount or choose another path",
    ),
    "a working directory beside code": (
        {"code": {"configMap": "c"}, "podTemplate": overlay(workingDir="/app")},
        "workingDir of the container trainer cannot be set with code",
    ),
    "a startup probe beside setup": (
        {"setup": "true", "podTemplate": overlay(startupProbe={})},
        "startupProbe of the container trainer cannot be set with setup",
    ),
    "a name in the overlay": (
        {"podTemplate": {"metadata": {"name": "mine"}}},
        "must have only labels and annotations; remove the rest",
    ),
    "a finalizer beside labels": (
        {"podTemplate": {"metadata": {"labels": {"a": "b"}, "finalizers": ["x/y"]}}},
        "must have only labels and annotations; remove the rest",
    ),
    "the operator's label": (
        {"podTemplate": {"metadata": {"labels": {"ddpjob.dev/job": "other"}}}},
        'names that begin with "ddpjob.dev/" are reserved for the operator; choose another prefix',
    ),
    "the operator's annotation": (
        {"podTemplate": {"metadata": {"annotations": {"ddpjob.dev/x": ""}}}},
        'names that begin with "ddpjob.dev/" are reserved for the operator; choose another prefix',
    ),
}
for field, value in {
    "restartPolicy": "Always",
    "hostname": "h",
    "subdomain": "s",
    "activeDeadlineSeconds": 9,
}.items():
    REFUSED[f"podTemplate.spec.{field}"] = (
        {"podTemplate": {"spec": {field: value}}},
        "restartPolicy, hostname, subdomain and activeDeadlineSeconds are set by the operator; "
        "remove them",
    )
for field, value in {
    "command": ["sh"],
    "args": ["-c"],
    "resources": {"limits": {"cpu": "1"}},
    "restartPolicy": "Never",
    "readinessProbe": {"httpGet": {"path": "/", "port": 80}},
    "terminationMessagePath": "/x",
    "terminationMessagePolicy": "File",
}.items():
    REFUSED[f"trainer's {field}"] = (
        {"podTemplate": overlay(**{field: value})},
        "trainer are set by the operator; use spec.args, spec.resources and spec.torchrun.command",
    )
for variable in (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NEURON_RT_ROOT_COMM_ID",
    "PET_NNODES",
    "PET_X",
):
    entry = {"env": [{"name": "A", "value": "1"}, {"name": variable, "value": "1"}]}
    REFUSED[f"env {variable}"] = (entry, RESERVED)
    REFUSED[f"overlay env {variable}"] = ({"podTemplate": overlay(**entry)}, RESERVED)
PROCESS_COUNTS = {
    "trn1.32xlarge": "must be 1, 2, 8, 32 or auto with accelerator trn1.32xlarge on one node, "
    "32 or auto on each of several nodes",
    "trn1.2xlarge": "must be 1, 2 or auto with accelerator trn1.2xlarge",
}
for accelerator, nodes, processes in (
    ("trn1.32xlarge", 1, 16),
    ("trn1.32xlarge", 2, 8),
    ("trn1.2xlarge", 1, 8),
):
    REFUSED[f"{processes} processes on {nodes} {accelerator}"] = (
        {"accelerator": accelerator, "nodes": nodes, "nprocPerNode": processes},
        PROCESS_COUNTS[accelerator],
    )
REFUSED["several trn1.2xlarge"] = (
    {"accelerator": "trn1.2xlarge", "nodes": 2},
    "must be 1 with accelerator trn1.2xlarge, which has no EFA to reach another node; for several "
    "nodes use trn1.32xlarge",
)
REFUSED["a volume without a name"] = (
    {"volumes": [{"name": ""}]},
    "volumes[0].name in body should be at least 1 chars",
)
REFUSED["a mount without a name"] = (
    {"volumeMounts": [{"name": "", "mountPath": "/x"}]},
    "volumeMounts[0].name in body should be at least 1 chars",
)
for path in ("checkpoints", "/", "//", "/a:b", "", "./a"):
    REFUSED[f"mountPath {path!r}"] = (
        {"checkpoint": {"claimName": "c", "mountPath": path}},
        'must be an absolute path other than "/" and without ":"',
    )
for conf in (
    {"timeout": "1,is_host=0"},
    {"timeout": "a b"},
    {"timeout": "a=b"},
    {"timeout": ""},
    {"Time": 1},
    {"a,b": 1},
):
    REFUSED[f"rdzvConf {conf}"] = (
        {"torchrun": {"rdzvConf": conf}},
        'must have names of a-z and "_", and values without comma, equals sign and space',
    )
WRONG_BEGINNING = "begin with the script or -m and a module; flags of torchrun belong to"
WRONG_WORDS = "begin with the script, or with -m and a module without --no-python, each word"
WRONG_FLAGS = "may have only these flags of torchrun: --no-python, --start-method"
for flag in (
    "--nnodes=2",
    "--nnodes",
    "--nproc-per-node=2",
    "--nproc_per_node",
    "--rdzv-endpoint=x",
    "--rdzv_backend",
    "--local-addr=x",
    "--node_rank=0",
    "--master-addr=x",
    "--master_port=1",
    "--standalone",
    "--max-restarts=3",
    "--nproc-per=2",
    "--rdzv_e=x",
    "--max",
):
    REFUSED[f"args begin with {flag}"] = (
        {"args": [flag, "train.py"]},
        WRONG_BEGINNING,
    )
    REFUSED[f"args of another launcher begin with {flag}"] = (
        {"args": [flag, "train.py"], "torchrun": {"command": ["my-launcher"]}},
        WRONG_BEGINNING,
    )
for flag in ("--role=a", "--no-python", "--tees", "-c", "-u", "-", "--", "-m pkg"):
    REFUSED[f"args begin with {flag}"] = ({"args": [flag, "train.py"]}, WRONG_BEGINNING)
for program in (
    "python",
    "python3.11",
    "/opt/venv/bin/python",
    "torchrun",
    "/opt/conda/bin/torchrun",
    "accelerate",
    "bash",
    "./run.sh",
):
    REFUSED[f"args begin with {program}"] = (
        {"args": [program, "train.py"]},
        "begin with the script or -m and a module, since torchrun starts Python itself",
    )
REFUSED["Python for another launcher"] = (
    {"args": ["python", "train.py"], "torchrun": {"command": ["my-launcher"]}},
    "begin with the script or -m and a module, since torchrun starts Python itself",
)
for args in (
    ["python train.py --epochs 3"],
    ["/opt/my/torchrun train.py"],
    ["train.py --epochs 3"],
    ["./run.sh --fast"],
    ["-m"],
    ["-m", ""],
    ["-m", "-u", "pkg"],
    ["-m", "pkg --epochs 3"],
    ["-m", "torch.distributed.run", "train.py"],
):
    REFUSED[f"args {args}"] = ({"args": args}, WRONG_WORDS)
REFUSED["a module without Python"] = (
    {"args": ["-m", "pkg"], "torchrun": {"args": ["--no-python"]}},
    WRONG_WORDS,
)
for flag in (flag for flag in FLAGS if flag.instead):
    word = flag.spellings[-1] + ("=1" if flag.takes_value else "")
    REFUSED[f"torchrun.args {word}"] = ({"torchrun": {"args": ["--role=a", word]}}, WRONG_FLAGS)
for words in (
    ["--nn=2"],
    ["-r3"],
    ["-t", "3"],
    ["--role=a", "--tee", "3"],
    ["--mon=1"],
    ["--event-log_handler=x"],
    ["--rolex=a"],
    ["--"],
    ["train.py"],
    ["--role", "a", "b"],
    ["--role"],
    ["--role", "--no-python"],
    ["--no-python=1"],
    [""],
):
    REFUSED[f"torchrun.args {words}"] = ({"torchrun": {"args": words}}, WRONG_FLAGS)
    for program in (["/opt/my env/torchrun"], ["/bin/python3", "-m", "torch.distributed.run"]):
        REFUSED[f"torchrun.command {program} {words}"] = (
            {"torchrun": {"command": [*program, *words]}},
            WRONG_FLAGS,
        )


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_job_is_refused_with_its_message(shared_jobs: Jobs, case: str) -> None:
    spec, sentence = REFUSED[case]
    answer = shared_jobs.create(job("bad", **spec))
    assert (answer.code, answer.body["kind"]) == (422, "Status")
    assert sentence in answer.body["message"]


@pytest.mark.parametrize("case", REFUSED)
def test_a_local_run_refuses_the_same_jobs(case: str) -> None:
    refused = DDPJob.from_manifest(job("bad", **REFUSED[case][0]))
    with pytest.raises(SpecError):
        refused.check()


ACCEPTED: dict[str, dict[str, Any]] = {
    "another program than Python": {
        "args": ["python", "train.py"],
        "torchrun": {"command": ["torchrun", "--no-python"]},
    },
    "a script whose name begins with python": {"args": ["python_job.py"]},
    "nothing but the least": {},
    "processes in number": {"nprocPerNode": 256},
    "another program by a flag of torchrun": {
        "args": ["bash", "run.sh"],
        "torchrun": {"args": ["--role=a", "--no_python"]},
    },
    "a script with a space in its path": {"args": ["/my code/train.py", "--epochs", "3"]},
    "a script in a folder with the name of a program": {"args": ["torchrun/train.py"]},
    "words of another launcher": {
        "args": ["--mixed_precision", "fp16", "bash", "train.py --epochs 3"],
        "torchrun": {"command": ["accelerate", "launch", "--nnodes=2"], "args": ["--tees", "x"]},
    },
    "no flags of torchrun": {"torchrun": {"args": []}},
    "flags of torchrun in its command": {
        "torchrun": {
            "command": ["python3", "-m", "torch.distributed.run", "--role", "a", "--no-python"]
        }
    },
    "a script's flag of torchrun's name": {
        "args": ["train.py", "--nnodes=2", "--master-port", "1"]
    },
    "a module": {"args": ["-m", "package.train"]},
    "a module, by the long name": {"args": ["--module", "package.train", "--nnodes=2"]},
    "rendezvous settings": {"torchrun": {"rdzvConf": {"join_timeout": 900, "store": "tcp:/x"}}},
    "a launcher of its own": {"torchrun": {"command": ["python", "-m", "torch.distributed.run"]}},
    "variables that only look reserved": {
        "env": [{"name": "RANKS", "value": ""}, {"name": "MY_PET_X", "value": "1"}]
    },
    "a sidecar with the trainer's names": {
        "podTemplate": {
            "spec": {
                "containers": [
                    {
                        "name": "log",
                        "image": "i",
                        "command": ["x"],
                        "args": [],
                        "env": [{"name": "RANK", "value": "0"}],
                    }
                ]
            }
        }
    },
    "/dev/shm of the user": {
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}],
        "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
    },
    "the numbers of processes that work together on one trn1.32xlarge": {
        "accelerator": "trn1.32xlarge",
        "nprocPerNode": 8,
    },
    "every core of several trn1.32xlarge": {
        "accelerator": "trn1.32xlarge",
        "nodes": 2,
        "nprocPerNode": 32,
    },
    "several trn1.32xlarge": {"accelerator": "trn1.32xlarge", "nodes": 4},
    "one core of a trn1.2xlarge": {"accelerator": "trn1.2xlarge", "nprocPerNode": 1},
    "a checkpoint deep down": {"checkpoint": {"claimName": "c", "mountPath": "/mnt/x/y/"}},
    "labels and annotations": {
        "podTemplate": {"metadata": {"labels": {"a": "b"}, "annotations": {"c.d/e": "f"}}}
    },
    "empty overlay": {"podTemplate": {"metadata": {}, "spec": {}}},
    "quantities as numbers and strings": {
        "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"x.y/z": 8}}
    },
}
for flag in (flag for flag in FLAGS if not flag.instead):
    value = ["a b"] if flag.takes_value else []
    words = [word for name in flag.spellings for word in (name, *value)]
    ACCEPTED[f"torchrun.args {flag.name}"] = {"torchrun": {"args": words}}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_good_job_is_accepted_as_it_is(shared_jobs: Jobs, case: str) -> None:
    manifest = job(f"good-{list(ACCEPTED).index(case)}", **ACCEPTED[case])
    kept = shared_jobs.made(manifest)["spec"]
    assert {key: kept[key] for key in ACCEPTED[case]} == _with_defaults(ACCEPTED[case])


def _with_defaults(spec: dict[str, Any]) -> dict[str, Any]:
    spec = copy.deepcopy(spec)
    if "torchrun" in spec:
        spec["torchrun"].setdefault("command", ["torchrun"])
    return spec


@pytest.mark.parametrize("name", ["a", "a-1", "a" * 52])
def test_a_name_that_a_service_can_have_is_accepted(shared_jobs: Jobs, name: str) -> None:
    shared_jobs.made(job(name))


@pytest.mark.parametrize("name", ["9lives", "a.b", "a" * 53, "1"])
def test_a_name_that_no_service_can_have_is_refused(shared_jobs: Jobs, name: str) -> None:
    answer = shared_jobs.create(job(name))
    assert answer.code == 422
    assert "metadata.name: Invalid value" in answer.body["message"]
    assert "must be at most 52 lower-case letters, digits" in answer.body["message"]


def test_the_server_may_choose_the_name(jobs: Jobs) -> None:
    manifest = job()
    manifest["metadata"] = {"generateName": "digits-"}
    assert jobs.made(manifest)["metadata"]["name"].startswith("digits-")


# -- immutability

# Two values for every immutable field of spec, by its type if the type is enough.
OF_A_TYPE: dict[str, tuple[Any, Any]] = {
    "integer": (60, 600),
    "boolean": (True, False),
    "string": ("a", "b"),
}
CHANGES: dict[str, tuple[Any, Any]] = {
    **{
        name: tuple(field["enum"][:-3:-1]) if "enum" in field else OF_A_TYPE[field["type"]]
        for name, field in SPEC["properties"].items()
        if name not in MUTABLE and field.get("type") in OF_A_TYPE
    },
    "nprocPerNode": (2, 4),
    "accelerator": ("gpu", "trn1.32xlarge"),
    "image": ("a:1", "a:2"),
    "args": (["a.py"], ["a.py", "--x"]),
    "torchrun": ({"command": ["a"]}, {"command": ["b"]}),
    "checkpoint": ({"claimName": "a"}, {"claimName": "b"}),
    "code": ({"configMap": "a"}, {"configMap": "b"}),
    "imagePullSecrets": ([{"name": "a"}], [{"name": "b"}]),
    "env": ([{"name": "A", "value": "1"}], [{"name": "A", "value": "2"}]),
    "envFrom": ([{"secretRef": {"name": "a"}}], [{"configMapRef": {"name": "a"}}]),
    "resources": ({"limits": {"cpu": 1}}, {"requests": {"cpu": 1}}),
    "volumes": ([{"name": "a", "emptyDir": {}}], [{"name": "a", "hostPath": {"path": "/"}}]),
    "volumeMounts": ([{"name": "a", "mountPath": "/a"}], [{"name": "a", "mountPath": "/b"}]),
    "nodeSelector": ({"a": "1"}, {"b": "1"}),
    "tolerations": ([{"key": "a"}], [{"operator": "Exists"}]),
    "affinity": ({"nodeAffinity": {"a": []}}, {"podAffinity": {"a": []}}),
    "topologySpreadConstraints": (
        [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}],
        [{"maxSkew": 1, "topologyKey": "b", "whenUnsatisfiable": "DoNotSchedule"}],
    ),
    "managedBy": ("a.dev/queue", "b.dev/queue"),
    "scheduling": ({"gang": "Off"}, {"topology": {"required": "zone"}}),
    "podTemplate": ({"spec": {"dnsPolicy": "Default"}}, {"spec": {"hostIPC": True}}),
}
REQUIRED = set(SPEC["required"])
DEFAULTED = {name for name, field in SPEC["properties"].items() if "default" in field}


def refusal_of(*path: str) -> str:
    """Return the refusal message for a change of a field."""
    is_metadata = path[:2] == ("podTemplate", "metadata")
    return SUSPEND_FIRST if path[0] in SCHEDULING or is_metadata else IMMUTABLE


def test_every_field_is_tested_or_mutable() -> None:
    assert set(SPEC["properties"]) == set(CHANGES) | MUTABLE


@pytest.mark.parametrize("field", CHANGES)
def test_a_set_field_cannot_become_null_or_something_else(jobs: Jobs, field: str) -> None:
    value, other = CHANGES[field]
    jobs.made(job(**{field: value}))
    for changed in (None, other):
        answer = jobs.patch({field: changed})
        assert answer.code == 422, changed
        expected = "Required value" if changed is None and field in REQUIRED else refusal_of(field)
        assert f"spec.{field}: " in answer.body["message"]
        assert expected in answer.body["message"]
    assert jobs.patch({field: value}).code == 200


@pytest.mark.parametrize("field", sorted(set(CHANGES) - REQUIRED))
def test_an_unset_field_cannot_be_set_later(jobs: Jobs, field: str) -> None:
    jobs.made(job())
    answer = jobs.patch({field: CHANGES[field][0]})
    assert answer.code == 422
    assert f"spec.{field}: " in answer.body["message"]
    assert refusal_of(field) in answer.body["message"]


# An empty checkpoint is refused, because it needs a claim, and so is empty code. An empty
# podTemplate says nothing.
CAN_BE_EMPTY = {
    name: {"object": {}, "array": []}[field["type"]]
    for name, field in SPEC["properties"].items()
    if name in set(CHANGES) - REQUIRED - DEFAULTED - {"checkpoint", "code", "podTemplate"}
    and field["type"] in ("object", "array")
}


@pytest.mark.parametrize("field", CAN_BE_EMPTY)
def test_an_empty_field_cannot_be_removed(jobs: Jobs, field: str) -> None:
    jobs.made(job(**{field: CAN_BE_EMPTY[field]}))
    answer = jobs.patch({field: None})
    assert answer.code == 422
    assert f"spec.{field}: Invalid value: {refusal_of(field)}" in answer.body["message"]


def leaves(
    schema: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Yield every leaf below `schema` as (path, two different values).

    In a path, "[]" is an item and "{}" is a key with two different values.
    """
    kind = schema.get("type", "integer" if "x-kubernetes-int-or-string" in schema else "any")
    if "properties" in schema:
        for name, child in schema["properties"].items():
            yield from leaves(child, (*path, name))
    elif kind == "array":
        yield from leaves(schema["items"], (*path, "[]"))
    elif kind == "object":
        yield (*path, "{}"), ["a", "b"]
        yield from leaves(schema["additionalProperties"], (*path, "a"))
    elif "enum" in schema:
        yield path, schema["enum"][-2:]
    elif path[-1] == "mountPath":
        yield path, ["/a", "/b"]
    elif path == ("torchrun", "args", "[]"):
        yield path, ["--role=a", "--role=b"]
    else:
        values = {
            "integer": [1, 2],
            "boolean": [True, False],
            "string": ["a", "b"],
            "any": [{"a": 1}, {"b": 1}],
        }
        yield path, values[kind]


def instance(schema: dict[str, Any], path: tuple[str, ...], value: Any) -> Any:
    """Return the smallest object of `schema` with `value` at `path`."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if step == "{}":
        return {value: _least(schema["additionalProperties"])}
    if step == "[]":
        return [instance(schema["items"], rest, value)]
    if "properties" not in schema:
        return {step: instance(schema["additionalProperties"], rest, value)}
    needed = {*schema.get("required", ()), *needed_by_rules(schema)}
    filled = {name: _least(schema["properties"][name], name) for name in needed}
    return {**filled, step: instance(schema["properties"][step], rest, value)}


def needed_by_rules(schema: dict[str, Any]) -> set[str]:
    """Return the one field of a container required by a rule: its image."""
    return {"image"} & set(schema["properties"]) if "workingDir" in schema["properties"] else set()


def _least(schema: dict[str, Any], name: str = "") -> Any:
    if "x-kubernetes-preserve-unknown-fields" in schema:
        return {"a": 1}
    if "x-kubernetes-int-or-string" in schema or schema["type"] == "integer":
        return 1
    return {"array": ["a"], "string": "/a" if name == "mountPath" else "a"}[schema["type"]]


# These fields are always refused, or a generated value cannot meet their rule.
ELSEWHERE = {
    *(
        ("podTemplate", "spec", name)
        for name in ("restartPolicy", "hostname", "subdomain", "activeDeadlineSeconds")
    ),
}
LEAVES = {
    ".".join(path): (path, values)
    for name in sorted(set(SPEC["properties"]) - MUTABLE)
    for path, values in leaves(SPEC["properties"][name], (name,))
    if path not in ELSEWHERE
}


@pytest.mark.parametrize("place", LEAVES)
def test_no_leaf_of_the_spec_can_change(shared_jobs: Jobs, place: str) -> None:
    path, (before, after) = LEAVES[place]
    manifest = job(f"leaf-{list(LEAVES).index(place)}")
    manifest["spec"] |= instance(SPEC, path, before)
    shared_jobs.made(manifest)
    changed = copy.deepcopy(shared_jobs.get(manifest["metadata"]["name"]))
    changed["spec"] |= instance(SPEC, path, after)
    answer = shared_jobs.replace(changed)
    assert answer.code == 422, f"{place}: {before!r} became {after!r}"
    assert refusal_of(*path) in answer.body["message"]


def test_retries_can_only_grow(jobs: Jobs) -> None:
    jobs.made(job())
    assert jobs.patch({"retries": 2}).code == 200
    for smaller in (1, None):
        answer = jobs.patch({"retries": smaller})
        assert answer.code == 422
        assert "spec.retries: Invalid value" in answer.body["message"]
        assert (
            "can only grow; each larger number takes a Failed job up again"
            in answer.body["message"]
        )


def test_nodes_the_failure_policy_and_the_lifecycle_can_change(jobs: Jobs) -> None:
    jobs.made(job(nodes=2))
    assert jobs.patch({"nodes": 3, "failurePolicy": {"maxRestarts": 7}}).code == 200
    lifecycle = {
        "suspend": True,
        "activeDeadlineSeconds": 60,
        "startupDeadlineSeconds": 60,
        "ttlSecondsAfterFinished": 0,
        "cleanPodPolicy": "All",
    }
    assert jobs.patch(lifecycle).code == 200
    assert jobs.get()["metadata"]["generation"] == 3


RESCHEDULED: dict[str, Any] = {
    **{field: CHANGES[field][0] for field in sorted(SCHEDULING)},
    "podTemplate": {"metadata": {"labels": {"queue": "a"}, "annotations": {"queue": "a"}}},
}


def test_a_queue_changes_the_scheduling_of_a_suspended_job_as_it_starts_and_stops_it(
    jobs: Jobs,
) -> None:
    jobs.made(job(suspend=True))
    assert jobs.patch(RESCHEDULED).code == 200
    assert jobs.patch({"nodeSelector": {"zone": "b"}, "suspend": False}).code == 200
    assert jobs.patch({"nodeSelector": {"zone": "c"}}).code == 422
    assert jobs.patch({"nodeSelector": None, "suspend": True}).code == 200


def test_what_a_suspended_job_trains_cannot_change(jobs: Jobs) -> None:
    jobs.made(job(suspend=True))
    for change in ({"image": "b"}, {"podTemplate": {"spec": {"hostIPC": True}}}):
        answer = jobs.patch(change)
        assert (answer.code, IMMUTABLE in answer.body["message"]) == (422, True)


# -- what is filled in, pruned and shown


def test_defaults_are_filled_in(jobs: Jobs) -> None:
    assert jobs.made(job(checkpoint={"claimName": "c"}))["spec"] == {
        "image": "trainer:1",
        "args": ["train.py"],
        "nodes": 1,
        "nprocPerNode": "auto",
        "accelerator": "cpu",
        "setupTimeoutSeconds": 1800,
        "torchrun": {"command": ["torchrun"]},
        "checkpoint": {"claimName": "c", "mountPath": "/checkpoints"},
        "scheduling": {"gang": "Auto"},
        "failurePolicy": {
            "maxRestarts": 3,
            "maxDisruptions": 20,
            "nonRetryableExitCodes": [2],
            "maxAttemptsWithoutProgress": 5,
        },
        "suspend": False,
        "retries": 0,
        "cleanPodPolicy": "Running",
        "heartbeat": "File",
        "managedBy": "ddpjob.dev/operator",
    }


def test_a_null_is_an_absent_field_in_a_cluster_and_in_a_local_run(jobs: Jobs) -> None:
    nulls = job(
        "nulls",
        nodes=None,
        nprocPerNode=None,
        accelerator=None,
        env=None,
        torchrun={"command": None},
        checkpoint={"claimName": "c", "mountPath": None},
        failurePolicy={"maxRestarts": None, "maxDisruptions": None},
    )
    absent = job("absent", checkpoint={"claimName": "c"})
    assert jobs.made(nulls)["spec"] == jobs.made(absent)["spec"]
    assert Spec.from_dict(nulls["spec"]) == Spec.from_dict(absent["spec"])


@pytest.mark.parametrize(
    "where", ["minNodes", "suspend", "podTemplate.spec.dnsPolcy", "volumes[0].emptyDirs"]
)
def test_kubectl_refuses_an_unknown_field_by_its_name(
    apiserver: ApiServer, namespace: str, where: str
) -> None:
    manifest = job(podTemplate={"spec": {}}, volumes=[{"name": "a"}])
    spec = manifest["spec"]
    holder = (
        spec["volumes"][0]
        if "volumes" in where
        else spec["podTemplate"]["spec"]
        if "pod" in where
        else spec
    )
    holder[where.rpartition(".")[2]] = 1
    for extra in ([], ["--server-side"]):
        refused = apiserver.kubectl(
            "apply", "-n", namespace, *extra, "-f", "-", stdin=yaml.dump(manifest), check=False
        )
        assert refused.returncode == 1
        assert any(name in refused.stderr for name in (where, where.replace("[0]", '[name="a"]')))


def test_a_client_that_is_not_strict_is_warned_of_an_unknown_field(jobs: Jobs) -> None:
    answer = jobs.create(job(later=True))
    assert answer.code == 201
    assert answer.warnings == ['299 - "unknown field \\"spec.later\\""']
    assert "later" not in answer.body["spec"]


def test_the_columns_show_the_state(apiserver: ApiServer, jobs: Jobs) -> None:
    made = jobs.made(job(nodes=2))
    made["status"] = {
        "phase": "Running",
        "nodesReady": "1/2",
        "restarts": 3,
        "reason": "Why",
        "attempt": {"number": 5},
        "budget": {"failures": 2, "disruptions": 1},
        "account": {"goodput": "87%"},
    }
    assert jobs.replace(made, "/status").code == 200
    get = ("get", "ddp", "-n", jobs.namespace)
    header, row = (line.split() for line in apiserver.kubectl(*get).stdout.splitlines())
    assert header == ["NAME", "PHASE", "NODES", "RESTARTS", "REASON", "AGE"]
    assert row[:-1] == ["job", "Running", "1/2", "3", "Why"]
    header, row = (
        line.split() for line in apiserver.kubectl(*get, "-o", "wide").stdout.splitlines()
    )
    assert header[-4:] == ["ACCELERATOR", "ATTEMPT", "GOODPUT", "IMAGE"]
    assert row[-6:] == ["2", "1", "cpu", "5", "87%", "trainer:1"]


def test_get_all_lists_jobs_too(apiserver: ApiServer, jobs: Jobs) -> None:
    jobs.made(job())
    assert "ddpjob.ddpjob.dev/job" in apiserver.kubectl("get", "all", "-n", jobs.namespace).stdout


def test_kubectl_explains_every_level(apiserver: ApiServer) -> None:
    explained = apiserver.kubectl("explain", "ddp.spec.podTemplate.spec.containers.env").stdout
    assert "Variables of the container, as in a pod." in explained


# -- writing


def test_server_side_apply_keeps_what_another_manager_set(jobs: Jobs) -> None:
    path = f"{jobs.path}/job"
    first, second = job(nodes=2), job(failurePolicy={"maxRestarts": 9})
    assert jobs.server.request("PATCH", f"{path}?fieldManager=one", first, APPLY).code == 201
    assert jobs.server.request("PATCH", f"{path}?fieldManager=two", second, APPLY).code == 200
    assert jobs.server.request("PATCH", f"{path}?fieldManager=one", first, APPLY).code == 200
    spec = jobs.get()["spec"]
    assert (spec["nodes"], spec["failurePolicy"]["maxRestarts"]) == (2, 9)


def test_server_side_apply_names_the_manager_it_conflicts_with(jobs: Jobs) -> None:
    path = f"{jobs.path}/job"
    jobs.server.request("PATCH", f"{path}?fieldManager=one", job(nodes=2), APPLY)
    answer = jobs.server.request("PATCH", f"{path}?fieldManager=two", job(nodes=3), APPLY)
    assert answer.code == 409
    assert 'conflict with "one"' in answer.body["message"]


def test_a_stale_write_is_a_conflict(jobs: Jobs) -> None:
    stale = jobs.made(job())
    jobs.patch({"nodes": 2})
    assert jobs.replace({**stale, "status": {"attempt": {"number": 1}}}, "/status").code == 409
    assert "status" not in jobs.get()


def minimal_status(made: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return the shortest body of a status write: no spec, and only the required metadata."""
    metadata = {
        key: made["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")
    }
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "metadata": metadata,
        "status": status,
    }


def test_status_is_written_without_sending_the_spec_and_changes_nothing_else(jobs: Jobs) -> None:
    manifest = job(nodes=2, env=[{"name": "A", "value": "1"}])
    manifest["metadata"] |= {
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
        "finalizers": ["x.y/z"],
    }
    made = jobs.made(manifest)
    answer = jobs.replace(minimal_status(made, phase="Running", nodes={"active": 2}), "/status")
    assert (answer.code, answer.body["status"]) == (
        200,
        {"phase": "Running", "nodes": {"active": 2}},
    )
    assert answer.body["spec"] == made["spec"]
    for key in ("labels", "annotations", "finalizers", "generation", "uid"):
        assert answer.body["metadata"][key] == made["metadata"][key]


def test_a_status_write_to_a_job_of_the_same_name_but_another_uid_is_a_conflict(jobs: Jobs) -> None:
    made = jobs.made(job())
    body = minimal_status(made, phase="Running")
    body["metadata"] |= {"uid": str(uuid.uuid4())}
    assert jobs.replace(body, "/status").code == 409


AT = "2026-01-02T03:04:05Z"


def a_value(described: dict[str, Any]) -> Any:
    """Return a value of a schema, with all of its fields."""
    if "enum" in described:
        return described["enum"][0]
    if described["type"] == "object":
        fields = described.get("properties") or {"a": described["additionalProperties"]}
        return {name: a_value(field) for name, field in fields.items()}
    if described["type"] == "array":
        return [a_value(described["items"])]
    text = AT if "format" in described else "x"
    return {"string": text, "integer": 1, "boolean": True}[described["type"]]


def test_the_whole_status_is_kept(jobs: Jobs) -> None:
    whole = a_value(SCHEMA["properties"]["status"])
    assert whole["operator"]["attempt"]["host"]["index"] == 1
    body = minimal_status(jobs.made(job()), **whole)
    assert jobs.replace(body, "/status").body["status"] == whole


def test_a_condition_type_is_unique(jobs: Jobs) -> None:
    at = "2026-01-02T03:04:05Z"
    twice = [
        {
            "type": "Running",
            "status": "True",
            "reason": "R",
            "message": "",
            "lastTransitionTime": at,
        }
    ] * 2
    answer = jobs.replace(minimal_status(jobs.made(job()), conditions=twice), "/status")
    assert answer.code == 422
    assert 'status.conditions[1]: Duplicate value: {"type":"Running"}' in answer.body["message"]


def test_a_status_in_a_new_job_is_dropped(jobs: Jobs) -> None:
    assert "status" not in jobs.made({**job(), "status": {"attempt": 7}})


def test_scale_changes_nodes_and_shows_the_active_ones(apiserver: ApiServer, jobs: Jobs) -> None:
    jobs.replace(minimal_status(jobs.made(job(nodes=2)), nodes={"active": 2}), "/status")
    apiserver.kubectl("scale", "-n", jobs.namespace, "ddp/job", "--replicas=4")
    scale = apiserver.request("GET", f"{jobs.path}/job/scale").body
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (4, 2)
    assert jobs.get()["spec"]["nodes"] == 4


def test_scale_beyond_the_bounds_is_refused(apiserver: ApiServer, jobs: Jobs) -> None:
    jobs.made(job())
    refused = apiserver.kubectl(
        "scale", "-n", jobs.namespace, "ddp/job", "--replicas=0", check=False
    )
    assert "spec.nodes in body should be greater than or equal to 1" in refused.stderr


def test_scaling_to_a_size_that_cannot_work_is_refused(apiserver: ApiServer, jobs: Jobs) -> None:
    jobs.made(job(accelerator="trn1.32xlarge", nprocPerNode=8))
    refused = apiserver.kubectl(
        "scale", "-n", jobs.namespace, "ddp/job", "--replicas=2", check=False
    )
    assert PROCESS_COUNTS["trn1.32xlarge"] in refused.stderr


# -- the file itself


def test_the_crd_stays_readable() -> None:
    """Merge keys (`<<`) are not YAML 1.2, and many tools cannot read them."""
    assert "<<" not in CRD.read_text()


def test_every_field_is_described() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> Iterator[str]:
        for name, child in schema.get("properties", {}).items():
            if not child.get("description", "").endswith(".") and path + name != ".metadata":
                yield f"{path}{name}"
            yield from undescribed(child, f"{path}{name}.")
        for key in schema.keys() & {"items", "additionalProperties"}:
            yield from undescribed(schema[key], path)

    assert list(undescribed(SCHEMA, ".")) == []


def test_no_object_keeps_unknown_fields_where_equality_would_miss_a_renamed_key() -> None:
    def traps(schema: dict[str, Any], path: str) -> Iterator[str]:
        if schema.get("x-kubernetes-preserve-unknown-fields") and "type" in schema:
            yield path
        for name, child in schema.get("properties", {}).items():
            yield from traps(child, f"{path}.{name}")
        for key in schema.keys() & {"items", "additionalProperties"}:
            yield from traps(schema[key], path)

    # A rule refuses unknown fields of podTemplate.metadata. Its message says what to do.
    assert list(traps(SPEC, "spec")) == ["spec.podTemplate.metadata"]


# Fields of a pod missing in podTemplate, with the reason.
LEFT_OUT = {
    "PodSpec": {
        "ephemeralContainers": "not allowed when a pod is made",
        "hostnameOverride": "the operator owns the host name",
        "setHostnameAsFQDN": "the operator owns the host name",
        "os": "Linux it is",
        "overhead": "the RuntimeClass sets it",
        "preemptionPolicy": "the PriorityClass sets it",
        "priority": "the PriorityClass sets it",
        "readinessGates": "nobody would open them",
        "serviceAccount": "serviceAccountName's old name",
    },
    "Container": {
        "resizePolicy": "a training has one size",
        "restartPolicyRules": "containers of the gang do not restart alone",
        "stdin": "nobody is there",
        "stdinOnce": "nobody is there",
        "tty": "nobody is there",
    },
    "Volume": dict.fromkeys(
        [
            "awsElasticBlockStore",
            "azureDisk",
            "azureFile",
            "cephfs",
            "cinder",
            "fc",
            "flexVolume",
            "flocker",
            "gcePersistentDisk",
            "gitRepo",
            "glusterfs",
            "iscsi",
            "photonPersistentDisk",
            "portworxVolume",
            "quobyte",
            "rbd",
            "scaleIO",
            "storageos",
            "vsphereVolume",
        ],
        "reached through a claim or csi",
    ),
}
POD = SPEC["properties"]["podTemplate"]["properties"]["spec"]
DECLARED = {
    "PodSpec": POD,
    "Container": POD["properties"]["containers"]["items"],
    "Volume": POD["properties"]["volumes"]["items"],
    "EnvVar": SPEC["properties"]["env"]["items"],
    "EnvFromSource": SPEC["properties"]["envFrom"]["items"],
    "ResourceRequirements": SPEC["properties"]["resources"],
    "VolumeMount": SPEC["properties"]["volumeMounts"]["items"],
    "Toleration": SPEC["properties"]["tolerations"]["items"],
    "Affinity": SPEC["properties"]["affinity"],
    "TopologySpreadConstraint": SPEC["properties"]["topologySpreadConstraints"]["items"],
    "LocalObjectReference": SPEC["properties"]["imagePullSecrets"]["items"],
}


@pytest.mark.parametrize("shape", DECLARED)
def test_the_pod_shapes_are_those_of_the_newest_kubernetes(
    apiserver: ApiServer, shape: str
) -> None:
    """Compare all fields on the newest supported version.

    An older version lacks some, and a newer one has more. A job using a missing field is refused
    with a sentence. Other tests show this.
    """
    minor = int(apiserver.request("GET", "/version").body["minor"])
    schemas = apiserver.request("GET", "/openapi/v3/api/v1").body["components"]["schemas"]
    theirs = set(schemas[f"io.k8s.api.core.v1.{shape}"]["properties"])
    ours = set(DECLARED[shape]["properties"]) | set(LEFT_OUT.get(shape, {}))
    if minor <= NEWEST_MINOR:
        assert theirs <= ours
    if minor >= NEWEST_MINOR:
        assert ours <= theirs


def test_the_kinds_within_a_pod_are_those_of_the_newest_kubernetes(apiserver: ApiServer) -> None:
    minor = int(apiserver.request("GET", "/version").body["minor"])
    if minor != NEWEST_MINOR:
        pytest.skip(f"compares Kubernetes {NEWEST}")
    schemas = apiserver.request("GET", "/openapi/v3/api/v1").body["components"]["schemas"]
    theirs = {
        name.rpartition(".")[2]: {key: kind_in(field) for key, field in fields.items()}
        for name, schema in schemas.items()
        if (fields := schema.get("properties")) and name.startswith(("io.k8s.api.core", META))
    }
    assert kinds() == {kind: theirs[kind] for kind in kinds()}


META = "io.k8s.apimachinery.pkg.apis.meta.v1."


def kind_in(field: dict[str, Any]) -> str:
    """Return the kind of a field in a schema of OpenAPI, or an empty string."""
    found = re.search(r"'#/components/schemas/[\w.]*\.(\w+)'", str(field))
    return found[1] if found and found[1] in kinds() else ""


def test_a_field_that_the_crd_does_not_know_is_refused_by_both_validations(
    apiserver: ApiServer, namespace: str
) -> None:
    manifest = job(podTemplate={"spec": {"ofTomorrow": 1}})
    where = "spec.podTemplate.spec.ofTomorrow"
    answer = apiserver.kubectl(
        "apply", "-n", namespace, "-f", "-", stdin=yaml.dump(manifest), check=False
    )
    assert answer.returncode == 1
    assert f'unknown field "{where}"' in answer.stderr
    ours = f"{where}: unknown field (DDPJobs have the pod fields of Kubernetes {NEWEST})"
    with pytest.raises(SpecError, match=re.escape(ours)):
        refuse_unknown_fields(manifest["spec"])
