"""The DDPJob as frozen dataclasses, from and to the dicts of its manifest.

On a cluster the CRD has checked a spec before it gets here; on a laptop nobody has, so `Spec.from_dict` says in a
sentence what is wrong. Pod shapes (env, volumes, …) stay the plain dicts that Kubernetes defines.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ddpjob.core import names, profiles
from ddpjob.core.merge import MERGE_KEYS

Dict = Mapping[str, Any]

POD_FIELDS = (
    "imagePullPolicy",
    "imagePullSecrets",
    "env",
    "envFrom",
    "resources",
    "volumes",
    "volumeMounts",
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "serviceAccountName",
    "priorityClassName",
)
"""Fields of the spec that go into the pod as they are, in Kubernetes' own shapes."""

SPEC_FIELDS = (
    "nodes",
    "nprocPerNode",
    "accelerator",
    "image",
    "args",
    "podTemplate",
    "torchrun",
    "checkpoint",
    "failurePolicy",
    *POD_FIELDS,
)

OBJECT_FIELDS = ("resources", "nodeSelector", "affinity")
TEXT_FIELDS = ("imagePullPolicy", "serviceAccountName", "priorityClassName")
"""Shapes of pod fields; all the others are lists of objects."""

UNIQUE = ("volumes", "volumeMounts")
"""Lists in which Kubernetes would refuse two items of one merge key."""

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MOUNT_PATH = re.compile(r"/[^:]*[^:/][^:]*")
LAUNCHER_FLAG = re.compile(
    r"--(nn[odes]*|np[-_cdenopr]*|nod[-_aeknr]*|rd[-_a-z]*|stan[adelno]*|max[-_aerst]*|mas[-_adeoprt]*|local[-_]a[dr]*)(=.*)?",
    re.DOTALL,
)
"""What torchrun takes the last of: before the script it would undo what the operator sets.

--nnodes, --nproc-per-node, --node-rank, --rdzv-…, --standalone, --max-restarts, --master-… and --local-addr, whole or as short as
torchrun takes them. (By their letters, which a regular expression of the CRD's can tell: --nnodes-file is none of them.)
"""
RDZV_NAME, RDZV_VALUE = re.compile(r"[a-z_]+"), re.compile(r"[^,=\s]+")
OWNED_POD_FIELDS = ("restartPolicy", "hostname", "subdomain", "activeDeadlineSeconds")
OWNED_TRAINER_FIELDS = (
    "command",
    "args",
    "resources",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "restartPolicy",
)


class SpecError(ValueError):
    """A manifest that cannot become a job; the message says what is wrong and what to do."""


def _object(value: Any, where: str, known: tuple[str, ...] | None = None) -> Dict:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be an object, not {value!r}.")
    for key in value:
        if known is not None and key not in known:
            raise SpecError(f"{where} has no field {key!r}; it has {', '.join(sorted(known))}.")
    return value


