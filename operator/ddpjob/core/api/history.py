"""The records in a status: ended attempts, back-off, and Kubernetes nodes with trouble.

People read the attempts. The budgets and the windows have their own fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob.core.api.entries import NOT_AHEAD, REQUIRED, entry
from ddpjob.core.api.parts import Part

# Ended attempts kept in the status, and the characters of each message.
MAX_ATTEMPTS = 10
MAX_ATTEMPT_MESSAGE = 256

# The first and the last step of an attempt, as the training counts them.
Steps = tuple[int, int]

# From this many failures on, the next attempts avoid a node, until it had none for so long.
SICK_AFTER = 2
SICK_TIME = timedelta(hours=1)

# Nodes in one list of the status.
MAX_NODES_LISTED = 32

# How long a gang waits for an older one after giving its room back.
YIELD_TIME = timedelta(minutes=10)

# Seconds of back-off. There is no wait after the first early failure in a row.
FIRST_DELAY = 10
LONGEST_DELAY = 300


@dataclass(frozen=True, slots=True)
class FailedNode(Part):
    """A Kubernetes node with failed attempts of the job: their number, and the last one's time."""

    name: str = entry(REQUIRED, "Name of the node.")
    failures: int = entry(REQUIRED, "Failed attempts there.", low=0)
    time: datetime = entry(REQUIRED, "Time of the last one.", ahead=NOT_AHEAD)

    @property
    def is_avoided(self) -> bool:
        return self.failures >= SICK_AFTER


@dataclass(frozen=True, slots=True)
class UnreachableNode(Part):
    """A Kubernetes node that the control plane cannot reach, and when this was first seen."""

    name: str = entry(REQUIRED, "Name of the node.")
    since: datetime = entry(REQUIRED, "Time when the operator first saw this.", ahead=NOT_AHEAD)
    uid: str = entry(
        "",
        "UID of the node, to tell it from a later one of the same name. Absent if it was gone.",
    )


@dataclass(frozen=True, slots=True)
class OlderGang:
    """An older job that a younger one gives way to. `name` is empty in another namespace."""

    uid: str
    name: str

    def __str__(self) -> str:
        return f"the older job {self.name}" if self.name else "an older job of another namespace"


@dataclass(frozen=True, slots=True)
class Yielding(Part):
    """The wait of a job that gave its pods back for an older one: the older job, and the end."""

    to: str = entry(REQUIRED, "UID of the older job.")
    until: datetime = entry(REQUIRED, "End of the wait.", ahead=YIELD_TIME)


@dataclass(frozen=True, slots=True)
class Backoff(Part):
    """A wait before the next attempt."""

    count: int = entry(0, "Early failures in a row.", low=0)
    until: datetime | None = entry(
        None, "Earliest start of the next attempt.", ahead=timedelta(seconds=LONGEST_DELAY)
    )

    def at_least(self, until: datetime) -> "Backoff":
        """Return a back-off that ends at `until` or later."""
        return replace(self, until=max(self.until or until, until))


@dataclass(frozen=True, slots=True)
class Retried(Part):
    """The `spec.retries` of the job's last beginning, and the restarts used by then."""

    retries: int = entry(0, "spec.retries of that beginning.", low=0)
    failures: int = entry(0, "Failures by then.", low=0)
    disruptions: int = entry(0, "Disruptions by then.", low=0)
    announced: int = entry(0, "Announced disruptions by then.", low=0)


@dataclass(frozen=True, slots=True)
class Place(Part):
    """The place of a job in a queue: the Workload that asks for its room.

    The number is written before the Workload is created, and gives it its name.
    """

    number: int = entry(0, "Number of the Workload; the first is 1.", low=0)
    uid: str = entry("", "UID of the Workload, once its room was given to the job.")


@dataclass(frozen=True, slots=True)
class AttemptEnd(Part):
    """Why an attempt has ended, and where."""

    attempt: int | None = entry(None, "Number of the attempt.", low=0)
    cause: str = entry(
        "",
        "Failure, Hang, Disruption, NotResumed, Rendezvous, Resized, Suspended, Yielded, Stopped "
        "or Succeeded.",
    )
    reason: str = entry("", "Reason in one word.")
    message: str = entry("", "Reason in one sentence, with the script's own exception.")
    node: str = entry("", "Kubernetes node of the pod.")
    pod: str = entry("", "Pod in which the attempt ended.")
    rank: int | None = entry(None, "Global rank of the process that failed first.", low=0)
    exit_code: int | None = entry(
        None, "Exit code of that process. A negative value is a signal number."
    )


@dataclass(frozen=True, slots=True)
class LastFailure(AttemptEnd):
    """The first failure in the last failed attempt."""

    time: datetime | None = entry(None, "Time of the failure.")


