"""The schedulers that start a gang whole or not at all, and their PodGroups.

Each API has a row, and its fields are known only here. A PodGroup says how many pods must fit
together, and each pod names its group.

Sources: KEP-4671 (Kubernetes itself, scheduling.k8s.io/v1beta1 of Kubernetes 1.37), Volcano's
PodGroup (scheduling.volcano.sh/v1beta1) and the PodGroup of the plugin coscheduling of
scheduler-plugins (scheduling.x-k8s.io/v1alpha1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from ddpjob.core.api import names
from ddpjob.core.api.owned import owned_metadata, owner_of
from ddpjob.core.api.readers import Dict, child, children, integer_or_none, mapping_or_empty

# The name of the scheduler of Kubernetes itself.
DEFAULT_SCHEDULER = "default-scheduler"


class GangChoice(StrEnum):
    """The values of spec.scheduling.gang. The last ones are names of rows."""

    AUTO = "Auto"
    OFF = "Off"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"


Path = tuple[str, ...]


@dataclass(frozen=True)
class Backend:
    """A kind of PodGroups. Paths lead to fields, from the top of an object.

    - `count`: the number of pods that must fit together.
    - `of_pod`: the field in which a pod names its group.
    - `schedulers`: the schedulers for the kind. Pods without a scheduler get the first one.
    - `fixed`: fields of each group. `priority`: the name of its PriorityClass.
    - `topology`: the constraint to run all pods in one domain.
    - `queue`: the name of a queue. A pod has it in the annotation `queue_of_pod`.
    - `waits`: type and status of a condition. Its message says why the gang waits.
    - `scheduled`: type and status of the condition for the end of the wait.
    """

    name: str
    group: str
    version: str
    count: Path
    of_pod: Path
    schedulers: tuple[str, ...] = ()
    fixed: Mapping[Path, Any] | None = None
    priority: Path = ()
    topology: Path = ()
    queue: Path = ()
    queue_of_pod: str = ""
    waits: tuple[str, str] = ("", "")
    scheduled: tuple[str, str] = ("", "")

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    def knows(self, scheduler: str) -> bool:
        return not scheduler or not self.schedulers or scheduler in self.schedulers


NATIVE = Backend(
    name="Kubernetes",
    group="scheduling.k8s.io",
    version="v1beta1",
    count=("spec", "schedulingPolicy", "gang", "minCount"),
    of_pod=("spec", "schedulingGroup", "podGroupName"),
    schedulers=(DEFAULT_SCHEDULER,),
    # By default, preemption would take single pods, and the rest of the gang would wait for them.
    fixed={("spec", "disruptionMode", "all"): {}},
    priority=("spec", "priorityClassName"),
    topology=("spec", "schedulingConstraints", "topology"),
    waits=("PodGroupInitiallyScheduled", "False"),
)

BACKENDS = (
    NATIVE,
    Backend(
        name=GangChoice.VOLCANO,
        group="scheduling.volcano.sh",
        version="v1beta1",
        count=("spec", "minMember"),
        of_pod=("metadata", "annotations", "scheduling.k8s.io/group-name"),
        schedulers=("volcano",),
        priority=("spec", "priorityClassName"),
        queue=("spec", "queue"),
        queue_of_pod="scheduling.volcano.sh/queue-name",
        waits=("Unschedulable", "True"),
        # Volcano adds this one, and leaves the other as it was.
        scheduled=("Scheduled", "True"),
    ),
    Backend(
        name=GangChoice.COSCHEDULING,
        group="scheduling.x-k8s.io",
        version="v1alpha1",
        count=("spec", "minMember"),
        of_pod=("metadata", "labels", "scheduling.x-k8s.io/pod-group"),
    ),
)

BY_NAME = {backend.name: backend for backend in BACKENDS}


class GroupName(NamedTuple):
    """The group of a pod: the name of a row, and the name of the PodGroup."""

    backend: str
    name: str


@dataclass(frozen=True, slots=True)
class PodGroup:
    """What the operator keeps of a PodGroup.

    - `is_near`: it keeps its pods in one domain of a topology.
    - `waits`: why its gang waits for nodes, in the words of the scheduler, or empty.
    """

    backend: str
    name: str
    namespace: str
    uid: str
    job_name: str
    job_uid: str
    count: int
    is_near: bool
    waits: str

    @property
    def id(self) -> GroupName:
        return GroupName(self.backend, self.name)


def group_of_pod(body: Dict) -> GroupName | None:
    """Return the group named by a pod, or None."""
    for backend in BACKENDS:
        name = _value_at(body, backend.of_pod)
        if isinstance(name, str) and name:
            return GroupName(backend.name, name)
    return None


def read_pod_group(body: Dict) -> PodGroup | None:
    """Return what is kept of a PodGroup; None for one that no DDPJob owns."""
    metadata = child(body, "metadata")
    backend = _backend_of(str(body.get("apiVersion", "")))
    owner = owner_of(body)
    if owner is None or backend is None:
        return None
    return PodGroup(
        backend=backend.name,
        name=str(metadata.get("name")),
        namespace=str(metadata.get("namespace")),
        uid=str(metadata.get("uid")),
        job_name=owner.name,
        job_uid=owner.uid,
        count=integer_or_none(_value_at(body, backend.count)) or 0,
        # Without a gate of its own, the API server drops the field.
        is_near=bool(backend.topology and _value_at(body, backend.topology)),
        waits=_why_it_waits(body, backend),
    )


def _backend_of(api_version: str) -> Backend | None:
    return next((one for one in BACKENDS if one.api_version == api_version), None)


def _why_it_waits(body: Dict, backend: Backend) -> str:
    """Return the message of the newest condition about nodes, if it says that the gang waits."""
    found = [
        (str(condition.get("lastTransitionTime") or ""), which, condition)
        for condition in children(child(body, "status"), "conditions")
        for which in (backend.waits, backend.scheduled)
        if (condition.get("type"), condition.get("status")) == which
    ]
    if not found:
        return ""
    _, which, condition = max(found, key=lambda one: one[0])
    return str(condition.get("message") or "") if which == backend.waits else ""


@dataclass(frozen=True)
class GangRequest:
    """What a PodGroup asks for: `count` pods together, and all in one domain of `topology`."""

    backend: Backend
    count: int
    topology: str = ""


def new_pod_group(owner: names.Identity, attempt: int, wanted: GangRequest, pod: Dict) -> Dict:
    """Return the PodGroup of a job's new pods. `pod` is one of them, with all its fields."""
    backend = wanted.backend
    pod_spec = child(pod, "spec")
    annotations = child(child(pod, "metadata"), "annotations")
    values: dict[Path, Any] = {backend.count: wanted.count, **(backend.fixed or {})}
    values[backend.priority] = pod_spec.get("priorityClassName")
    values[backend.queue] = annotations.get(backend.queue_of_pod)
    values[backend.topology] = [{"key": wanted.topology}] if wanted.topology else None
    body: dict[str, Any] = {
        "apiVersion": backend.api_version,
        "kind": "PodGroup",
        "metadata": owned_metadata(owner, names.group_name(owner.name, attempt)),
    }
    for path, value in values.items():
        if path and value is not None:
            _set_at(body, path, value)
    return body


def new_count(backend: Backend, count: int) -> Dict:
    """Return the change of a PodGroup to another number of pods."""
    change: dict[str, Any] = {}
    _set_at(change, backend.count, count)
    return change


def add_group(pod: dict[str, Any], group: GroupName) -> None:
    """Put a pod into its group."""
    backend = BY_NAME[group.backend]
    _set_at(pod, backend.of_pod, group.name)
    scheduler = next(iter(backend.schedulers), "")
    if scheduler and scheduler != DEFAULT_SCHEDULER:
        pod["spec"].setdefault("schedulerName", scheduler)


def _value_at(body: Any, path: Sequence[str]) -> Any:
    *parents, last = path
    for key in parents:
        body = mapping_or_empty(body).get(key)
    return mapping_or_empty(body).get(last)


def _set_at(body: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, last = path
    for key in parents:
        body = body.setdefault(key, {})
    body[last] = value