def _number(value: Any, where: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecError(f"{where} must be a whole number from {low} to {high}, not {value!r}.")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise SpecError(f"{where} must be a text that is not empty, not {value!r}.")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise SpecError(
            f"{where} must be a list of at least one text (numbers in quotes), not {value!r}."
        )
    return tuple(value)


def _objects(value: Any, where: str) -> tuple[Dict, ...]:
    if not isinstance(value, list | type(None)) or not all(
        isinstance(item, Mapping) for item in value or ()
    ):
        raise SpecError(f"{where} must be a list of objects, not {value!r}.")
    return tuple(value or ())


def _refuse_reserved(env: Any, where: str) -> None:
    for item in _objects(env, where):
        name = str(item.get("name"))
        if name in names.RESERVED_VARIABLES or name.startswith(names.RESERVED_PREFIX):
            raise SpecError(
                f"{where} sets {name}, which torchrun gives to each process itself; leave it out."
            )


@dataclass(frozen=True)
class Checkpoint:
    """A PersistentVolumeClaim that every node mounts."""

    claim: str
    mount_path: str = "/checkpoints"

    @classmethod
    def from_dict(cls, data: Any) -> "Checkpoint | None":
        if data is None:
            return None
        fields = _object(data, "spec.checkpoint", ("claimName", "mountPath"))
        path = _text(fields.get("mountPath", "/checkpoints"), "spec.checkpoint.mountPath")
        if not MOUNT_PATH.fullmatch(path):
            raise SpecError(
                f"spec.checkpoint.mountPath must be an absolute path other than /, without ':', not {path!r}."
            )
        return cls(
            claim=_text(fields.get("claimName"), "spec.checkpoint.claimName"),
            mount_path=path.removesuffix("/"),
        )


@dataclass(frozen=True)
class FailurePolicy:
    """How many whole-gang restarts a job may cost: `max_restarts` for its own failures, `max_disruptions` for lost pods."""

    max_restarts: int = 3
    max_disruptions: int = 20

    @classmethod
    def from_dict(cls, data: Any) -> "FailurePolicy":
        fields = _object(data, "spec.failurePolicy", ("maxRestarts", "maxDisruptions"))
        return cls(
            max_restarts=_number(
                fields.get("maxRestarts", 3), "spec.failurePolicy.maxRestarts", 0, 2**31 - 1
            ),
            max_disruptions=_number(
                fields.get("maxDisruptions", 20), "spec.failurePolicy.maxDisruptions", 0, 2**31 - 1
            ),
        )


@dataclass(frozen=True)
class Spec:
    """What a user asked for. `nproc_per_node` None means auto: what the profile's devices give."""

    image: str
    args: tuple[str, ...]
    nodes: int = 1
    nproc_per_node: int | None = None
    accelerator: str = "cpu"
    command: tuple[str, ...] = ("torchrun",)
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    failure_policy: FailurePolicy = FailurePolicy()
    pod_fields: Dict = field(default_factory=dict)
    pod_template: Dict = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Any) -> "Spec":
        """Raises SpecError with a sentence for the first thing that is wrong."""
        fields = _object(data, "spec", SPEC_FIELDS)
        nproc = fields.get("nprocPerNode", "auto")
        torchrun = _object(fields.get("torchrun"), "spec.torchrun", ("command", "rdzvConf"))
        _refuse_reserved(fields.get("env"), "spec.env")
        accelerator = _text(fields.get("accelerator", "cpu"), "spec.accelerator")
        if accelerator not in profiles.catalog():
            raise SpecError(
                f"spec.accelerator {accelerator!r} is no profile; there are {', '.join(profiles.catalog())}."
            )
        nodes = _number(fields.get("nodes", 1), "spec.nodes", 1, 1000)
        processes = (
            None if nproc == "auto" else _number(nproc, "spec.nprocPerNode (or auto)", 1, 256)
        )
        if complaint := profiles.complaint(accelerator, nodes, processes):
            raise SpecError(complaint)
        checkpoint = Checkpoint.from_dict(fields.get("checkpoint"))
        pod_fields = {
            key: _pod_field(key, fields[key])
            for key in POD_FIELDS
            if fields.get(key) not in (None, "")
        }
        _refuse_mounts_at(checkpoint, pod_fields.get("volumeMounts", ()))
        return cls(
            image=_text(fields.get("image"), "spec.image"),
            args=_args(fields.get("args")),
            nodes=nodes,
            nproc_per_node=processes,
            accelerator=accelerator,
            command=_texts(torchrun.get("command", ["torchrun"]), "spec.torchrun.command"),
            rdzv_conf=_rdzv_conf(torchrun.get("rdzvConf")),
            checkpoint=checkpoint,
            failure_policy=FailurePolicy.from_dict(fields.get("failurePolicy")),
            pod_fields=pod_fields,
            pod_template=_pod_template(fields.get("podTemplate")),
        )

    @property
    def processes(self) -> int:
        """Processes a node."""
        return profiles.processes(
            self.accelerator, self.nproc_per_node, self.pod_fields.get("resources")
        )


def _pod_field(key: str, value: Any) -> Any:
    """The value as it is, once its shape is one that Kubernetes defines and that rendering can rely on."""
    where = f"spec.{key}"
    if key in TEXT_FIELDS:
        return _text(value, where)
    if key not in OBJECT_FIELDS:
        for item in _objects(value, where):
            _check_item(key, item, where)
        if key in UNIQUE:
            _refuse_twins(_objects(value, where), MERGE_KEYS[key], where)
        return list(_objects(value, where))
    for kind in ("limits", "requests") if key == "resources" else ():
        _object(_object(value, where).get(kind), f"{where}.{kind}")
    return _object(value, where)


def _check_item(key: str, item: Dict, where: str) -> None:
    """The few things in a list's item that YAML gets wrong most often."""
    for field_name in {
        "env": ("name",),
        "volumes": ("name",),
        "volumeMounts": ("name", "mountPath"),
    }.get(key, ()):
        _text(item.get(field_name), f"{where}'s {field_name}")
    if key == "env" and "valueFrom" not in item and not isinstance(item.get("value", ""), str):
        raise SpecError(
            f"{where}: the value of {item['name']} must be a text, {item['value']!r} is none; put it in quotes."
        )
    if key == "volumes":
        _refuse_our_volume(item, where)


def _refuse_twins(items: tuple[Dict, ...], key: str, where: str) -> None:
    names = [str(item.get(key)) for item in items]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise SpecError(f"{where} has several items whose {key} is {twins[0]}; leave one.")


