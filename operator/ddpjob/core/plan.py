"""A plan: the new status of a job, and what to create and delete once it is written.

May import `core.api`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Self

from ddpjob.core.api.kueue import Workload
from ddpjob.core.api.status import Status, is_transition

# Longest message in a status, a condition or an event, in characters. The API server limits those
# of conditions and events.
MAX_MESSAGE = 1024

# What a person can do after a job has failed.
NEXT_STEP = "correct the cause, then raise spec.retries"


class Owned(StrEnum):
    """The kinds of objects created for a job and owned by it, in their order.

    Each row has the kind, and its group, version and plural in the API. `core/render/templates` has
    the shape of each.
    """

    group: str
    version: str
    plural: str

    def __new__(cls, kind: str, group: str, version: str, plural: str) -> Self:
        owned = str.__new__(cls, kind)
        owned._value_ = kind
        owned.group, owned.version, owned.plural = group, version, plural
        return owned

    SERVICE = "Service", "", "v1", "services"
    POD = "Pod", "", "v1", "pods"


@dataclass(frozen=True)
class Create:
    """An object to create. Its body is rendered when it is created, because it may be large.

    `index` is the node of a pod; None for an object shared by all pods.
    """

    kind: Owned
    index: int | None = None


@dataclass(frozen=True)
class Delete:
    """A pod to delete, by UID.

    `grace` is in seconds; None takes the pod's own grace period. `forced` says why the pod is
    removed without its kubelet's answer, for an event. `node` is then its Kubernetes node.
    """

    name: str
    uid: str
    grace: int | None = None
    forced: str = ""
    node: str = ""


@dataclass(frozen=True)
class Assign:
    """The assignment of the current attempt to a pod.

    - `grace`: seconds for the processes of the last attempt to end.
    - `start`: the processes of the attempt may start at once.
    - `ready_since`: since when the pod was ready in the last attempt; None leaves it as it is.
    - `time`: when it was given first. `copies`: how often it was written again.
    - `dump`: write the stacks of the ranks, and end.
    """

    name: str
    uid: str
    index: int
    grace: float
    start: bool
    ready_since: str | None
    time: datetime
    copies: int = 0
    dump: bool = False


@dataclass(frozen=True)
class Question:
    """A question to the agent of a pod about its state in an attempt."""

    name: str
    uid: str
    address: str
    attempt: int
    path: str


class PlaceAction(StrEnum):
    """An action on a Workload, the request of a job for room in a queue.

    - CREATE: ask for room. REMOVE: ask no more. FINISH: the job has finished.
    - GIVE_BACK: Kueue has taken the room back, and no pod uses it any more.
    - READY, NOT_READY: the workers of all pods have met, or an attempt has ended.
    """

    CREATE = "create"
    REMOVE = "remove"
    FINISH = "finish"
    GIVE_BACK = "give back"
    READY = "ready"
    NOT_READY = "not ready"

    @property
    def frees_room(self) -> bool:
        return self in (PlaceAction.REMOVE, PlaceAction.FINISH, PlaceAction.GIVE_BACK)


@dataclass(frozen=True)
class PlaceStep:
    """An action and its Workload; None if the Workload is to be created."""

    action: PlaceAction
    workload: Workload | None = None


@dataclass(frozen=True)
class Event:
    """A Kubernetes event. `kind` is Normal or Warning."""

    kind: str
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The next actions for a job, in the order in which they are carried out.

    - `confirm`: names of pods. If the API server still has one of them, the plan is discarded.
    - `confirm_nodes`: names of Kubernetes nodes whose state has to be as the operator knows it.
    - `check_agent`: make sure that the ConfigMap with the agent exists.
    - `status`: the status to write before any other object.
    - `delete_job`: delete the job itself, with all its objects. Nothing else is done then.
    - `assign`: the assignments of the attempt to kept pods.
    - `join_queue`: the job gets the label of this queue.
    - `create`: the objects to create, of the attempt `status.attempt.number`. Those of one kind are
      created side by side, once those before them exist.
    - `delete`: the pods to delete.
    - `place`: what is done with the job's Workload, after all else.
    - `events`: the events to post.

    In addition:

    - `ask`: the pods whose agents are asked. The next look has their answers.
    - `wake_after`: seconds after which to decide again, even if nothing changes.
    """

    status: Status
    confirm: tuple[str, ...] = ()
    confirm_nodes: tuple[str, ...] = ()
    check_agent: bool = False
    delete_job: bool = False
    join_queue: str = ""
    assign: tuple[Assign, ...] = ()
    create: tuple[Create, ...] = ()
    delete: tuple[Delete, ...] = ()
    place: PlaceStep | None = None
    events: tuple[Event, ...] = ()
    ask: tuple[Question, ...] = ()
    wake_after: float | None = None

    @property
    def new_pods(self) -> tuple[int, ...]:
        """Return the indices of the pods to create."""
        return tuple(create.index for create in self.create if create.index is not None)

    def only_reports_progress(self, before: Status) -> bool:
        """Return True if nothing depends on this plan's status, so it may be written later."""
        changes = (self.create, self.assign, self.delete, self.delete_job, self.join_queue)
        if any(changes) or self.place:
            return False
        return not is_transition(before, self.status)


def create_gang(indices: Iterable[int]) -> tuple[Create, ...]:
    """Return the objects to create for a gang without the pods of these nodes."""
    shared = (Create(kind) for kind in Owned if kind is not Owned.POD)
    pods = (Create(Owned.POD, index) for index in indices)
    return (*shared, *pods)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
