"""The status of a DDPJob: its parts, and its form in the manifest.

The status keeps what the operator knows about a job and cannot observe again. Each field declares
what it is; core/api/parts.py reads and writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ddpjob.core.api.conditions import Conditions, find_condition
from ddpjob.core.api.entries import NOT_AHEAD, clock, computed, entry, times
from ddpjob.core.api.history import (
    MAX_ATTEMPTS,
    MAX_NODES_LISTED,
    Backoff,
    EndedAttempt,
    FailedNode,
    LastFailure,
    Place,
    Retried,
    UnreachableNode,
    Yielding,
)
from ddpjob.core.api.names import MAX_NODES, Activity, Condition
from ddpjob.core.api.parts import Part, catch_up, differs, read, write

# Stray pods named in the status.
MAX_STRAYS = 10


@dataclass(frozen=True, slots=True)
class PodCounts(Part):
    """Pods of the current attempt, counted."""

    # It bounds loops over the nodes, so its limit holds even for a status changed by a person.
    desired: int = entry(0, "Pods of the attempt.", always=True, low=0, high=MAX_NODES)
    active: int = entry(
        0, "Pods of any attempt that have not ended.", progress=True, always=True, low=0
    )
    ready: int = entry(
        0,
        "Ready pods. Their workers have met those of the other pods.",
        progress=True,
        always=True,
        low=0,
    )
    succeeded: int = entry(0, "Succeeded pods.", progress=True, always=True, low=0)
    failed: int = entry(0, "Failed pods.", progress=True, always=True, low=0)


@dataclass(frozen=True, slots=True)
class Host(Part):
    """The node that hosts the rendezvous of an attempt.

    Without an address it is node 0, a new pod, found by its name.
    """

    index: int = entry(0, "Index of the node.", low=0)
    address: str = entry("", "IP address of its pod.")


@dataclass(frozen=True, slots=True)
class Attempt(Part):
    """The current attempt.

    Each attempt begins with a new object, so no field of the last attempt stays. What has to
    outlast the attempt is not here, or is passed to the new object in `begin_attempt`.
    """

    number: int | None = entry(
        None, "Number of the current attempt; the first is 0. Absent before the first.", low=0
    )
    start: datetime | None = entry(None, "Start of the attempt.", ahead=NOT_AHEAD)
    running_time: datetime | None = entry(
        None, "Time when all its nodes were first ready.", ahead=NOT_AHEAD
    )
    # From then on a missing pod is a lost pod. Before, it still has to be created.
    latched: bool = entry(False, "True once every pod of the attempt was seen.", internal=True)
    had_pods: bool = entry(False, "True once a pod of the job was seen.", internal=True)
    births: tuple[int, ...] = entry(
        (),
        "For each node, the attempt in which its pod was created. Absent if all pods are of the "
        "current attempt.",
        internal=True,
        low=0,
        items=MAX_NODES,
    )
    host: Host = entry(
        Host(),
        "Node with the rendezvous, if it is a pod of an earlier attempt.",
        internal=True,
    )
    # The pods of the attempt before get time for a checkpoint if they ran, or if it is not known.
    previous_ran: bool = entry(
        True,
        "False if the nodes of the attempt before were never ready all at once.",
        internal=True,
    )
    # The loss of their pods is no failure.
    succeeded_nodes: tuple[int, ...] = entry(
        (),
        "Indices of the nodes that have succeeded.",
        progress=True,
        internal=True,
        low=0,
        items=MAX_NODES,
    )
    undecided_since: datetime | None = clock(
        "Time when a failure of uncertain cause was first seen. It is judged 10 s later, or after "
        "a hang 20 s."
    )
    silent_since: datetime | None = clock(
        "Time since which pods of the gang run and are not ready. The attempt ends 120 s later.",
        progress=True,
    )
    starting_since: datetime | None = clock(
        "Time since which the attempt waits for all its nodes to be ready."
    )
    starting_seconds: int = entry(
        0,
        "Seconds for which the gang had waited for its nodes before, if it has not run since.",
        internal=True,
        low=0,
        long=True,
    )
    yielding: Yielding | None = entry(
        None,
        "Set while the job gives way to an older one that fits only in part too.",
        internal=True,
    )

    def born(self, index: int) -> int:
        """Return the attempt in which the pod of a node was, or is to be, created."""
        if index < len(self.births):
            return self.births[index]
        return self.number or 0


@dataclass(frozen=True, slots=True)
class UsedBudget(Part):
    """The restarts counted against the budgets of `failurePolicy`, and their newest times.

    There are as many times as a budget can need.
    """

    failures: int = entry(
        0,
        "Restarts after failures and hangs, limited by failurePolicy.maxRestarts.",
        always=True,
        low=0,
    )
    disruptions: int = entry(
        0,
        "Restarts after lost pods, limited by failurePolicy.maxDisruptions.",
        always=True,
        low=0,
    )
    announced: int = entry(
        0,
        "Restarts after announced disruptions: a drain, a taint, a pod of higher priority, or the "
        "shutdown of a node. failurePolicy.maxAnnouncedDisruptions limits them.",
        always=True,
        low=0,
    )
    failure_times: tuple[datetime, ...] = times(
        "Times of the newest restarts after failures, for windowSeconds."
    )
    disruption_times: tuple[datetime, ...] = times(
        "Times of the newest restarts after lost pods, for windowSeconds."
    )
    announced_times: tuple[datetime, ...] = times("The same for announced disruptions.")
    retried: Retried = entry(
        Retried(),
        "The spec.retries of the last beginning of the job, and the restarts used by then.",
        internal=True,
    )

    @property
    def restarts(self) -> int:
        return self.failures + self.disruptions + self.announced


@dataclass(frozen=True, slots=True)
class Account(Part):
    """Where the time of the job went, see core/decide/accounting.py."""

    activity: str = entry(
        "",
        "What the job does with its time: queued, starting, training or recovering.",
        progress=True,
    )
    since: datetime | None = entry(None, "Start of this activity.", progress=True, ahead=NOT_AHEAD)
    seconds: Mapping[str, int] = entry(
        dict,
        "Seconds of each activity before the current one. training begins with the first step or "
        "heartbeat of an attempt. This time is known at the end of the attempt. If it is not "
        "known, training begins when all workers have met. recovering lasts from the end of an "
        "attempt with training until training begins again.",
        progress=True,
        low=0,
        long=True,
    )

    @property
    @computed("Part of these seconds spent on training, such as 87%.")
    def goodput(self) -> str:
        return goodput(self.seconds)


@dataclass(frozen=True, slots=True)
class Resolved(Part):
    """What the current attempt has from the spec."""

    nproc_per_node: int = entry(0, "Processes per node.", low=0)
    world_size: int = entry(0, "Processes of all nodes.", low=0)
    accelerator: str = entry("", "Accelerator profile.")
    rendezvous: str = entry("", "Address of the rendezvous of the current attempt.")


@dataclass(frozen=True, slots=True)
class Status(Part):
    """The status of a job. What a person looks for comes first."""

    phase: str = entry(
        "",
        "Summary for people: Pending, Starting, Running, Restarting, Suspended, Complete or "
        "Failed.",
    )
    reason: str = entry("", "Reason for the phase, in one word.")
    message: str = entry("", "Reason for the phase, in one sentence.", progress=True)
    pods: PodCounts = entry(PodCounts(), "The pods of the current attempt, counted.", name="nodes")
    attempt: Attempt = entry(Attempt(), "The current attempt.")
    budget: UsedBudget = entry(UsedBudget(), "Counted restarts, by budget.")
    account: Account = entry(Account(), "Where the time of the job went.")
    last_failure: LastFailure = entry(LastFailure(), "First failure in the last failed attempt.")
    attempts: tuple[EndedAttempt, ...] = entry(
        (), "The last ten ended attempts, the newest first.", items=MAX_ATTEMPTS
    )
    failed_nodes: tuple[FailedNode, ...] = entry(
        (),
        "Kubernetes nodes with failed attempts within the last hour. From the second failure on, "
        "new pods avoid a node if another one fits.",
        items=MAX_NODES_LISTED,
    )
    backoff: Backoff = entry(Backoff(), "Wait after early failures.")
    result: Mapping[str, str] = entry(
        dict, "Result of rank 0, from $DDP_RESULT_FILE.", progress=True
    )
    resolved: Resolved = entry(Resolved(), "Values computed from the spec.")
    ignored_fields: tuple[str, ...] = entry(
        (), "Unknown fields of the spec. The operator ignores them."
    )
    start_time: datetime | None = entry(None, "Start of the first attempt.", ahead=NOT_AHEAD)
    completion_time: datetime | None = entry(None, "Time when the job became Complete or Failed.")
    conditions: Conditions = entry(
        (),
        "Running, Suspended, Complete, Failed and HangsDetected, in Kubernetes' own shape.",
        key="type",
    )
    observed_generation: int = entry(
        0, "The metadata.generation of the spec used for this status.", always=True, long=True
    )
    selector: str = entry("", "Label selector of the job's pods, for the scale subresource.")
    place: Place = entry(
        Place(), "The Workload with the job's request for room in a queue.", internal=True
    )
    active_since: datetime | None = clock(
        "Start of the active time, if the job has pods.", progress=True
    )
    active_seconds: int = entry(
        0, "Active time before that, in seconds.", internal=True, low=0, long=True
    )
    unreachable_nodes: tuple[UnreachableNode, ...] = entry(
        (),
        "Unreachable Kubernetes nodes of the job.",
        internal=True,
        items=MAX_NODES,
    )
    stray_pods: tuple[str, ...] = entry(
        (),
        "Pods owned by the job but not created for it. The operator ignores them.",
        internal=True,
        items=MAX_STRAYS,
    )

    @property
    @computed(
        "Number of ready or succeeded nodes, and of all nodes, such as 2/2.",
        always=True,
        after="message",
    )
    def nodes_ready(self) -> str:
        return f"{self.pods.ready + self.pods.succeeded}/{self.pods.desired}"

    @property
    @computed("All counted restarts, of every budget.", always=True, low=0, after="attempt")
    def restarts(self) -> int:
        return self.budget.restarts

    @classmethod
    def from_dict(cls, data: Any) -> "Status":
        """Read a status. Never raises: what cannot be read counts as absent."""
        return read(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """Return the status in the CRD's form; empty fields are absent."""
        return write(self)

    def has(self, kind: Condition) -> bool:
        """Return True if the condition is True."""
        condition = find_condition(self.conditions, kind)
        return condition is not None and condition.holds

    @property
    def finished(self) -> bool:
        return self.has(Condition.COMPLETE) or self.has(Condition.FAILED)

    def is_retried_by(self, retries: int) -> bool:
        """Return True if a job with this `spec.retries` has failed and is to be taken up again."""
        return self.has(Condition.FAILED) and retries > self.budget.retried.retries

    @property
    def exit_code(self) -> int:
        """Return 0 for a Complete job, and 1 for any other."""
        return 0 if self.has(Condition.COMPLETE) else 1


def goodput(seconds: Mapping[str, float]) -> str:
    """Return the part of a job's time spent on training, such as `87%`.

    The string is empty if none of these seconds was training.
    """
    training = seconds.get(Activity.TRAINING)
    if training is None:
        return ""
    return f"{int(100 * training / max(1, sum(seconds.values())))}%"


def at_clock(status: Status, now: datetime) -> Status:
    """Return a status as the operator reads it at `now`, without clocks ahead of that time.

    A future time was written before the clock was set back. The records of a finished job stay as
    they are.
    """
    if not status.finished:
        return catch_up(status, now)
    known = catch_up(status, now)
    return replace(
        status, unreachable_nodes=known.unreachable_nodes, active_since=known.active_since
    )


def starting_seconds(attempt: Attempt, now: datetime) -> int:
    """Return for how long the gang has waited for its nodes, in all its attempts in a row."""
    passed = now - attempt.starting_since if attempt.starting_since else timedelta(0)
    return attempt.starting_seconds + int(passed.total_seconds())


def is_transition(old: Status, new: Status) -> bool:
    """Return True if a change is more than progress and has to be written at once."""
    return differs(old, new)