def _refuse_our_volume(volume: Dict, where: str) -> None:
    if str(volume.get("name")).startswith("ddpjob-"):
        raise SpecError(
            f"{where}: the name {volume['name']} begins with ddpjob-, which is the operator's; choose another."
        )


def _args(value: Any) -> tuple[str, ...]:
    args = _texts(value, "spec.args")
    if LAUNCHER_FLAG.fullmatch(args[0]):
        raise SpecError(
            f"spec.args begins with {args[0]}, a flag of torchrun that the operator sets; begin with the script or -m, and "
            "use nodes, nprocPerNode, torchrun.rdzvConf and failurePolicy."
        )
    return args


def _refuse_mounts_at(checkpoint: Checkpoint | None, mounts: Iterable[Dict]) -> None:
    for path in (mount["mountPath"] for mount in mounts):
        if checkpoint and path.removesuffix("/") == checkpoint.mount_path:
            raise SpecError(
                f"spec.volumeMounts mounts {path}, where spec.checkpoint mounts its claim already; remove the mount or "
                "choose another path."
            )


def _rdzv_conf(data: Any) -> Mapping[str, str]:
    conf = _object(data, "spec.torchrun.rdzvConf")
    if "is_host" in conf:
        raise SpecError(
            "spec.torchrun.rdzvConf.is_host belongs to the operator: node 0 is the host; leave it out."
        )
    for key, value in conf.items():
        if not RDZV_NAME.fullmatch(str(key)):
            raise SpecError(
                f"spec.torchrun.rdzvConf takes names of a-z and '_', such as join_timeout, not {key!r}."
            )
        if not RDZV_VALUE.fullmatch(str(value)):
            where = f"spec.torchrun.rdzvConf.{key}"
            raise SpecError(
                f"{where} must be a number or a text without comma, '=' and space, not {value!r}."
            )
    return {str(key): str(value) for key, value in conf.items()}


def _pod_template(data: Any) -> Dict:
    template = _object(data, "spec.podTemplate", ("metadata", "spec"))
    metadata = _object(
        template.get("metadata"), "spec.podTemplate.metadata", ("labels", "annotations")
    )
    for kind in ("labels", "annotations"):
        for key in _object(metadata.get(kind), f"spec.podTemplate.metadata.{kind}"):
            if str(key).startswith(f"{names.GROUP}/"):
                raise SpecError(
                    f"spec.podTemplate.metadata.{kind} sets {key}, which belongs to the operator; leave it out."
                )
    pod = _object(template.get("spec"), "spec.podTemplate.spec")
    for key in OWNED_POD_FIELDS:
        if key in pod:
            raise SpecError(f"spec.podTemplate.spec.{key} belongs to the operator; leave it out.")
    for volume in _objects(pod.get("volumes"), "spec.podTemplate.spec.volumes"):
        _refuse_our_volume(volume, "spec.podTemplate.spec.volumes")
    for container in _objects(pod.get("containers"), "spec.podTemplate.spec.containers"):
        if container.get("name") == names.TRAINER:
            for key in OWNED_TRAINER_FIELDS:
                if key in container:
                    raise SpecError(
                        f"The container {names.TRAINER} of spec.podTemplate sets {key}, which belongs to the operator."
                    )
            _refuse_reserved(container.get("env"), "spec.podTemplate's env")
    return template


def time_to_text(moment: datetime) -> str:
    """RFC 3339 with whole seconds, as Kubernetes writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_from_text(text: Any) -> datetime | None:
    """The time that Kubernetes wrote, or None where there is none that can be read."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Nodes:
    """Pods of the current attempt. `ready`: the trainer runs; `active`: not ended yet."""

    desired: int = 0
    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Backoff:
    """`count` attempts in a row died young; nothing is created before `until`."""

    count: int = 0
    until: datetime | None = None


