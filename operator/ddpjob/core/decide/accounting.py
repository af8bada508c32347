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
    before = status.account.activity
    started = status.account.since or now
    seconds = dict(status.account.seconds)
    is_active = _is_active(status)
    trains = is_active and status.attempt.running_time is not None
    # The time of training is added first: some of it may then move to starting.
    if before == Activity.TRAINING and not trains:
        _add(seconds, before, started, now)
    attempts = tuple(_move_untrained(ended, seconds) for ended in status.attempts)
    activity = _activity(obs, seconds) if is_active else ""
    if activity != before:
        if before and before != Activity.TRAINING:
            _add(seconds, before, started, now)
        started = now
    account = Account(str(activity), started if activity else None, seconds)
    return replace(status, attempts=attempts, account=account)


def _is_active(status: Status) -> bool:
    if status.attempt.number is None:
        return False
    return not status.finished and not status.has(Condition.SUSPENDED)


def _add(
    seconds: dict[str, int],
    activity: str,
    started: datetime,
    now: datetime,
) -> None:
    passed = now - started
    before = seconds.get(activity, 0)
    seconds[activity] = before + round(passed.total_seconds())


def seconds_until(status: Status, now: datetime) -> dict[str, float]:
    """Return the seconds of each activity, including the current one.

    The clocks of a client and of the operator may differ.
    """
    account = status.account
    seconds: dict[str, float] = dict(account.seconds)
    if account.activity and account.since:
        before = seconds.get(account.activity, 0.0)
        passed = since(account.since, now)
        seconds[account.activity] = before + passed.total_seconds()
    return seconds


def has_trained(status: Status) -> bool:
    """Return True if an attempt of the job trained before this one."""
    return status.account.seconds.get(Activity.TRAINING, 0) > 0


def trained_seconds(obs: Observation, now: datetime) -> float:
    """Return the seconds of training, including the attempt now ending."""
    seconds = seconds_until(obs.status, now)
    trained = seconds.get(Activity.TRAINING, 0.0)
    met = obs.status.attempt.running_time
    first = reported_training(obs).get(obs.attempt)
    if first is None or met is None:
        return trained
    untrained = since(met, min(first, now))
    return trained - untrained.total_seconds()


def counts_from_meeting(status: Status) -> bool:
    """Return True if an attempt counts as training from its meeting: its first step is unknown."""
    for ended in status.attempts:
        is_settled = ended.training_time or ended.untrained_seconds is not None
        if ended.running_time and not is_settled:
            return True
    return False


def _move_untrained(ended: EndedAttempt, seconds: dict[str, int]) -> EndedAttempt:
    """Move the time before the first step of an ended attempt from training to starting.

    Its `untrained_seconds` have been moved before.
    """
    untrained = _untrained(ended)
    if untrained is None:
        return ended
    training = seconds.get(Activity.TRAINING, 0)
    starting = seconds.get(Activity.STARTING, 0)
    moved = untrained - (ended.untrained_seconds or 0)
    # Seconds are rounded, and a user may have changed the status.
    moved = min(moved, training)
    moved = max(moved, -starting)
    if moved:
        seconds[Activity.TRAINING] = training - moved
        seconds[Activity.STARTING] = starting + moved
    return replace(ended, untrained_seconds=untrained)


def _untrained(ended: EndedAttempt) -> int | None:
    """Return the seconds from the meeting to the first step of an attempt; None if not known."""
    met = ended.running_time
    end = ended.end
    if met is None or end is None:
        return None
    if ended.training_time:
        untrained = since(met, min(ended.training_time, end))
        return round(untrained.total_seconds())
    lasted = since(met, end)
    if ended.first_step is None and _ended_at_start(ended, lasted):
        return round(lasted.total_seconds())
    # The pod with the steps may end after the attempt.
    return None if ended.untrained_seconds is None else 0


def _ended_at_start(ended: EndedAttempt, lasted: timedelta) -> bool:
    """Return True if the script of an attempt failed before it could train, as at an import."""
    if ended.cause != Cause.FAILURE or lasted >= START_TIME:
        return False
    return ended.exit_code == WRONG_USE or is_permanent(error_in(ended.message))


def _activity(obs: Observation, seconds: dict[str, int]) -> str:
    """Return the activity of a job that is neither finished nor suspended."""
    status = obs.status
    if status.attempt.running_time:
        return Activity.TRAINING
    if seconds.get(Activity.TRAINING):
        return Activity.RECOVERING
    if obs.missing:
        return Activity.QUEUED
    is_placed = all(pod.node_name or pod.ended for pod in obs.current)
    return Activity.STARTING if is_placed else Activity.QUEUED
