"""The parts of a spec that say when a job restarts, waits, ends and is cleaned up."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from ddpjob.core.api import names
from ddpjob.core.api.history import MAX_ATTEMPTS
from ddpjob.core.api.readers import (
    Dict,
    refuse,
    require_boolean,
    require_fields,
    require_integer,
    require_integers,
    require_string,
)
from ddpjob.core.api.recovery import Recovery

# Each restart in a window is kept in the status, so their number is bounded.
MAX_BUDGET = 1000

MAX_INT32 = 2**31 - 1

# Longest deadline, window or grace period, in seconds: 68 years.
MAX_SECONDS = MAX_INT32

MAX_EXIT_CODES = 32

# argparse ends a script that was used wrongly with this code, and so does Python if it cannot find
# the script.
WRONG_USE = 2


class CleanPodPolicy(StrEnum):
    """Which pods of a finished job are deleted."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class Heartbeat(StrEnum):
    """What counts as a sign of life of a worker: a file that it touches, or its output."""

    FILE = "File"
    LOG = "Log"


Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True)
class FailurePolicy:
    """Budgets of a job in restarts of the whole gang.

    - `max_restarts` limits the restarts after failures of the job itself, `max_disruptions` those
      after lost pods, and `max_announced` those after disruptions that were announced; None does
      not limit them.
    - `window`: restarts that are older do not count; None counts all of them.
    - `non_retryable`: exit codes of a worker that end the job at once.
    - `max_attempts_without_progress`: the job ends after so many failed attempts that made no step.
    """

    max_restarts: int = 3
    max_disruptions: int = 20
    max_announced: int | None = None
    window: timedelta | None = None
    non_retryable: tuple[int, ...] = (WRONG_USE,)
    max_attempts_without_progress: int = 5

    @classmethod
    def from_dict(cls, data: Any) -> "FailurePolicy":
        where = "spec.failurePolicy"
        fields = require_fields(data, where)
        restarts = fields.get("maxRestarts", cls.max_restarts)
        disruptions = fields.get("maxDisruptions", cls.max_disruptions)
        announced = fields.get("maxAnnouncedDisruptions")
        stuck = fields.get("maxAttemptsWithoutProgress", cls.max_attempts_without_progress)
        codes = fields.get("nonRetryableExitCodes", list(cls.non_retryable))
        return cls(
            max_restarts=require_integer(restarts, f"{where}.maxRestarts", 0, MAX_BUDGET),
            max_disruptions=require_integer(disruptions, f"{where}.maxDisruptions", 0, MAX_BUDGET),
            max_announced=_read_limit(announced, f"{where}.maxAnnouncedDisruptions"),
            window=_read_seconds(fields, "windowSeconds", 1, where),
            non_retryable=_read_exit_codes(codes, f"{where}.nonRetryableExitCodes"),
            max_attempts_without_progress=require_integer(
                stuck, f"{where}.maxAttemptsWithoutProgress", 1, MAX_ATTEMPTS
            ),
        )

    def is_retryable(self, exit_code: int | None) -> bool:
        """Return False for a code that ends the job.

        torchrun reports a signal as a negative number, a shell as 128 and that number.
        """
        if exit_code is None:
            return True
        as_shell = 128 - exit_code if exit_code < 0 else exit_code
        return as_shell not in self.non_retryable


@dataclass(frozen=True)
class Lifecycle:
    """When a job waits, ends and is cleaned up.

    - `suspended`: the job has no pods.
    - `retries`: a Failed job is taken up again each time that this number grows.
    - `active_deadline`: longest active time, summed over suspensions.
    - `startup_deadline`: longest time in which not all nodes of an attempt run.
    - `time_to_live`: the job is deleted so long after it has finished.
    - `managed_by`: the controller that looks after the job.
    - `hang_timeout`: an attempt ends if its `heartbeat` stops for so long; None: never.
      `first_heartbeat`: the same for the time before the first one.
    - `recovery`: whether pods stay for the next attempt; None: that depends on the volumes.
    """

    suspended: bool = False
    retries: int = 0
    active_deadline: timedelta | None = None
    startup_deadline: timedelta | None = None
    time_to_live: timedelta | None = None
    clean_pods: CleanPodPolicy = CleanPodPolicy.RUNNING
    managed_by: str = names.CONTROLLER
    hang_timeout: timedelta | None = None
    first_heartbeat: timedelta | None = None
    heartbeat: Heartbeat = Heartbeat.FILE
    recovery: Recovery | None = None

    @classmethod
    def from_fields(cls, fields: Dict) -> "Lifecycle":
        return cls(
            suspended=require_boolean(fields.get("suspend", False), "spec.suspend"),
            retries=require_integer(fields.get("retries", 0), "spec.retries", 0, MAX_INT32),
            active_deadline=_read_seconds(fields, "activeDeadlineSeconds", 1),
            startup_deadline=_read_seconds(fields, "startupDeadlineSeconds", 1),
            time_to_live=_read_seconds(fields, "ttlSecondsAfterFinished", 0),
            clean_pods=_read_choice(fields, "cleanPodPolicy", cls.clean_pods),
            managed_by=require_string(fields.get("managedBy", cls.managed_by), "spec.managedBy"),
            hang_timeout=_read_seconds(fields, "hangTimeoutSeconds", 1),
            first_heartbeat=_read_seconds(fields, "firstHeartbeatSeconds", 1),
            heartbeat=_read_choice(fields, "heartbeat", cls.heartbeat),
            recovery=_read_recovery(fields),
        )


def _read_choice(fields: Dict, key: str, default: Choice) -> Choice:
    """Return the choice at `key`, one of the kind of `default`."""
    value = fields.get(key, str(default))
    choices = [str(choice) for choice in type(default)]
    if value not in choices:
        wanted = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise refuse(f"spec.{key}", wanted, value)
    return type(default)(value)


def _read_recovery(fields: Dict) -> Recovery | None:
    if fields.get("recovery") is None:
        return None
    return _read_choice(fields, "recovery", Recovery.IN_PLACE)


def _read_limit(value: Any, where: str) -> int | None:
    return None if value is None else require_integer(value, where, 0, MAX_BUDGET)


def _read_seconds(fields: Dict, key: str, low: int, where: str = "spec") -> timedelta | None:
    value = fields.get(key)
    if value is None:
        return None
    return timedelta(seconds=require_integer(value, f"{where}.{key}", low, MAX_SECONDS))


def _read_exit_codes(value: Any, where: str) -> tuple[int, ...]:
    codes = require_integers(value, where, 1, 255)
    if len(codes) > MAX_EXIT_CODES:
        raise refuse(where, f"a list of at most {MAX_EXIT_CODES} exit codes", value)
    return codes
