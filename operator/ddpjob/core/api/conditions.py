"""Conditions of a DDPJob, in Kubernetes' own shape."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob.core.api.entries import REQUIRED, entry
from ddpjob.core.api.names import Condition
from ddpjob.core.api.parts import Part


@dataclass(frozen=True, slots=True)
class ConditionStatus(Part):
    """One condition of a job. `stamp_conditions` adds the time and the generation."""

    type: str = entry(REQUIRED, "Type of the condition.")
    status: str = entry(REQUIRED, "True, False or Unknown.", choices=("True", "False", "Unknown"))
    reason: str = entry("", "Reason in one word.", always=True, demanded=True)
    message: str = entry("", "Reason in one sentence.", progress=True, always=True, demanded=True)
    last_transition_time: datetime | None = entry(
        None, "Time of the last change of status.", demanded=True
    )
    observed_generation: int = entry(
        0, "The metadata.generation that this condition was computed from.", long=True
    )

    @property
    def holds(self) -> bool:
        return self.status == "True"


Conditions = tuple[ConditionStatus, ...]


def find_condition(conditions: Conditions, kind: Condition) -> ConditionStatus | None:
    for condition in conditions:
        if condition.type == kind:
            return condition
    return None


def set_condition(
    conditions: Conditions,
    kind: Condition,
    holds: bool,
    reason: str,
    message: str,
) -> Conditions:
    """Return the conditions with one set to True or False.

    `stamp_conditions` adds the times and the generation.
    """
    status = "True" if holds else "False"
    old = find_condition(conditions, kind)
    new = ConditionStatus(str(kind), status, str(reason), message)
    if old is None:
        return (*conditions, new)
    # The transition time moves only when the status does.
    if old.status == status:
        new = replace(new, last_transition_time=old.last_transition_time)
    return tuple(new if condition is old else condition for condition in conditions)


def stamp_conditions(
    conditions: Sequence[ConditionStatus],
    generation: int,
    now: datetime,
) -> Conditions:
    """Return the conditions with the generation that they were computed from.

    `kubectl wait` ignores conditions of an older generation. A newly changed condition gets `now`
    as its transition time.
    """
    return tuple(
        replace(
            condition,
            last_transition_time=condition.last_transition_time or now,
            observed_generation=generation,
        )
        for condition in conditions
    )
