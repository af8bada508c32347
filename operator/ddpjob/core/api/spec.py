"""The spec of a DDPJob as frozen dataclasses, read from the dict of its manifest.

In a cluster the CRD has checked a spec before the operator reads it. On one machine only
`Spec.from_dict` checks it. Both refuse the same specs, which tests/apiserver compares.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob.core.api import launcher, profiles
from ddpjob.core.api.names import MAX_NODES
from ddpjob.core.api.pod_fields import POD_FIELDS, read_pod_fields, read_pod_template
from ddpjob.core.api.policy import FailurePolicy, Lifecycle
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    did_you_mean,
    either,
    normal_path,
    quoted,
    refuse,
    require_boolean,
    require_fields,
    require_integer,
    require_object,
    require_string,
)
from ddpjob.core.api.recovery import Recovery, shared_volume

MAX_PROCESSES = 256

MOUNT_PATH = re.compile(r"/[^:]*[^:/][^:]*")
RDZV_NAME = re.compile(r"[a-z_]+")
RDZV_VALUE = re.compile(r"[^,=\s]+")

# The fields that this operator knows, by the path of their object.
KNOWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "spec": (
        "nodes",
        "nprocPerNode",
        "accelerator",
        "image",
        "args",
        "podTemplate",
        "torchrun",
        "checkpoint",
        "failurePolicy",
        "suspend",
        "retries",
        "activeDeadlineSeconds",
        "startupDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "cleanPodPolicy",
        "managedBy",
        "hangTimeoutSeconds",
        "firstHeartbeatSeconds",
        "heartbeat",
        "recovery",
        "fastStart",
        "podSecurity",
        *POD_FIELDS,
    ),
    "spec.torchrun": ("command", "args", "python", "rdzvConf"),
    "spec.checkpoint": ("claimName", "mountPath"),
    "spec.failurePolicy": (
        "maxRestarts",
        "maxDisruptions",
        "maxAnnouncedDisruptions",
        "maxAttemptsWithoutProgress",
        "windowSeconds",
        "nonRetryableExitCodes",
    ),
    "spec.podTemplate": ("metadata", "spec"),
    "spec.podTemplate.metadata": ("labels", "annotations"),
}


@dataclass(frozen=True)
class Checkpoint:
    """A PersistentVolumeClaim that every node mounts."""

    claim: str
    mount_path: str = "/checkpoints"

    @classmethod
    def from_dict(cls, data: Any) -> "Checkpoint | None":
        if data is None:
            return None
        fields = require_fields(data, "spec.checkpoint")
        claim = require_string(fields.get("claimName"), "spec.checkpoint.claimName")
        path = require_string(fields.get("mountPath", cls.mount_path), "spec.checkpoint.mountPath")
        if not MOUNT_PATH.fullmatch(path):
            wanted = "an absolute path other than '/' and without ':'"
            raise refuse("spec.checkpoint.mountPath", wanted, path)
        return cls(claim, normal_path(path))

    def folder(self, job_name: str) -> str:
        """Return the folder of a job's checkpoints."""
        return f"{self.mount_path}/{job_name}"


@dataclass(frozen=True)
class Spec:
    """A user's request, with the defaults filled in.

    `nodes` is the size of the gang. `nproc_per_node` and `devices` (extended resources of a pod, by
    name) are resolved: `auto` has become what the accelerator's profile gives. `unknown_fields` are
    the paths of fields that this version ignores, and `unused_devices` are devices that the job
    requests and its accelerator does not use. torchrun is started by `command`, `torchrun_args`,
    the flags of the operator, and `args`. `python` is the interpreter of the agent; an empty one is
    that of torchrun. `fast_start`: torchrun and the workers are forks of a process that has
    imported torch. `restricted`: the pods follow the Pod Security level restricted; None leaves
    that to the administrator.
    """

    image: str
    args: tuple[str, ...]
    nodes: int = 1
    nproc_per_node: int = 1
    accelerator: str = profiles.DEFAULT
    devices: Mapping[str, int] = field(default_factory=dict)
    command: tuple[str, ...] = ("torchrun",)
    torchrun_args: tuple[str, ...] = ()
    python: str = ""
    fast_start: bool = False
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    pod_fields: Dict = field(default_factory=dict)
    pod_template: Dict = field(default_factory=dict)
    restricted: bool | None = None
    unknown_fields: tuple[str, ...] = ()
    unused_devices: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Any) -> "Spec":
        """Read a spec. Raises SpecError for the first field that is wrong."""
        fields = require_fields(data, "spec")
        torchrun = require_fields(fields.get("torchrun"), "spec.torchrun")
        command = launcher.read_command(torchrun.get("command", list(cls.command)))
        torchrun_args = launcher.read_flags(torchrun.get("args"), command)
        pod_fields = read_pod_fields(fields)
        checkpoint = Checkpoint.from_dict(fields.get("checkpoint"))
        _refuse_mount_at_checkpoint(checkpoint, pod_fields)
        accelerator = _read_accelerator(fields.get("accelerator", cls.accelerator))
        nodes = require_integer(fields.get("nodes", cls.nodes), "spec.nodes", 1, MAX_NODES)
        requested = _read_requested_processes(fields.get("nprocPerNode", "auto"))
        profiles.check_size(accelerator, nodes, requested)
        resources = pod_fields.get("resources", {})
        return cls(
            image=require_string(fields.get("image"), "spec.image"),
            args=launcher.read_args(fields.get("args"), command, torchrun_args),
            nodes=nodes,
            nproc_per_node=profiles.resolve_processes(accelerator, requested, resources),
            accelerator=accelerator,
            devices=profiles.resolve_devices(accelerator, requested, resources),
            command=command,
            torchrun_args=torchrun_args,
            python=_read_python(torchrun.get("python")),
            fast_start=_read_fast_start(fields.get("fastStart"), accelerator),
            rdzv_conf=_read_rdzv_conf(torchrun.get("rdzvConf")),
            checkpoint=checkpoint,
            failure_policy=FailurePolicy.from_dict(fields.get("failurePolicy")),
            lifecycle=Lifecycle.from_fields(fields),
            pod_fields=pod_fields,
            pod_template=read_pod_template(fields.get("podTemplate")),
            restricted=_read_pod_security(fields.get("podSecurity")),
            unknown_fields=find_unknown_fields(data),
            unused_devices=profiles.unused_devices(accelerator, resources),
        )

    @property
    def in_place(self) -> bool:
        return self.recovery[0] is Recovery.IN_PLACE

    @property
    def recovery(self) -> tuple[Recovery, str]:
        """Return whether pods stay for the next attempt, and what decides that."""
        if self.lifecycle.recovery:
            return self.lifecycle.recovery, "spec.recovery"
        if self.checkpoint:
            return Recovery.IN_PLACE, "default: with spec.checkpoint"
        volume = shared_volume(self.pod_fields, self.pod_template)
        if volume:
            return Recovery.IN_PLACE, f"default: with the shared volume {volume}"
        return Recovery.RECREATE, "default: without spec.checkpoint or a shared volume"

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    @property
    def device_advice(self) -> str:
        """Return what to do about devices that the accelerator does not use, or nothing."""
        if not self.unused_devices:
            return ""
        device = self.unused_devices[0]
        return (
            f"spec.resources requests {device}, which accelerator {self.accelerator} does not use: "
            f"set spec.accelerator to {either(profiles.profiles_with(device))}, or remove it"
        )


