"""Where the time of a job goes: queued, starting, training or recovering.

The time of an activity is added to `status.account.seconds` when another one begins. Training is
first counted from the meeting of the workers on. When an attempt has ended, its agents may have
reported its first step or heartbeat. The time before it is then moved from training to starting.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core.api.history import EndedAttempt
from ddpjob.core.api.names import Activity, Cause, Condition
from ddpjob.core.api.policy import WRONG_USE
from ddpjob.core.api.status import Account, Status
from ddpjob.core.api.times import since
from ddpjob.core.decide.reports import reported_training
from ddpjob.core.decide.script_errors import error_in, is_permanent
from ddpjob.core.observe.observation import Observation

# A script that fails this soon after the meeting has failed at its start.
START_TIME = timedelta(seconds=60)


def run_account(obs: Observation, now: datetime) -> Status:
    """Return the status with its seconds by activity."""
    status = obs.status
    account = status.account
    seconds = dict(account.seconds)
    started = account.since or now
    has_begun = status.attempt.number is not None
    is_active = has_begun and not (status.finished or status.has(Condition.SUSPENDED))
    trains = is_active and status.attempt.running_time is not None
    if account.activity == Activity.TRAINING and not trains:
        _add(seconds, account.activity, started, now)
    attempts = tuple(_move_untrained(ended, seconds) for ended in status.attempts)
    activity = _activity(obs, seconds) if is_active else ""
    if activity != account.activity:
        if account.activity and account.activity != Activity.TRAINING:
            _add(seconds, account.activity, started, now)
        started = now
    return replace(
        status,
        attempts=attempts,
        account=Account(str(activity), started if activity else None, seconds),
    )


def _add(seconds: dict[str, int], activity: str, started: datetime, now: datetime) -> None:
    passed = round((now - started).total_seconds())
    seconds[activity] = seconds.get(activity, 0) + passed


def seconds_until(status: Status, now: datetime) -> dict[str, float]:
    """Return the seconds of each activity, including the current one.

    The clocks of a client and of the operator may differ.
    """
    account = status.account
    seconds: dict[str, float] = dict(account.seconds)
    if account.activity and account.since:
        passed = since(account.since, now).total_seconds()
        seconds[account.activity] = seconds.get(account.activity, 0.0) + passed
    return seconds


def trained_seconds(obs: Observation, now: datetime) -> float:
    """Return the seconds of training, including the attempt now ending."""
    status = obs.status
    trained = seconds_until(status, now).get(Activity.TRAINING, 0.0)
    first = reported_training(obs).get(obs.attempt)
    if first is None or status.attempt.running_time is None:
        return trained
    return trained - since(status.attempt.running_time, min(first, now)).total_seconds()


def counts_from_meeting(status: Status) -> bool:
    """Return True if an attempt counts as training from its meeting: its first step is unknown."""
    return any(
        ended.running_time and ended.training_time is None and ended.untrained_seconds is None
        for ended in status.attempts
    )


def _move_untrained(ended: EndedAttempt, seconds: dict[str, int]) -> EndedAttempt:
    """Move the time before the first step of an ended attempt from training to starting.

    Its `untrained_seconds` have been moved before.
    """
    untrained = _untrained(ended)
    if untrained is None:
        return ended
    moved = untrained - (ended.untrained_seconds or 0)
    # Seconds are rounded, and somebody may have changed the status.
    moved = min(moved, seconds.get(Activity.TRAINING, 0))
    moved = max(moved, -seconds.get(Activity.STARTING, 0))
    if moved:
        seconds[Activity.TRAINING] = seconds.get(Activity.TRAINING, 0) - moved
        seconds[Activity.STARTING] = seconds.get(Activity.STARTING, 0) + moved
    return replace(ended, untrained_seconds=untrained)


def _untrained(ended: EndedAttempt) -> int | None:
    """Return the seconds from the meeting to the first step of an attempt; None if not known."""
    met, end = ended.running_time, ended.end
    if met is None or end is None:
        return None
    if ended.training_time:
        return round(since(met, min(ended.training_time, end)).total_seconds())
    if ended.first_step is None and _ended_at_start(ended, since(met, end)):
        return round(since(met, end).total_seconds())
    # The pod with the steps may end after the attempt.
    return None if ended.untrained_seconds is None else 0


def _ended_at_start(ended: EndedAttempt, lasted: timedelta) -> bool:
    """Return True if the script of an attempt failed before it could train, as at an import."""
    is_start = is_permanent(error_in(ended.message)) or ended.exit_code == WRONG_USE
    return ended.cause == Cause.FAILURE and is_start and lasted < START_TIME


def _activity(obs: Observation, seconds: dict[str, int]) -> str:
    """Return the activity of a job that is neither finished nor suspended."""
    status = obs.status
    if status.attempt.running_time:
        return Activity.TRAINING
    if seconds.get(Activity.TRAINING):
        return Activity.RECOVERING
    is_placed = all(pod.node_name or pod.ended for pod in obs.current)
    return Activity.STARTING if is_placed and not obs.missing else Activity.QUEUED
