"""The clocks of a job, and the time of its next deadline.

Every rule that waits for a moment has a timer here. The next look at a job is at the earliest
future moment of all timers, whichever rule applied at this look.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core.api.names import Condition
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Attempt, Status, starting_seconds
from ddpjob.core.api.times import MAX_SECONDS, later
from ddpjob.core.decide.causes import settles_at
from ddpjob.core.decide.dead_nodes import is_cut_off, is_not_ready, next_death, next_overdue
from ddpjob.core.decide.gangs import pods_with_room
from ddpjob.core.decide.hangs import suspects
from ddpjob.core.decide.heartbeats import checked_from
from ddpjob.core.decide.in_place import next_copy, silent_time
from ddpjob.core.decide.inquiry import LOOK_INTERVAL, asked_from
from ddpjob.core.decide.meeting import late_from
from ddpjob.core.observe.observation import ApiState, Observation, Pod

Timer = Callable[[Observation, Spec, datetime], datetime | None]

# A gang waiting for room under a quota gives way to an older one after this time. Under a quota no
# autoscaler can help.
QUOTA_TIMEOUT = timedelta(seconds=20)

# A pod that has had a node for this time, and no container, may wait for the agent's ConfigMap. The
# operator then looks for the ConfigMap. It looks again after the interval, since an image or a
# volume may also be the reason.
CREATION_TIME = timedelta(seconds=10)
CREATION_INTERVAL = timedelta(seconds=30)

# Time between two looks at a gang ready to give way to an older one.
CONTEST_INTERVAL = timedelta(seconds=60)

# Time between two looks while the status names an unreachable node that the job has left.
LEFT_NODE_INTERVAL = timedelta(seconds=60)

# Time between two looks while most Kubernetes nodes are not ready.
CUT_OFF_INTERVAL = timedelta(seconds=5)


def run_clocks(obs: Observation, now: datetime) -> Status:
    """Return the status with its clocks started and stopped."""
    status = obs.status
    if status.finished or status.has(Condition.SUSPENDED):
        return _stop_clocks(status, now)
    if _waits_for_queue(obs) and not obs.unreleased:
        stopped = _stop_active_clock(status, now)
        return replace(stopped, attempt=_run_clocks_of_attempt(obs, now))
    active_since = status.active_since
    if not active_since and obs.unreleased:
        active_since = now
    attempt = _run_clocks_of_attempt(obs, now)
    return replace(status, active_since=active_since, attempt=attempt)


def _stop_active_clock(status: Status, now: datetime) -> Status:
    active_seconds = status.active_seconds
    if status.active_since:
        passed = now - status.active_since
        active_seconds += int(passed.total_seconds())
    return replace(status, active_seconds=active_seconds, active_since=None)


def _stop_clocks(status: Status, now: datetime) -> Status:
    attempt = replace(
        status.attempt,
        starting_since=None,
        undecided_since=None,
        silent_since=None,
    )
    return replace(_stop_active_clock(status, now), attempt=attempt)


def _run_clocks_of_attempt(obs: Observation, now: datetime) -> Attempt:
    attempt = obs.status.attempt
    is_starting = _is_starting(obs, now)
    # An interruption, such as a scheduling gate, stops the clock, and the first run resets it.
    waited = attempt.starting_seconds if is_starting else starting_seconds(attempt, now)
    return replace(
        attempt,
        starting_since=_since(attempt.starting_since, is_starting, now),
        starting_seconds=0 if attempt.running_time else waited,
        undecided_since=attempt.undecided_since if obs.has_failed_pod else None,
        silent_since=_since(attempt.silent_since, _is_silent(obs), now),
    )


def _since(before: datetime | None, runs: bool, now: datetime) -> datetime | None:
    """Return when a clock was started; None if it does not run."""
    if not runs:
        return None
    return before or now


def _is_silent(obs: Observation) -> bool:
    """Return True if pods run and are not ready, although they must be, or their setup is over."""
    spec = obs.job.spec
    has_setup = spec is not None and bool(spec.setup)
    if not obs.must_be_ready and not has_setup:
        return False
    return bool(obs.silent)


def _is_starting(obs: Observation, now: datetime) -> bool:
    """Return True if the attempt waits for its nodes, and neither for a queue nor for its turn."""
    status = obs.status
    attempt = status.attempt
    if _waits_for_queue(obs):
        return False
    if attempt.number is None or attempt.running_time or attempt.yielding:
        return False
    backoff_end = status.backoff.until
    if backoff_end and now < backoff_end:
        return False
    if any(pod.gated for pod in obs.current):
        return False
    older_run = any(not pod.released for pod in obs.older)
    return not obs.leftovers and not older_run


def _waits_for_queue(obs: Observation) -> bool:
    """Return True if the place of new pods cannot be read, as while Kueue is down."""
    is_refused = obs.refusal is not None and obs.refusal.reason == Reason.NO_QUEUE
    return is_refused and obs.kueue is not ApiState.SERVED


# The timers


def backoff_ends(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    return obs.status.backoff.until


def failure_settles(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    if not obs.status.attempt.undecided_since:
        return None
    return settles_at(obs, now)


def silence_ends(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    started = obs.status.attempt.silent_since
    if not started or not obs.must_be_ready or not _is_silent(obs):
        return None
    return later(started, silent_time(obs))


def silence_is_asked(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Return when to ask the agents of unready pods for the reason."""
    return asked_from(obs)