@dataclass(frozen=True)
class Status:
    """What the operator knows of a job and cannot see again. Attempts count from 0; None before the first.

    `attempt_started` is the latch: the newest attempt of which every pod was seen. From then on a missing pod of that
    attempt is a lost pod; before, it is one that still has to be created.
    `succeeded_nodes`: indices of the current attempt whose trainer ended well. Nothing is lost with their pods.
    """

    phase: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    conditions: tuple[Dict, ...] = ()
    attempt: int | None = None
    attempt_started: int | None = None
    attempt_time: datetime | None = None
    restarts: int = 0
    disruptions: int = 0
    nodes: Nodes = Nodes()
    succeeded_nodes: tuple[int, ...] = ()
    resolved: Dict = field(default_factory=dict)
    backoff: Backoff = Backoff()
    last_failure: Dict = field(default_factory=dict)
    start_time: datetime | None = None
    completion_time: datetime | None = None
    result: Mapping[str, str] = field(default_factory=dict)

    def has(self, condition: names.Condition) -> bool:
        return any(
            c.get("type") == condition and c.get("status") == "True" for c in self.conditions
        )

    @property
    def finished(self) -> bool:
        return self.has(names.Condition.COMPLETE) or self.has(names.Condition.FAILED)

    @classmethod
    def from_dict(cls, data: Any) -> "Status":
        """Never raises: what cannot be read counts as not there."""
        fields = data if isinstance(data, Mapping) else {}
        backoff, nodes = _mapping(fields.get("backoff")), _mapping(fields.get("nodes"))
        return cls(
            phase=str(fields.get("phase", "")),
            reason=str(fields.get("reason", "")),
            message=str(fields.get("message", "")),
            observed_generation=_count(fields.get("observedGeneration")),
            conditions=_mappings(fields.get("conditions")),
            attempt=_optional_count(fields.get("attempt")),
            attempt_started=_optional_count(fields.get("attemptStarted")),
            attempt_time=time_from_text(fields.get("attemptTime")),
            restarts=_count(fields.get("restarts")),
            disruptions=_count(fields.get("disruptions")),
            nodes=Nodes(**{name: _count(nodes.get(name)) for name in Nodes.__dataclass_fields__}),
            succeeded_nodes=_counts(fields.get("succeededNodes")),
            resolved=_mapping(fields.get("resolved")),
            backoff=Backoff(
                count=_count(backoff.get("count")), until=time_from_text(backoff.get("until"))
            ),
            last_failure=_mapping(fields.get("lastFailure")),
            start_time=time_from_text(fields.get("startTime")),
            completion_time=time_from_text(fields.get("completionTime")),
            result={str(k): str(v) for k, v in _mapping(fields.get("result")).items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """The status as the CRD has it; absent where there is nothing to say."""
        backoff = {
            "count": self.backoff.count,
            "until": self.backoff.until and time_to_text(self.backoff.until),
        }
        fields: dict[str, Any] = {
            "phase": self.phase,
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "conditions": [dict(c) for c in self.conditions],
            "attempt": self.attempt,
            "attemptStarted": self.attempt_started,
            "attemptTime": self.attempt_time and time_to_text(self.attempt_time),
            "restarts": self.restarts,
            "disruptions": self.disruptions,
            "nodes": {name: getattr(self.nodes, name) for name in Nodes.__dataclass_fields__},
            "nodesReady": f"{self.nodes.ready + self.nodes.succeeded}/{self.nodes.desired}",
            "succeededNodes": list(self.succeeded_nodes) or None,
            "resolved": dict(self.resolved),
            "backoff": _present(backoff) if self.backoff.count else {},
            "lastFailure": dict(self.last_failure),
            "startTime": self.start_time and time_to_text(self.start_time),
            "completionTime": self.completion_time and time_to_text(self.completion_time),
            "result": dict(self.result),
        }
        return _present(fields)


def _present(fields: Dict) -> dict[str, Any]:
    return {
        key: value
        for key, value in fields.items()
        if value is not None and value != {} and value != ""
    }


def _mapping(value: Any) -> Dict:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> tuple[Dict, ...]:
    return (
        tuple(item for item in value if isinstance(item, Mapping))
        if isinstance(value, list | tuple)
        else ()
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _counts(value: Any) -> tuple[int, ...]:
    return (
        tuple(item for item in value if isinstance(item, int))
        if isinstance(value, list | tuple)
        else ()
    )


def _optional_count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


@dataclass(frozen=True)
class Job:
    """A DDPJob as last seen. `spec` is None where it cannot be read, and `spec_error` then says why."""

    name: str
    namespace: str
    uid: str
    spec: Spec | None
    status: Status = Status()
    generation: int = 1
    deleting: bool = False
    spec_error: str = ""

    @classmethod
    def from_dict(cls, data: Dict) -> "Job":
        """Never raises for what an API server can hold."""
        metadata = _mapping(data.get("metadata"))
        job = cls(
            name=str(metadata.get("name", "")),
            namespace=str(metadata.get("namespace", "default")),
            uid=str(metadata.get("uid", "")),
            spec=None,
            status=Status.from_dict(data.get("status")),
            generation=_count(metadata.get("generation")),
            deleting=bool(metadata.get("deletionTimestamp")),
        )
        try:
            return replace(job, spec=Spec.from_dict(data.get("spec")))
        except SpecError as error:
            return replace(job, spec_error=str(error))


def check_name(name: Any) -> str:
    """The name, if a Service can carry it and the pods' addresses stay within 63 characters; raises SpecError."""
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name) or len(name) > names.MAX_JOB_NAME:
        raise SpecError(
            f"metadata.name {name!r} must be at most {names.MAX_JOB_NAME} lower-case letters, digits and dashes, "
            "begin with a letter and end with a letter or digit: it names the job's Service."
        )
    return name
