"""Where the time of a job goes: queued, starting, training or recovering.

The time of an activity is added to `status.seconds` when another one begins.
"""

from dataclasses import replace
from datetime import datetime

from ddpjob.core.names import Activity, Condition
from ddpjob.core.observe import Observation
from ddpjob.core.status import Status
from ddpjob.core.times import since


def run_account(obs: Observation, now: datetime) -> Status:
    """Return the status with its seconds by activity."""
    status = obs.status
    activity = _activity(obs)
    # A time that is to come was written before the clock was set back.
    started = min(status.activity_since or now, now)
    if activity == status.activity:
        return replace(status, activity_since=started if activity else None)
    seconds = dict(status.seconds)
    if status.activity:
        passed = round(since(started, now).total_seconds())
        seconds[status.activity] = seconds.get(status.activity, 0) + passed
    return replace(
        status, activity=activity, activity_since=now if activity else None, seconds=seconds
    )


def seconds_until(status: Status, now: datetime) -> dict[str, float]:
    """Return the seconds of each activity, with those of the one that goes on."""
    seconds: dict[str, float] = dict(status.seconds)
    if status.activity and status.activity_since:
        passed = since(status.activity_since, now).total_seconds()
        seconds[status.activity] = seconds.get(status.activity, 0.0) + passed
    return seconds


def trained_seconds(obs: Observation, now: datetime) -> float:
    """Return for how long the job has trained, with the attempt that goes on."""
    return seconds_until(obs.status, now).get(Activity.TRAINING, 0.0)


def _activity(obs: Observation) -> str:
    status = obs.status
    if status.attempt is None or status.finished or status.has(Condition.SUSPENDED):
        return ""
    if status.running_time:
        return Activity.TRAINING
    if Activity.TRAINING in (status.activity, *status.seconds):
        return Activity.RECOVERING
    is_placed = all(pod.node_name or pod.ended for pod in obs.current)
    return Activity.STARTING if is_placed and not obs.missing else Activity.QUEUED