def writing_is_asked_again(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Look again: no event concerns the job when its other pods stop writing too."""
    if not suspects(obs, spec):
        return None
    return later(now, LOOK_INTERVAL)


def assignment_is_written_again(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Return when to write an assignment again whose pod does not follow it."""
    moments = (next_copy(obs, pod) for pod in obs.current)
    return min(filter(None, moments), default=None)


def heartbeats_are_checked(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Return when the agents are asked whether there were heartbeats."""
    return checked_from(obs, spec)


def peers_are_late(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Return when the status begins to explain the delay of a gang that has not met."""
    return late_from(obs)


def refusal_is_retried(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    refusal = obs.refusal
    if refusal is None or not refusal.is_too_early(now):
        return None
    return refusal.retry_at


def active_deadline(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    limit = spec.lifecycle.active_deadline
    started = obs.status.active_since
    if limit is None or started is None:
        return None
    return _end_of(limit, started, obs.status.active_seconds)


def startup_deadline(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    limit = spec.lifecycle.startup_deadline
    started = obs.status.attempt.starting_since
    if limit is None or started is None or not _is_starting(obs, now):
        return None
    return _end_of(limit, started, obs.status.attempt.starting_seconds)


def _end_of(limit: timedelta, started: datetime, used: int) -> datetime:
    """Return the end of a limit. `used` seconds of it had passed when its clock was started."""
    remaining = int(limit.total_seconds()) - used
    remaining = min(max(remaining, 0), MAX_SECONDS)
    return later(started, timedelta(seconds=remaining))


def time_to_live(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    limit = spec.lifecycle.time_to_live
    ended = obs.status.completion_time
    if limit is None or not ended or not obs.status.finished:
        return None
    return later(ended, limit)


def node_is_dead(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    return next_death(obs, now)


def agent_is_checked(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Return when to look for the agent's ConfigMap: pods without a container may wait for it."""
    since_when = [pod.creating_since for pod in obs.current if pod.creating_since]
    if not since_when or obs.status.finished:
        return None
    return later(min(since_when), CREATION_TIME)


def agent_is_checked_again(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    checked = agent_is_checked(obs, spec, now)
    if not checked or checked > now:
        return None
    return later(now, CREATION_INTERVAL)


def node_is_forgotten(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Look again: no event concerns the job when a node that it has left returns."""
    if obs.status.finished:
        return None
    used = {pod.node_name for pod in _unfinished(obs)}
    has_left = any(node.name not in used for node in obs.status.unreachable_nodes)
    return later(now, LEFT_NODE_INTERVAL) if has_left else None


def _unfinished(obs: Observation) -> list[Pod]:
    pods = (*obs.pods, *obs.leftovers)
    return [pod for pod in pods if not pod.released]


def contest_is_looked_at(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Look again: no event concerns the job when an older gang becomes incomplete."""
    began = gang_timeout(obs, spec, now)
    if not began or began > now:
        return None
    return later(now, CONTEST_INTERVAL)


def cut_off_ends(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    """Look again soon: no event concerns the job when another Kubernetes node is ready again."""
    if not is_cut_off(obs):
        return None
    waits = any(is_not_ready(obs, pod.node_name) for pod in _unfinished(obs))
    return later(now, CUT_OFF_INTERVAL) if waits else None


def pod_is_overdue(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    if obs.status.finished:
        return None
    return next_overdue(obs, now)


def gang_timeout(obs: Observation, spec: Spec, now: datetime) -> datetime | None:
    started = obs.status.attempt.starting_since
    if started is None or obs.all_run or not _is_starting(obs, now):
        return None
    has_room = bool(pods_with_room(obs.current, obs.is_under_quota))
    if not has_room:
        return None
    limit = QUOTA_TIMEOUT if obs.is_under_quota else obs.policy.gang_timeout
    return later(started, limit)


TIMERS: tuple[Timer, ...] = (
    backoff_ends,
    failure_settles,
    silence_ends,
    silence_is_asked,
    writing_is_asked_again,
    assignment_is_written_again,
    heartbeats_are_checked,
    peers_are_late,
    refusal_is_retried,
    active_deadline,
    startup_deadline,
    time_to_live,
    node_is_dead,
    cut_off_ends,
    pod_is_overdue,
    gang_timeout,
    contest_is_looked_at,
    node_is_forgotten,
    agent_is_checked,
    agent_is_checked_again,
)


# Their moment may come by a change of the status itself, if no time is left.
DEADLINES: tuple[Timer, ...] = (time_to_live, active_deadline, startup_deadline)


def is_due(timer: Timer, obs: Observation, spec: Spec, now: datetime) -> bool:
    """Return True if the moment of a timer has come."""
    moment = timer(obs, spec, now)
    return moment is not None and moment <= now


def seconds_until_next(obs: Observation, spec: Spec, now: datetime) -> float | None:
    """Return the seconds until the earliest future moment, or None."""
    waits = []
    for timer in TIMERS:
        moment = timer(obs, spec, now)
        if moment and moment > now:
            wait = moment - now
            waits.append(wait.total_seconds())
    return min(waits, default=None)