@dataclass(frozen=True, slots=True)
class EndedAttempt(AttemptEnd):
    """An attempt in the history: its end, its times and its steps."""

    start: datetime | None = entry(None, "Start of the attempt.")
    running_time: datetime | None = entry(None, "Time when all its nodes were first ready.")
    training_time: datetime | None = entry(
        None,
        "Time of its first step or heartbeat, as an agent has reported it at the end of a pod.",
    )
    untrained_seconds: int | None = entry(
        None,
        "Seconds from runningTime to trainingTime, or to the end if the script failed at its "
        "start. They count as starting, not as training.",
        low=0,
        long=True,
    )
    end: datetime | None = entry(None, "End of the attempt.")
    first_step: int | None = entry(
        None, "First step of the training in the attempt, if the output has it.", long=True
    )
    last_step: int | None = entry(None, "Last step of the training in the attempt.", long=True)
    total_steps: int | None = entry(
        None, "Planned steps of the training, if the output has them.", low=1, long=True
    )
    steps_lost: int | None = entry(
        None, "Steps repeated by the next attempt that made steps.", low=0, long=True
    )


def count_failed_node(
    nodes: Sequence[FailedNode],
    name: str,
    now: datetime,
) -> tuple[FailedNode, ...]:
    """Return the nodes with one more failure on the node `name`. This node comes first."""
    before = sum(node.failures for node in nodes if node.name == name)
    others = [node for node in nodes if node.name != name]
    return (FailedNode(name, before + 1, now), *others)[:MAX_NODES_LISTED]


def forget_old_failures(nodes: Sequence[FailedNode], now: datetime) -> tuple[FailedNode, ...]:
    return tuple(node for node in nodes if now - node.time <= SICK_TIME)


def add_attempt(attempts: Sequence[EndedAttempt], ended: EndedAttempt) -> tuple[EndedAttempt, ...]:
    """Return the history with one more ended attempt. The newest comes first.

    A suspended attempt may still succeed. Its last end counts. Time moved out of training stays
    moved.
    """
    others = []
    for attempt in attempts:
        if attempt.attempt != ended.attempt:
            others.append(attempt)
        elif attempt.untrained_seconds is not None:
            ended = replace(ended, untrained_seconds=attempt.untrained_seconds)
    return (ended, *others)[:MAX_ATTEMPTS]


def with_totals(
    attempts: Sequence[EndedAttempt],
    totals: Mapping[int, int],
) -> tuple[EndedAttempt, ...]:
    """Return the history with the planned steps of attempts, as far as they are known."""
    return tuple(
        replace(one, total_steps=totals.get(_number(one), one.total_steps)) for one in attempts
    )


def with_steps(
    attempts: Sequence[EndedAttempt],
    steps: Mapping[int, Steps],
) -> tuple[EndedAttempt, ...]:
    """Return the history with the steps of attempts, as far as they are known.

    An attempt has lost the steps that the next one with steps made again.
    """
    entries = []
    next_first: int | None = None
    # The newest comes first.
    for ended in attempts:
        known = steps.get(_number(ended))
        if known:
            ended = replace(ended, first_step=known[0], last_step=known[1])
        if next_first is not None and ended.last_step is not None:
            ended = replace(ended, steps_lost=max(0, ended.last_step - next_first))
        if ended.first_step is not None:
            next_first = ended.first_step
        entries.append(ended)
    return tuple(entries)


def with_training_times(
    attempts: Sequence[EndedAttempt],
    times: Mapping[int, datetime],
) -> tuple[EndedAttempt, ...]:
    """Return the history with the first step or heartbeat of attempts, as far as it is known."""
    entries = []
    for ended in attempts:
        known = (ended.training_time, times.get(_number(ended)))
        first = min((time for time in known if time), default=None)
        entries.append(replace(ended, training_time=first) if first else ended)
    return tuple(entries)


def _number(ended: EndedAttempt) -> int:
    return -1 if ended.attempt is None else ended.attempt


def ended_attempt(
    end: AttemptEnd,
    start: datetime | None,
    ran: datetime | None,
    now: datetime,
) -> EndedAttempt:
    """Return the history's entry of an attempt ending now, with a shortened message.

    `ran` is when all its nodes were first running.
    """
    return EndedAttempt(
        attempt=end.attempt,
        cause=end.cause,
        reason=end.reason,
        message=end.message[:MAX_ATTEMPT_MESSAGE],
        node=end.node,
        pod=end.pod,
        rank=end.rank,
        exit_code=end.exit_code,
        start=start,
        running_time=ran,
        end=now,
    )
