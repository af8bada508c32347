"""The spec of a DDPJob as it is written: the declaration of its fields.

The fields of `spec` stand in three groups, in the order of the CRD: Gang here, Lifecycle in
policy.py, and the fields with Kubernetes' own shapes in pod_fields.py. Rules across fields are in
spec_rules.py. Decisions read what resolved.py makes of them.

The CRD is written from these declarations. In a cluster, the API server has checked a spec by the
CRD before the operator reads it. On one machine only `read_spec` checks it. tests/apiserver
compares both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as declared

from ddpjob.core.api import profiles, shapes
from ddpjob.core.api.declare import (
    CONFIG,
    Bool,
    Change,
    Declared,
    Int,
    Items,
    OneOf,
    Seconds,
    Text,
    entry,
    fields_of,
    is_declared,
    read,
    type_of,
)
from ddpjob.core.api.foreign import instead_of
from ddpjob.core.api.names import MAX_NODES
from ddpjob.core.api.pod_fields import (
    POD_TEMPLATE,
    find_unknown_pod_fields,
    pod_field_names,
    read_pod_fields,
    read_pod_template,
)
from ddpjob.core.api.policy import FailurePolicy, Lifecycle
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    did_you_mean,
    normal_path,
    quoted,
    refuse,
    require_fields,
)
from ddpjob.core.api.scheduling import Scheduling

MAX_PROCESSES = 256

# The setup of a pod may take so long, unless the job says otherwise.
SETUP_TIME = timedelta(seconds=1800)

MOUNT_PATH = re.compile(r"/[^:]*[^:/][^:]*")
RDZV_NAME = re.compile(r"[a-z_]+")
RDZV_VALUE = re.compile(r"[^,=\t\n\v\f\r ]+")

Words = Items[Annotated[Text, Field(max_length=4096)]]


def _known_accelerator(name: str) -> str:
    known = profiles.catalog()
    if name not in known:
        raise SpecError(
            f"spec.accelerator: unknown profile {quoted(name)}{did_you_mean(name, known)}; "
            f"the profiles are {', '.join(known)}"
        )
    return name


def _absolute_path(path: str) -> str:
    if not MOUNT_PATH.fullmatch(path):
        raise ValueError("no mount path")
    return normal_path(path)


def _rdzv_name(name: Any) -> str:
    if not (isinstance(name, str) and RDZV_NAME.fullmatch(name)):
        wanted = "names of a-z and '_', such as join_timeout"
        raise refuse("spec.torchrun.rdzvConf", wanted, name)
    return name


def _rdzv_value(value: str) -> str:
    if not RDZV_VALUE.fullmatch(value):
        raise ValueError("no setting")
    return value


RdzvName = Annotated[Text, BeforeValidator(_rdzv_name)]
RdzvText = Annotated[Text, Field(max_length=256), AfterValidator(_rdzv_value)]
RdzvNumber = Annotated[Int, Field(ge=-shapes.MAX_INT64 - 1, le=shapes.MAX_INT64)]


@declared(frozen=True, slots=True, config=CONFIG)
class Torchrun(Declared):
    """How torchrun is started."""

    command: Words = entry(
        """Command to start torchrun, such as [python, -m, torch.distributed.run], or another
        launcher with the same flags.""",
        ("torchrun",),
        min_length=1,
        max_length=64,
    )
    args: Words = entry(
        """Flags of torchrun, such as [--monitor-interval, "1"]. They come before those of the
        operator and before spec.args. With another launcher, its flags.""",
        (),
        max_length=64,
    )
    python: Text = entry(
        """Python interpreter of the pod's agent. Without it, the agent runs with the interpreter of
        torchrun.""",
        "",
        min_length=1,
        max_length=4096,
    )
    rdzv_conf: Mapping[RdzvName, RdzvNumber | RdzvText] = entry(
        """Settings of the c10d rendezvous (--rdzv-conf), such as join_timeout in seconds.""",
        {},
        wanted="a number or a string without comma, '=' and space",
        max_length=64,
    )


@declared(frozen=True, slots=True, config=CONFIG)
class Checkpoint(Declared):
    """Claim for checkpoints, mounted by every attempt of the job.

    $DDP_CHECKPOINT_DIR is the job's folder in it.
    """

    claim: Text = entry(
        "Name of the PersistentVolumeClaim.", name="claimName", min_length=1, max_length=253
    )
    mount_path: Annotated[Text, AfterValidator(_absolute_path)] = entry(
        """Mount path of the claim. The job uses the folder <mountPath>/<name of the job>.""",
        "/checkpoints",
        wanted="an absolute path other than '/' and without ':'",
        max_length=1024,
    )

    def folder(self, job_name: str) -> str:
        """Return the folder of a job's checkpoints."""
        return f"{self.mount_path}/{job_name}"


@declared(frozen=True, slots=True, config=CONFIG)
class Code(Declared):
    """Code in the working directory of each attempt.

    Relative paths in args and in the script begin there. See `ddpjob submit --script`.
    """

    config_map: Text = entry(
        """Name of the ConfigMap. The agent unpacks its key code.zip. Without that key, each of its
        keys is a file.""",
        min_length=1,
        max_length=253,
    )


