"""Conditions of a DDPJob, in the shape that Kubernetes gives conditions."""

from collections.abc import Sequence
from datetime import datetime

from ddpjob.core.api.names import Condition
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.times import format_time

Conditions = tuple[Dict, ...]


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
