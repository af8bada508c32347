"""The status of a DDPJob: its parts, and its form in the manifest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any

from ddpjob.core.api.conditions import Conditions, find_condition
from ddpjob.core.api.history import (
    Backoff,
    FailedNode,
    Retried,
    UnreachableNode,
    Yielding,
    read_failed_nodes,
    read_unreachable_nodes,
)
from ddpjob.core.api.names import MAX_NODES, Activity, Condition
from ddpjob.core.api.readers import (
    Dict,
    boolean_or_none,
    integer_or_none,
    integer_or_zero,
    integers_or_empty,
    mapping_or_empty,
    mappings_or_empty,
    strings_or_empty,
)
from ddpjob.core.api.times import format_time, format_time_or_none, parse_time, since


@dataclass(frozen=True)
class PodCounts:
    """Pods of the current attempt, counted. `ready`: the trainer runs. `active`: not ended."""

    desired: int = 0
    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0

    @classmethod
    def from_dict(cls, data: Dict) -> "PodCounts":
        counts = {entry.name: integer_or_zero(data.get(entry.name)) for entry in fields(cls)}
        return cls(**{name: min(max(count, 0), MAX_NODES) for name, count in counts.items()})


@dataclass(frozen=True)
class Host:
    """The node that hosts the rendezvous of an attempt.

    `address` is the IP address of its pod if that stayed from an earlier attempt. A new pod is
    found by its name.
    """

    index: int = 0
    address: str = ""

    @classmethod
    def from_dict(cls, data: Dict) -> "Host":
        return cls(integer_or_zero(data.get("index")), str(data.get("address", "")))

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "address": self.address} if self.address else {}


@dataclass(frozen=True)
class Status:
    """The knowledge of the operator about a job that it cannot observe again.

    Attempts count from 0; `attempt` is None before the first.

    `attempt_started` is a latch: the newest attempt of which every pod was seen. From then on a
    missing pod of that attempt is a lost pod. Before, it is one that still has to be created.

    `pod_attempts` has, for each node, the attempt in which its pod was created. It is empty if all
    pods are of the current attempt. `host` is the node that hosts the rendezvous.

    `succeeded_nodes` are the indices of the current attempt whose trainer succeeded. The loss of
    their pods is no failure.

    `running_time` is when all nodes of the current attempt were first running.
    `previous_attempt_ran` is True if all nodes of the attempt before the current one were running
    when it ended. Such pods get time to write a checkpoint. It is None in the first attempt, and
    in a status from an older operator version that did not record it.

    `failures`, `disruptions` and `announced_disruptions` are the restarts by budget, in total; the
    times are the newest ones, as many as a budget can need. `retried` is what a Failed job had used
    when it was taken up again. `attempts` is the history for people, newest first.

    Four clocks, each None while it does not run: `undecided_since`, a failure was seen whose cause
    is not certain yet; `silent_since`, all containers run and some are not ready;
    `starting_since`, the attempt waits for all its nodes to be ready; `active_since`, the job has
    pods. `active_seconds` is the active time before that, and
    `starting_seconds` the time that the gang had waited for its nodes before.

    `activity` is what the job does since `activity_since`, and `seconds` are those of the
    activities before (decide/accounting.py).

    `failed_nodes` and `unreachable_nodes` are Kubernetes nodes. `yielding` is set while the job
    gives way to an older one. `stray_pods` are pods with the job's labels that it did not create.

    `ignored_fields` are the paths of spec fields that the operator does not know.
    """

    phase: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    conditions: Conditions = ()
    attempt: int | None = None
    attempt_started: int | None = None
    attempt_time: datetime | None = None
    pod_attempts: tuple[int, ...] = ()
    host: Host = Host()
    previous_attempt_ran: bool | None = None
    running_time: datetime | None = None
    failures: int = 0
    disruptions: int = 0
    announced_disruptions: int = 0
    failure_times: tuple[datetime, ...] = ()
    disruption_times: tuple[datetime, ...] = ()
    announced_times: tuple[datetime, ...] = ()
    retried: Retried = field(default_factory=Retried)
    attempts: tuple[Dict, ...] = ()
    undecided_since: datetime | None = None
    silent_since: datetime | None = None
    starting_since: datetime | None = None
    starting_seconds: int = 0
    active_since: datetime | None = None
    active_seconds: int = 0
    activity: str = ""
    activity_since: datetime | None = None
    seconds: Mapping[str, int] = field(default_factory=dict)
    failed_nodes: tuple[FailedNode, ...] = ()
    unreachable_nodes: tuple[UnreachableNode, ...] = ()
    yielding: Yielding | None = None
    stray_pods: tuple[str, ...] = ()
    selector: str = ""
    pods: PodCounts = PodCounts()
    succeeded_nodes: tuple[int, ...] = ()
    resolved: Dict = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    last_failure: Dict = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()
    start_time: datetime | None = None
    completion_time: datetime | None = None
    result: Mapping[str, str] = field(default_factory=dict)

    def has(self, kind: Condition) -> bool:
        """Return True if the condition is True."""
        condition = find_condition(self.conditions, kind)
        return condition is not None and condition.get("status") == "True"

    def born(self, index: int) -> int:
        """Return the attempt in which the pod of a node was, or is to be, created."""
        if index < len(self.pod_attempts):
            return self.pod_attempts[index]
        return self.attempt or 0

    @property
    def finished(self) -> bool:
        return self.has(Condition.COMPLETE) or self.has(Condition.FAILED)

    def is_retried_by(self, retries: int) -> bool:
        """Return True if a job with this `spec.retries` has failed and is to be taken up again."""
        return self.has(Condition.FAILED) and retries > self.retried.retries

    @property
    def exit_code(self) -> int:
        """Return 0 for a job that is Complete, and 1 for any other."""
        return 0 if self.has(Condition.COMPLETE) else 1

    @property
    def restarts(self) -> int:
        """Restarts of the gang that count against a budget."""
        return self.failures + self.disruptions + self.announced_disruptions

    @classmethod
    def from_dict(cls, data: Any) -> "Status":
        """Read a status. Never raises: what cannot be read counts as absent."""
        entries = mapping_or_empty(data)
        result = mapping_or_empty(entries.get("result"))
        # An earlier version wrote the failures alone, as `restarts`.
        failures = entries.get("failures", entries.get("restarts"))
        return cls(
            phase=str(entries.get("phase", "")),
            reason=str(entries.get("reason", "")),
            message=str(entries.get("message", "")),
            observed_generation=integer_or_zero(entries.get("observedGeneration")),
            conditions=mappings_or_empty(entries.get("conditions")),
            attempt=integer_or_none(entries.get("attempt")),
            attempt_started=integer_or_none(entries.get("attemptStarted")),
            attempt_time=parse_time(entries.get("attemptTime")),
            pod_attempts=integers_or_empty(entries.get("podAttempts")),
            host=Host.from_dict(mapping_or_empty(entries.get("host"))),
            previous_attempt_ran=boolean_or_none(entries.get("previousAttemptRan")),
            running_time=parse_time(entries.get("runningTime")),
            failures=integer_or_zero(failures),
            disruptions=integer_or_zero(entries.get("disruptions")),
            announced_disruptions=integer_or_zero(entries.get("announcedDisruptions")),
            failure_times=_read_times(entries.get("failureTimes")),
            disruption_times=_read_times(entries.get("disruptionTimes")),
            announced_times=_read_times(entries.get("announcedDisruptionTimes")),
            retried=Retried.from_dict(mapping_or_empty(entries.get("retried"))),
            attempts=mappings_or_empty(entries.get("attempts")),
            undecided_since=parse_time(entries.get("undecidedSince")),
            silent_since=parse_time(entries.get("silentSince")),
            starting_since=parse_time(entries.get("startingSince")),
            starting_seconds=integer_or_zero(entries.get("startingSeconds")),
            active_since=parse_time(entries.get("activeSince")),
            active_seconds=integer_or_zero(entries.get("activeSeconds")),
            activity=str(entries.get("activity", "")),
            activity_since=parse_time(entries.get("activitySince")),
            seconds=_read_seconds(entries.get("seconds")),
            failed_nodes=read_failed_nodes(entries.get("failedNodes")),
            unreachable_nodes=read_unreachable_nodes(entries.get("unreachableNodes")),
            yielding=Yielding.from_dict(mapping_or_empty(entries.get("yielding"))),
            stray_pods=strings_or_empty(entries.get("strayPods")),
            selector=str(entries.get("selector", "")),
            pods=PodCounts.from_dict(mapping_or_empty(entries.get("nodes"))),
            succeeded_nodes=integers_or_empty(entries.get("succeededNodes")),
            resolved=mapping_or_empty(entries.get("resolved")),
            backoff=Backoff.from_dict(mapping_or_empty(entries.get("backoff"))),
            last_failure=mapping_or_empty(entries.get("lastFailure")),
            ignored_fields=strings_or_empty(entries.get("ignoredFields")),
            start_time=parse_time(entries.get("startTime")),
            completion_time=parse_time(entries.get("completionTime")),
            result={str(key): str(value) for key, value in result.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the status in the CRD's form; empty fields are absent."""
        pods = {entry.name: getattr(self.pods, entry.name) for entry in fields(PodCounts)}
        entries: dict[str, Any] = {
            "phase": str(self.phase),
            "reason": str(self.reason),
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "conditions": [dict(condition) for condition in self.conditions],
            "attempt": self.attempt,
            "attemptStarted": self.attempt_started,
            "attemptTime": format_time_or_none(self.attempt_time),
            "podAttempts": list(self.pod_attempts),
            "host": self.host.to_dict(),
            "previousAttemptRan": self.previous_attempt_ran,
            "runningTime": format_time_or_none(self.running_time),
            "restarts": self.restarts,
            "failures": self.failures,
            "disruptions": self.disruptions,
            "announcedDisruptions": self.announced_disruptions or None,
            "failureTimes": _write_times(self.failure_times),
            "disruptionTimes": _write_times(self.disruption_times),
            "announcedDisruptionTimes": _write_times(self.announced_times),
            "retried": self.retried.to_dict(),
            "attempts": [dict(attempt) for attempt in self.attempts],
            "undecidedSince": format_time_or_none(self.undecided_since),
            "silentSince": format_time_or_none(self.silent_since),
            "startingSince": format_time_or_none(self.starting_since),
            "startingSeconds": self.starting_seconds or None,
            "activeSince": format_time_or_none(self.active_since),
            "activeSeconds": self.active_seconds or None,
            "activity": str(self.activity),
            "activitySince": format_time_or_none(self.activity_since),
            "seconds": {str(key): seconds for key, seconds in self.seconds.items()},
            "goodput": goodput(self.seconds),
            "failedNodes": [node.to_dict() for node in self.failed_nodes],
            "unreachableNodes": [node.to_dict() for node in self.unreachable_nodes],
            "yielding": self.yielding.to_dict() if self.yielding else None,
            "strayPods": list(self.stray_pods),
            "selector": self.selector,
            "nodes": pods,
            "nodesReady": f"{self.pods.ready + self.pods.succeeded}/{self.pods.desired}",
            "succeededNodes": list(self.succeeded_nodes),
            "resolved": dict(self.resolved),
            "backoff": self.backoff.to_dict(),
            "lastFailure": dict(self.last_failure),
            "ignoredFields": list(self.ignored_fields),
            "startTime": format_time_or_none(self.start_time),
            "completionTime": format_time_or_none(self.completion_time),
            "result": dict(self.result),
        }
        return _without_absent(entries)


