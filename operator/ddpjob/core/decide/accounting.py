"""Where the time of a job goes: queued, starting, training or recovering.

The time of an activity is added to `status.seconds` when another one begins. Training is first
counted from the meeting of the workers on. When an attempt has ended, its agents may have reported
its first step or heartbeat. What lies before that is then moved from training to starting.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core.api.names import Activity, Cause, Condition
from ddpjob.core.api.policy import WRONG_USE
from ddpjob.core.api.readers import Dict, integer_or_zero
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import parse_time, since
from ddpjob.core.decide.reports import reported_training
from ddpjob.core.decide.script_errors import error_in, is_permanent
from ddpjob.core.observe.observation import Observation

# An error of the script that ends it so soon after the meeting has ended it at its start.
START_TIME = timedelta(seconds=60)


def run_account(obs: Observation, now: datetime) -> Status:
    """Return the status with its seconds by activity."""
    status = obs.status
    seconds = dict(status.seconds)
    # A time that is to come was written before the clock was set back.
    started = min(status.activity_since or now, now)
    is_active = not (status.attempt is None or status.finished or status.has(Condition.SUSPENDED))
    trains = is_active and status.running_time is not None
    if status.activity == Activity.TRAINING and not trains:
        _add(seconds, status.activity, started, now)
    attempts = tuple(_move_untrained(entry, seconds) for entry in status.attempts)
    activity = _activity(obs, seconds) if is_active else ""
    if activity == status.activity:
        since_when = started if activity else None
    else:
        since_when = now if activity else None
        if status.activity and status.activity != Activity.TRAINING:
            _add(seconds, status.activity, started, now)
    return replace(
        status, attempts=attempts, activity=activity, activity_since=since_when, seconds=seconds
    )


def _add(seconds: dict[str, int], activity: str, started: datetime, now: datetime) -> None:
    passed = round(since(started, now).total_seconds())
    seconds[activity] = seconds.get(activity, 0) + passed


def seconds_until(status: Status, now: datetime) -> dict[str, float]:
    """Return the seconds of each activity, with those of the one that goes on."""
    seconds: dict[str, float] = dict(status.seconds)
    if status.activity and status.activity_since:
        passed = since(status.activity_since, now).total_seconds()
        seconds[status.activity] = seconds.get(status.activity, 0.0) + passed
    return seconds


def trained_seconds(obs: Observation, now: datetime) -> float:
    """Return for how long the job has trained, with the attempt that ends now."""
    status = obs.status
    trained = seconds_until(status, now).get(Activity.TRAINING, 0.0)
    first = reported_training(obs).get(obs.attempt)
    if first is None or status.running_time is None:
        return trained
    return trained - since(status.running_time, min(first, now)).total_seconds()


def counts_from_meeting(status: Status) -> bool:
    """Return True if the first step of an attempt is not known, so that all of it is training."""
    return any(
        "runningTime" in entry and not {"trainingTime", "untrainedSeconds"} & set(entry)
        for entry in status.attempts
    )


def _move_untrained(entry: Dict, seconds: dict[str, int]) -> Dict:
    """Move the time before the first step of an ended attempt from training to starting.

    `untrainedSeconds` of its entry is what was moved before.
    """
    untrained = _untrained(entry)
    if untrained is None:
        return entry
    moved = untrained - integer_or_zero(entry.get("untrainedSeconds"))
    # Seconds are rounded, and somebody may have changed the status.
    moved = min(moved, seconds.get(Activity.TRAINING, 0))
    moved = max(moved, -seconds.get(Activity.STARTING, 0))
    if moved:
        seconds[Activity.TRAINING] = seconds.get(Activity.TRAINING, 0) - moved
        seconds[Activity.STARTING] = seconds.get(Activity.STARTING, 0) + moved
    return {**entry, "untrainedSeconds": untrained}


def _untrained(entry: Dict) -> int | None:
    """Return the seconds from the meeting to the first step of an attempt; None if not known."""
    met = parse_time(entry.get("runningTime"))
    end = parse_time(entry.get("end"))
    if met is None or end is None:
        return None
    first = parse_time(entry.get("trainingTime"))
    if first:
        return round(since(met, min(first, end)).total_seconds())
    if "firstStep" not in entry and _ended_at_start(entry, since(met, end)):
        return round(since(met, end).total_seconds())
    # The pod with the steps may end after the attempt.
    return 0 if "untrainedSeconds" in entry else None


def _ended_at_start(entry: Dict, lasted: timedelta) -> bool:
    """Return True if the script of an attempt failed before it could train, as at an import."""
    is_error = is_permanent(error_in(str(entry.get("message", ""))))
    is_start = is_error or entry.get("exitCode") == WRONG_USE
    return entry.get("cause") == Cause.FAILURE and is_start and lasted < START_TIME


def _activity(obs: Observation, seconds: dict[str, int]) -> str:
    """Return what a job does that has not finished and is not suspended."""
    status = obs.status
    if status.running_time:
        return Activity.TRAINING
    if seconds.get(Activity.TRAINING):
        return Activity.RECOVERING
    is_placed = all(pod.node_name or pod.ended for pod in obs.current)
    return Activity.STARTING if is_placed and not obs.missing else Activity.QUEUED
