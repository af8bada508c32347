"""The status of a DDPJob: its parts, and its form in the manifest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from ddpjob.core.names import Condition
from ddpjob.core.readers import (
    Dict,
    boolean_or_none,
    integer_or_none,
    integer_or_zero,
    integers_or_empty,
    mapping_or_empty,
    mappings_or_empty,
)
from ddpjob.core.times import format_time, parse_time

Conditions = tuple[Dict, ...]

# Limits of a result, in entries and in characters of each key and value.
MAX_RESULT_ENTRIES = 32
MAX_RESULT_STRING = 256


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
        return cls(**{entry.name: integer_or_zero(data.get(entry.name)) for entry in fields(cls)})


@dataclass(frozen=True)
class Backoff:
    """`count` attempts in a row failed early; no pod is created before `until`."""

    count: int = 0
    until: datetime | None = None

    @classmethod
    def from_dict(cls, data: Dict) -> "Backoff":
        return cls(integer_or_zero(data.get("count")), parse_time(data.get("until")))

    def to_dict(self) -> dict[str, Any]:
        if not self.count:
            return {}
        return _without_absent({"count": self.count, "until": _time_or_none(self.until)})


@dataclass(frozen=True)
class Status:
    """The knowledge of the operator about a job that it cannot observe again.

    Attempts count from 0; `attempt` is None before the first.

    `attempt_started` is a latch: the newest attempt of which every pod was seen. From then on a
    missing pod of that attempt is a lost pod. Before, it is one that still has to be created.

    `succeeded_nodes` are the indices of the current attempt whose trainer succeeded. The loss of
    their pods is no failure.

    `previous_attempt_ran` is True if all nodes of the attempt before the current one were running
    when it ended. Such pods get time to write a checkpoint. It is None in the first attempt, and
    in a status from an older operator version that did not record it.

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
    previous_attempt_ran: bool | None = None
    restarts: int = 0
    disruptions: int = 0
    pods: PodCounts = PodCounts()
    succeeded_nodes: tuple[int, ...] = ()
    resolved: Dict = field(default_factory=dict)
    backoff: Backoff = Backoff()
    last_failure: Dict = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()
    start_time: datetime | None = None
    completion_time: datetime | None = None
    result: Mapping[str, str] = field(default_factory=dict)

    def has(self, kind: Condition) -> bool:
        """Return True if the condition is True."""
        condition = find_condition(self.conditions, kind)
        return condition is not None and condition.get("status") == "True"

    @property
    def finished(self) -> bool:
        return self.has(Condition.COMPLETE) or self.has(Condition.FAILED)

    @classmethod
    def from_dict(cls, data: Any) -> "Status":
        """Read a status. Never raises: what cannot be read counts as absent."""
        entries = mapping_or_empty(data)
        result = mapping_or_empty(entries.get("result"))
        ignored = entries.get("ignoredFields")
        return cls(
            phase=str(entries.get("phase", "")),
            reason=str(entries.get("reason", "")),
            message=str(entries.get("message", "")),
            observed_generation=integer_or_zero(entries.get("observedGeneration")),
            conditions=mappings_or_empty(entries.get("conditions")),
            attempt=integer_or_none(entries.get("attempt")),
            attempt_started=integer_or_none(entries.get("attemptStarted")),
            attempt_time=parse_time(entries.get("attemptTime")),
            previous_attempt_ran=boolean_or_none(entries.get("previousAttemptRan")),
            restarts=integer_or_zero(entries.get("restarts")),
            disruptions=integer_or_zero(entries.get("disruptions")),
            pods=PodCounts.from_dict(mapping_or_empty(entries.get("nodes"))),
            succeeded_nodes=integers_or_empty(entries.get("succeededNodes")),
            resolved=mapping_or_empty(entries.get("resolved")),
            backoff=Backoff.from_dict(mapping_or_empty(entries.get("backoff"))),
            last_failure=mapping_or_empty(entries.get("lastFailure")),
            ignored_fields=tuple(map(str, ignored)) if isinstance(ignored, list) else (),
            start_time=parse_time(entries.get("startTime")),
            completion_time=parse_time(entries.get("completionTime")),
            result={str(key): str(value) for key, value in result.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the status in the CRD's form; empty fields are absent."""
        pods = {entry.name: getattr(self.pods, entry.name) for entry in fields(PodCounts)}
        entries: dict[str, Any] = {
            "phase": self.phase,
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "conditions": [dict(condition) for condition in self.conditions],
            "attempt": self.attempt,
            "attemptStarted": self.attempt_started,
            "attemptTime": _time_or_none(self.attempt_time),
            "previousAttemptRan": self.previous_attempt_ran,
            "restarts": self.restarts,
            "disruptions": self.disruptions,
            "nodes": pods,
            "nodesReady": f"{self.pods.ready + self.pods.succeeded}/{self.pods.desired}",
            "succeededNodes": list(self.succeeded_nodes) or None,
            "resolved": dict(self.resolved),
            "backoff": self.backoff.to_dict(),
            "lastFailure": dict(self.last_failure),
            "ignoredFields": list(self.ignored_fields) or None,
            "startTime": _time_or_none(self.start_time),
            "completionTime": _time_or_none(self.completion_time),
            "result": dict(self.result),
        }
        return _without_absent(entries)


def _time_or_none(moment: datetime | None) -> str | None:
    return format_time(moment) if moment else None


def _without_absent(entries: Dict) -> dict[str, Any]:
    absent: tuple[Any, ...] = (None, {}, "")
    return {key: value for key, value in entries.items() if value not in absent}


# Conditions


def find_condition(conditions: Sequence[Dict], kind: Condition) -> Dict | None:
    for condition in conditions:
        if condition.get("type") == kind:
            return condition
    return None


def set_condition(
    conditions: Sequence[Dict], kind: Condition, holds: bool, reason: str, message: str
) -> Conditions:
    """Return the conditions with one set to True or False.

    `stamp_conditions` adds the times and the generation.
    """
    status = "True" if holds else "False"
    old = find_condition(conditions, kind)
    new = {"type": str(kind), "status": status, "reason": str(reason), "message": message}
    if old is None:
        return (*conditions, new)
    # The transition time moves only when the status does.
    if old.get("status") == status and "lastTransitionTime" in old:
        new["lastTransitionTime"] = old["lastTransitionTime"]
    return tuple(new if condition is old else condition for condition in conditions)


def stamp_conditions(conditions: Sequence[Dict], generation: int, now: datetime) -> Conditions:
    """Return the conditions with the generation that they were computed from.

    `kubectl wait` ignores conditions of an older generation. A condition that has just changed gets
    `now` as its transition time.
    """
    default = {"lastTransitionTime": format_time(now)}
    return tuple({**default, **c, "observedGeneration": generation} for c in conditions)


# The result of rank 0


def read_result(message: str) -> Mapping[str, str]:
    """Return the JSON object in a termination message as strings, at most 32 entries.

    The result is empty if the message is something else, such as the tail of a log.
    """
    try:
        data = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    entries = list(data.items())[:MAX_RESULT_ENTRIES]
    return {str(key)[:MAX_RESULT_STRING]: _as_string(value) for key, value in entries}


def _as_string(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:MAX_RESULT_STRING]


def is_transition(old: Status, new: Status) -> bool:
    """Return True if a change is more than progress and has to be written at once.

    Progress is a change of counts, of messages, of succeeded nodes or of the result.
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
        result={},
    )
