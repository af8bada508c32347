"""Conditions in Kubernetes' shape: a type that is True or False, since when, and why."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ddpjob.core.api import time_to_text
from ddpjob.core.names import Condition

Dict = Mapping[str, Any]


def set_condition(
    conditions: Sequence[Dict],
    kind: Condition,
    true: bool,
    reason: str,
    message: str,
    now: datetime,
) -> tuple[Dict, ...]:
    """The conditions with one set. Its transition time moves only when its status does."""
    status = "True" if true else "False"
    old = next((c for c in conditions if c.get("type") == kind), None)
    unchanged = old is not None and old.get("status") == status
    since = (old or {}).get("lastTransitionTime") if unchanged else None
    new = {"type": str(kind), "status": status, "reason": str(reason), "message": message}
    new["lastTransitionTime"] = since or time_to_text(now)
    if old is None:
        return (*conditions, new)
    return tuple(new if c is old else c for c in conditions)


def observed_at(conditions: Sequence[Dict], generation: int) -> tuple[Dict, ...]:
    """The conditions stamped with the generation they were computed from: `kubectl wait` ignores older ones."""
    return tuple({**c, "observedGeneration": generation} for c in conditions)
