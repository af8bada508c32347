"""A plan: the status that a job should have, and what to create and delete once it is written.

May import `core.api`.
"""

from dataclasses import dataclass

from ddpjob.core.api.status import Status, is_transition

# Longest message in a status, a condition or an event, in characters. The API server limits those
# of conditions and events.
MAX_MESSAGE = 1024

# What a person can do after a job has failed.
NEXT_STEP = "correct the cause, then raise spec.retries"


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
    """A pod that gets the assignment of the current attempt.

    - `grace`: seconds for the processes of the last attempt to end.
    - `start`: the processes of the attempt may start at once.
    - `ready_since`: since when the pod was ready in the last attempt.
    - `dump`: write the stacks of the ranks, and end.
    """

    name: str
    uid: str
    index: int
    grace: float
    start: bool
    ready_since: str
    dump: bool = False


@dataclass(frozen=True)
class Question:
    """A pod whose agent is asked for its state, and the attempt that the question is about."""

    name: str
    uid: str
    address: str
    attempt: int


@dataclass(frozen=True)
class Event:
    """A Kubernetes event. `kind` is Normal or Warning."""

    kind: str
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The next actions for a job.

    - `status`: the status to write before anything else.
    - `create`: indices of the pods to create, of the attempt `status.attempt`.
    - `assign`: the pods that stay and get the assignment of the attempt.
    - `delete`: the pods to delete.
    - `events`: the events to post.
    - `delete_job`: delete the job itself, with everything that it owns.
    - `confirm`: names of pods. If the API server still has one of them, the plan is discarded.
    - `ask`: the pods whose agents are asked. The next look has their answers.
    - `check_agent`: make sure that the ConfigMap with the agent exists.
    - `wake_after`: seconds after which to decide again, even if nothing changes.
    """

    status: Status
    create: tuple[int, ...] = ()
    assign: tuple[Assign, ...] = ()
    delete: tuple[Delete, ...] = ()
    events: tuple[Event, ...] = ()
    delete_job: bool = False
    confirm: tuple[str, ...] = ()
    ask: tuple[Question, ...] = ()
    check_agent: bool = False
    wake_after: float | None = None

    def only_reports_progress(self, before: Status) -> bool:
        """Return True if nothing depends on this plan's status, so that it may be written later."""
        if self.create or self.assign or self.delete or self.delete_job:
            return False
        return not is_transition(before, self.status)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