@declared(frozen=True, slots=True, config=CONFIG)
class Gang(Declared):
    """What a job runs, and on how many nodes."""

    nodes: Int = entry(
        """Number of pods, each with one torchrun agent. A change begins a new attempt and does not
        count as a restart.""",
        1,
        change=Change.ALWAYS,
        ge=1,
        le=MAX_NODES,
    )
    processes: Annotated[Int, Field(ge=1, le=MAX_PROCESSES)] | Literal["auto"] = entry(
        """Number of processes per node. With auto, the accelerator profile and the resources
        decide.""",
        "auto",
        name="nprocPerNode",
        wanted=f"'auto' or an integer from 1 to {MAX_PROCESSES}",
    )
    accelerator: Annotated[Text, AfterValidator(_known_accelerator), OneOf(profiles.catalog)] = (
        entry(
            "Accelerator profile. It sets devices, variables and tolerations.",
            profiles.DEFAULT,
            min_length=1,
        )
    )
    image: Text = entry(
        """Image with Python, torch and the script.""",
        min_length=1,
        max_length=1024,
    )
    args: Words = entry(
        """A script, or -m and a module, then its arguments. Flags of torchrun belong to
        torchrun.args.""",
        min_length=1,
        max_length=256,
    )
    code: Code | None = entry(default=None)
    setup: Text = entry(
        """Shell text, such as `pip install -r requirements.txt`. Each pod runs it once, in the
        container trainer and in the working directory, before torch is imported. It ends at the
        first failed command.""",
        "",
        min_length=1,
        max_length=16384,
    )
    setup_timeout: Seconds = entry(
        "The setup of a pod fails after so many seconds.",
        SETUP_TIME,
        name="setupTimeoutSeconds",
        ge=timedelta(seconds=1),
        le=timedelta(days=1),
    )
    torchrun: Torchrun = entry(default=Torchrun())
    checkpoint: Checkpoint | None = entry(default=None)
    scheduling: Scheduling = entry(default=Scheduling(), change=Change.SUSPENDED)
    failure_policy: FailurePolicy = entry(default=FailurePolicy(), change=Change.ALWAYS)
    fast_start: Bool | None = entry(
        """Whether torchrun and the workers of a pod are forks of one process with torch already
        imported. This saves seconds at each start. The accelerator's profile has the default: true
        with cpu.""",
        None,
    )
    pod_security: Literal["None", "Restricted"] | None = entry(
        """With Restricted, the pods pass the Pod Security level restricted and run as user 1000.
        With None, the image decides the user. The default is the administrator's choice. A change
        concerns pods created later.""",
        None,
        change=Change.ALWAYS,
    )

    @property
    def requested_processes(self) -> int | None:
        """Return the requested number of processes per node, or None for `auto`."""
        return None if isinstance(self.processes, str) else self.processes


@dataclass(frozen=True)
class Written:
    """The spec of a job as it is written, with the defaults of its fields."""

    gang: Gang
    lifecycle: Lifecycle
    pod_fields: Dict
    pod_template: Dict


# The declared groups of the fields of `spec`, in order. The pod fields follow them.
GROUPS = (Gang, Lifecycle)


def read_spec(data: Any) -> Written:
    """Read a spec. Raises SpecError for the first wrong field, in order of declaration."""
    fields = require_fields(data, "spec")
    return Written(
        gang=read(Gang, fields, "spec"),
        lifecycle=read(Lifecycle, fields, "spec"),
        pod_fields=read_pod_fields(fields),
        pod_template=read_pod_template(fields.get("podTemplate")),
    )


@cache
def known_fields() -> Mapping[str, tuple[str, ...]]:
    """Return the fields known to this version, by the path of their object."""
    found: dict[str, tuple[str, ...]] = {"spec": ()}
    for group in GROUPS:
        _add_fields(found, group, "spec")
    template = shapes.shapes()[POD_TEMPLATE]["properties"]
    found["spec"] += (*pod_field_names(), POD_TEMPLATE)
    found[f"spec.{POD_TEMPLATE}"] = tuple(template)
    found[f"spec.{POD_TEMPLATE}.metadata"] = tuple(template["metadata"]["properties"])
    return found


def _add_fields(found: dict[str, tuple[str, ...]], kind: type[Any], where: str) -> None:
    fields = fields_of(kind)
    found[where] = (*found.get(where, ()), *fields)
    for name, info in fields.items():
        if is_declared(type_of(info)):
            _add_fields(found, type_of(info), f"{where}.{name}")


def find_unknown_fields(fields: Dict) -> tuple[str, ...]:
    """Return the sorted paths of a spec's fields that this version would ignore."""
    found = []
    for path, known in known_fields().items():
        data: Dict = fields
        for key in path.split(".")[1:]:
            data = child(data, key)
        found += [f"{path}.{key}" for key in data if key not in known]
    return tuple(sorted(found))


def refuse_unknown_fields(fields: Dict) -> None:
    """Raise SpecError for the first unknown field of a spec, also within pod fields."""
    for path in find_unknown_fields(fields):
        # A user's key may have dots itself, as labels have.
        parent = max((p for p in known_fields() if path.startswith(f"{p}.")), key=len)
        key = path.removeprefix(f"{parent}.")
        known = known_fields()[parent]
        hint = instead_of(path) or did_you_mean(key, known)
        hint = hint or f"; {parent} has {', '.join(sorted(known))}"
        raise SpecError(f"{path}: unknown field{hint}")
    for sentence in find_unknown_pod_fields(fields):
        raise SpecError(sentence)