def _write_times(times: Iterable[datetime]) -> list[str]:
    return [format_time(time) for time in times]


def _read_times(value: Any) -> tuple[datetime, ...]:
    times = map(parse_time, value if isinstance(value, list) else ())
    return tuple(time for time in times if time)


def goodput(seconds: Mapping[str, float]) -> str:
    """Return the part of a job's time that was spent on training, such as `87%`.

    The string is empty if none of these seconds was training.
    """
    training = seconds.get(Activity.TRAINING)
    if training is None:
        return ""
    return f"{int(100 * training / max(1, sum(seconds.values())))}%"


def _read_seconds(value: Any) -> Mapping[str, int]:
    found = mapping_or_empty(value).items()
    return {str(key): max(integer_or_zero(seconds), 0) for key, seconds in found}


def _without_absent(entries: Dict) -> dict[str, Any]:
    absent: tuple[Any, ...] = (None, {}, [], "")
    return {key: value for key, value in entries.items() if value not in absent}


def starting_seconds(status: Status, now: datetime) -> int:
    """Return for how long the gang has waited for its nodes, in all its attempts in a row."""
    passed = since(status.starting_since, now) if status.starting_since else timedelta(0)
    return status.starting_seconds + int(passed.total_seconds())


def is_transition(old: Status, new: Status) -> bool:
    """Return True if a change is more than progress and has to be written at once.

    Progress is a change of counts, of messages, of succeeded nodes or of the result. The start of
    the active time and of a silence, and the account of the time, may wait too.
    """
    return _without_progress(old) != _without_progress(new)


def _without_progress(status: Status) -> Status:
    conditions = tuple({**condition, "message": ""} for condition in status.conditions)
    return replace(
        status,
        message="",
        conditions=conditions,
        pods=PodCounts(desired=status.pods.desired),
        succeeded_nodes=(),
        active_since=None,
        silent_since=None,
        activity="",
        activity_since=None,
        seconds={},
        result={},
    )
