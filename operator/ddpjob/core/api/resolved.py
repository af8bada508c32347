"""The spec of a DDPJob as decisions and rendering read it: with everything filled in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ddpjob.core.api import profiles
from ddpjob.core.api.policy import FailurePolicy, Lifecycle
from ddpjob.core.api.readers import Dict, either, require_object
from ddpjob.core.api.recovery import Recovery, shared_volume
from ddpjob.core.api.requirements import read_setup, version_advice
from ddpjob.core.api.scheduling import Scheduling
from ddpjob.core.api.spec import (
    SETUP_TIME,
    Checkpoint,
    Written,
    find_unknown_fields,
    read_spec,
    refuse_unknown_fields,
)
from ddpjob.core.api.spec_rules import check_rules
from ddpjob.core.api.variables import pod_variables, variable_advice


@dataclass(frozen=True)
class Spec:
    """A user's request, with the defaults filled in.

    - `code`: the name of a ConfigMap, or empty. `setup`: a shell text, or empty. `nodes`: the size
      of the gang.
    - `nproc_per_node` and `devices` (extended resources of a pod, by name) are resolved: `auto` has
      become what the accelerator's profile gives.
    - torchrun is started by `command`, `torchrun_args`, the flags of the operator, and `args`.
      `python` is the interpreter of the agent; if empty, the agent uses torchrun's.
    - `fast_start`: torchrun and the workers are forks of a process that has imported torch.
    - `restricted`: the pods follow the Pod Security level restricted; None leaves the choice to the
      administrator.
    - `unknown_fields`: paths of fields ignored by this version. `unused_devices`: requested devices
      not used by the accelerator.
    """

    image: str
    args: tuple[str, ...]
    code: str = ""
    setup: str = ""
    setup_timeout: timedelta = SETUP_TIME
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
    scheduling: Scheduling = field(default_factory=Scheduling)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    pod_fields: Dict = field(default_factory=dict)
    pod_template: Dict = field(default_factory=dict)
    restricted: bool | None = None
    unknown_fields: tuple[str, ...] = ()
    unused_devices: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Any) -> "Spec":
        """Read a spec. Raises SpecError for the first wrong field.

        An unknown field is ignored, since a newer CRD may have it.
        """
        written = read_spec(data)
        check_rules(written)
        return _resolve(written, find_unknown_fields(data))

    @classmethod
    def from_user(cls, data: Any) -> "Spec":
        """Read a spec as a user wrote it. Raises SpecError also for an unknown field."""
        refuse_unknown_fields(require_object(data, "spec"))
        return cls.from_dict(data)

    @property
    def in_place(self) -> bool:
        return self.recovery[0] is Recovery.IN_PLACE

    @property
    def recovery(self) -> tuple[Recovery, str]:
        """Return whether pods stay for the next attempt, and what decides it."""
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
    def advice(self) -> tuple[str, ...]:
        """Return what to do about settings that are allowed, but are probably a mistake."""
        versions = version_advice(read_setup(self.setup).unpinned)
        return tuple(filter(None, (self.device_advice, self.variable_advice, versions)))

    @property
    def known_variables(self) -> frozenset[str] | None:
        """Return the variables of the container trainer; None if they are not known."""
        profile = profiles.catalog()[self.accelerator]
        own = (self.checkpoint, self.restricted, self.pod_fields, self.pod_template)
        return pod_variables(profile, *own)

    @property
    def variable_advice(self) -> str:
        """Return what to do about a variable that nothing expands, or an empty string."""
        words = (*self.command, *self.torchrun_args)
        return variable_advice(self.args, words, self.known_variables)

    @property
    def device_advice(self) -> str:
        """Return what to do about devices not used by the accelerator, or an empty string."""
        if not self.unused_devices:
            return ""
        device = self.unused_devices[0]
        return (
            f"spec.resources requests {device}, which accelerator {self.accelerator} does not use: "
            f"set spec.accelerator to {either(profiles.profiles_with(device))}, or remove it"
        )


def _resolve(written: Written, unknown_fields: tuple[str, ...]) -> Spec:
    gang = written.gang
    torchrun = gang.torchrun
    profile = profiles.catalog()[gang.accelerator]
    requested = gang.requested_processes
    resources = written.pod_fields.get("resources", {})
    return Spec(
        image=gang.image,
        args=gang.args,
        code=gang.code.config_map if gang.code else "",
        setup=gang.setup,
        setup_timeout=gang.setup_timeout,
        nodes=gang.nodes,
        nproc_per_node=profiles.resolve_processes(profile.name, requested, resources),
        accelerator=profile.name,
        devices=profiles.resolve_devices(profile.name, requested, resources),
        command=torchrun.command,
        torchrun_args=torchrun.args,
        python=torchrun.python,
        fast_start=profile.fast_start if gang.fast_start is None else gang.fast_start,
        rdzv_conf={key: str(setting) for key, setting in torchrun.rdzv_conf.items()},
        checkpoint=gang.checkpoint,
        scheduling=gang.scheduling,
        failure_policy=gang.failure_policy,
        lifecycle=written.lifecycle,
        pod_fields=written.pod_fields,
        pod_template=written.pod_template,
        restricted=None if gang.pod_security is None else gang.pod_security == "Restricted",
        unknown_fields=unknown_fields,
        unused_devices=profiles.unused_devices(profile.name, resources),
    )
