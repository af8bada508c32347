"""The records in a status: ended attempts, back-off, and the Kubernetes nodes that caused trouble.

People read the attempts. The budgets and the windows have their own fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ddpjob.core.api.readers import Dict, integer_or_zero, mappings_or_empty
from ddpjob.core.api.times import format_time, format_time_or_none, parse_time, since

# Ended attempts that the status keeps, and the characters of each message.
MAX_ATTEMPTS = 10
MAX_ATTEMPT_MESSAGE = 256

# The first and the last step of an attempt, as the training counts them.
Steps = tuple[int, int]

# From this many failures on, the next attempts avoid a node, until it had none for so long.
SICK_AFTER = 2
SICK_TIME = timedelta(hours=1)

# Nodes in one list of the status.
MAX_NODES_LISTED = 32


@dataclass(frozen=True)
class FailedNode:
    """A Kubernetes node on which attempts of the job failed: how many, and when the last one."""

    name: str
    failures: int
    time: datetime

    @property
    def is_avoided(self) -> bool:
        return self.failures >= SICK_AFTER

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "failures": self.failures, "time": format_time(self.time)}


@dataclass(frozen=True)
class UnreachableNode:
    """A Kubernetes node that the control plane cannot reach, and when the operator saw that.

    `uid` is empty for a node that was gone already.
    """

    name: str
    since: datetime
    uid: str = ""

    def to_dict(self) -> dict[str, Any]:
        fields = {"name": self.name, "uid": self.uid, "since": format_time(self.since)}
        return {key: value for key, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class OlderGang:
    """An older job that a younger one gives way to. `name` is empty in another namespace."""

    uid: str
    name: str

    def __str__(self) -> str:
        return f"the older job {self.name}" if self.name else "an older job of another namespace"


@dataclass(frozen=True)
class Yielding:
    """The UID of the older job that a job gave its pods back for, and the end of that wait."""

    to: str
    until: datetime

    @classmethod
    def from_dict(cls, data: Dict) -> "Yielding | None":
        until = parse_time(data.get("until"))
        return cls(str(data.get("to", "")), until) if until else None

    def to_dict(self) -> dict[str, Any]:
        return {"to": self.to, "until": format_time(self.until)}


@dataclass(frozen=True)
class Backoff:
    """`count` attempts in a row failed early; no pod is created before `until`."""

    count: int = 0
    until: datetime | None = None

    def at_least(self, until: datetime) -> "Backoff":
        """Return a back-off that ends at `until` or later."""
        return replace(self, until=max(self.until or until, until))

    @classmethod
    def from_dict(cls, data: Dict) -> "Backoff":
        return cls(integer_or_zero(data.get("count")), parse_time(data.get("until")))

    def to_dict(self) -> dict[str, Any]:
        if not self.count:
            return {}
        until = {"until": format_time(self.until)} if self.until else {}
        return {"count": self.count, **until}


@dataclass(frozen=True)
class Retried:
    """The `spec.retries` of the job's last beginning, and the restarts that it had used by then."""

    retries: int = 0
    failures: int = 0
    disruptions: int = 0
    announced_disruptions: int = 0

    @classmethod
    def from_dict(cls, data: Dict) -> "Retried":
        return cls(
            integer_or_zero(data.get("retries")),
            integer_or_zero(data.get("failures")),
            integer_or_zero(data.get("disruptions")),
            integer_or_zero(data.get("announcedDisruptions")),
        )

    def to_dict(self) -> dict[str, Any]:
        fields = {
            "retries": self.retries,
            "failures": self.failures,
            "disruptions": self.disruptions,
            "announcedDisruptions": self.announced_disruptions,
        }
        return fields if any(fields.values()) else {}


def read_failed_nodes(value: Any) -> tuple[FailedNode, ...]:
    found = []
    for entry in mappings_or_empty(value):
        time = parse_time(entry.get("time"))
        if time:
            failures = integer_or_zero(entry.get("failures"))
            found.append(FailedNode(str(entry.get("name", "")), failures, time))
    return tuple(found)


def read_unreachable_nodes(value: Any) -> tuple[UnreachableNode, ...]:
    found = []
    for entry in mappings_or_empty(value):
        time = parse_time(entry.get("since"))
        if time:
            name, uid = (str(entry.get(key, "")) for key in ("name", "uid"))
            found.append(UnreachableNode(name, time, uid))
    return tuple(found)


def count_failed_node(
    nodes: Sequence[FailedNode], name: str, now: datetime
) -> tuple[FailedNode, ...]:
    """Return the nodes with one more failure on the node `name`, which comes first."""
    before = sum(node.failures for node in nodes if node.name == name)
    others = [node for node in nodes if node.name != name]
    return (FailedNode(name, before + 1, now), *others)[:MAX_NODES_LISTED]


def forget_old_failures(nodes: Sequence[FailedNode], now: datetime) -> tuple[FailedNode, ...]:
    return tuple(node for node in nodes if since(node.time, now) <= SICK_TIME)


def add_attempt(attempts: Sequence[Dict], ended: Dict) -> tuple[Dict, ...]:
    """Return the history with one more ended attempt. The newest comes first.

    An attempt that was suspended may still succeed. Its last end counts. What was moved out of its
    training time stays moved.
    """
    others = []
    for attempt in attempts:
        if attempt.get("attempt") != ended["attempt"]:
            others.append(attempt)
        elif "untrainedSeconds" in attempt:
            ended = {**ended, "untrainedSeconds": attempt["untrainedSeconds"]}
    return (ended, *others)[:MAX_ATTEMPTS]


def with_steps(attempts: Sequence[Dict], steps: Mapping[int, Steps]) -> tuple[Dict, ...]:
    """Return the history with the steps of attempts, as far as they are known.

    An attempt has lost the steps that the next one made again.
    """
    entries = []
    next_first: int | None = None
    # The newest comes first.
    for entry in attempts:
        first, last = steps.get(entry.get("attempt", -1), (None, None))
        found = {"firstStep": first, "lastStep": last}
        entry = {**entry, **{key: value for key, value in found.items() if value is not None}}
        if next_first is not None and "lastStep" in entry:
            entry["stepsLost"] = max(0, entry["lastStep"] - next_first)
        next_first = entry.get("firstStep")
        entries.append(entry)
    return tuple(entries)


def with_training_times(
    attempts: Sequence[Dict], times: Mapping[int, datetime]
) -> tuple[Dict, ...]:
    """Return the history with the first step or heartbeat of attempts, as far as it is known."""
    entries = []
    for entry in attempts:
        known = (parse_time(entry.get("trainingTime")), times.get(entry.get("attempt", -1)))
        first = min((time for time in known if time), default=None)
        entries.append({**entry, "trainingTime": format_time(first)} if first else entry)
    return tuple(entries)


def ended_attempt(
    record: Dict, start: datetime | None, ran: datetime | None, end: datetime
) -> dict[str, Any]:
    """Return the history's entry of an ended attempt: its record, shortened, and its times.

    `ran` is when all its nodes were first running.
    """
    fields = {
        **record,
        "message": str(record.get("message", ""))[:MAX_ATTEMPT_MESSAGE],
        "start": format_time_or_none(start),
        "runningTime": format_time_or_none(ran),
        "end": format_time(end),
        "time": None,
    }
    return {key: value for key, value in fields.items() if value not in (None, "")}
