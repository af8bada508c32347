"""Where the time of a job goes: queued, starting, training or recovering.

The time of an activity is added to `status.seconds` when another one begins.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from enum import StrEnum

from ddpjob.core.names import Condition
from ddpjob.core.observe import Observation
from ddpjob.core.status import Status
from ddpjob.core.times import since


class Activity(StrEnum):
    """What a job does with its time.

    - QUEUED: a pod has no node yet, or must not be created. STARTING: the workers have not met.
    - TRAINING: they have met. RECOVERING: from the end of an attempt that trained to the next one
      that does, whatever that waits for.
    """

    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"


def run_account(obs: Observation, now: datetime) -> Status:
    """Return the status with its seconds by activity."""
    status = obs.status
    activity = _activity(obs)
    # A time that is to come was written before the clock was set back.
    started = min(status.activity_since or now, now)
    if activity == status.activity:
        return replace(status, activity_since=started if activity else None)
    seconds = add_seconds(status.seconds, status.activity, since(started, now).total_seconds())
    return replace(
        status, activity=activity, activity_since=now if activity else None, seconds=seconds
    )


def add_seconds(seconds: Mapping[str, int], activity: str, passed: float) -> Mapping[str, int]:
    if not activity:
        return seconds
    return {**seconds, activity: seconds.get(activity, 0) + round(passed)}


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