def find_unknown_fields(fields: Dict) -> tuple[str, ...]:
    """Return the paths of the fields of a spec that are not in KNOWN_FIELDS, sorted."""
    found = []
    for path, known in KNOWN_FIELDS.items():
        data: Dict = fields
        for key in path.split(".")[1:]:
            data = child(data, key)
        found += [f"{path}.{key}" for key in data if key not in known]
    return tuple(sorted(found))


def refuse_unknown_fields(paths: Iterable[str]) -> None:
    """Raise SpecError for a field that the operator would ignore, given its path."""
    for path in paths:
        # A user's key may have dots itself, as labels have.
        parent = max((p for p in KNOWN_FIELDS if path.startswith(f"{p}.")), key=len)
        key = path.removeprefix(f"{parent}.")
        known = KNOWN_FIELDS[parent]
        hint = did_you_mean(key, known) or f"; {parent} has {', '.join(sorted(known))}"
        raise SpecError(f"{path}: unknown field{hint}")


def _read_accelerator(value: Any) -> str:
    name = require_string(value, "spec.accelerator")
    known = profiles.catalog()
    if name not in known:
        hint = did_you_mean(name, known)
        raise SpecError(
            f"spec.accelerator: unknown profile {quoted(name)}{hint}; "
            f"the profiles are {', '.join(known)}"
        )
    return name


def _read_python(value: Any) -> str:
    return "" if value is None else require_string(value, "spec.torchrun.python")


def _read_fast_start(value: Any, accelerator: str) -> bool:
    default = profiles.catalog()[accelerator].fast_start
    return default if value is None else require_boolean(value, "spec.fastStart")


def _read_pod_security(value: Any) -> bool | None:
    if value not in (None, "None", "Restricted"):
        raise refuse("spec.podSecurity", "None or Restricted", value)
    return None if value is None else value == "Restricted"


def _read_requested_processes(value: Any) -> int | None:
    """Return the number of processes per node that was asked for, or None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, str):
        wanted = f"'auto' or an integer from 1 to {MAX_PROCESSES}"
        raise refuse("spec.nprocPerNode", wanted, value)
    return require_integer(value, "spec.nprocPerNode", 1, MAX_PROCESSES)


def _read_rdzv_conf(value: Any) -> Mapping[str, str]:
    where = "spec.torchrun.rdzvConf"
    conf = require_object(value, where)
    if "is_host" in conf:
        raise SpecError(
            f"{where}.is_host: is set by the operator, which chooses the host; remove it"
        )
    for key, setting in conf.items():
        if not RDZV_NAME.fullmatch(str(key)):
            raise refuse(where, "names of a-z and '_', such as join_timeout", key)
        if not RDZV_VALUE.fullmatch(str(setting)):
            wanted = "a number or a string without comma, '=' and space"
            raise refuse(f"{where}.{key}", wanted, setting)
    return {str(key): str(setting) for key, setting in conf.items()}


def _refuse_mount_at_checkpoint(checkpoint: Checkpoint | None, pod_fields: Dict) -> None:
    if checkpoint is None:
        return
    for mount in pod_fields.get("volumeMounts", ()):
        path = mount["mountPath"]
        if normal_path(path) == checkpoint.mount_path:
            raise SpecError(
                f"spec.volumeMounts: {path} is the mount path of spec.checkpoint; remove the mount "
                "or choose another path"
            )
