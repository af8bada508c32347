"""The budgets of a job: how many restarts it has used, and how long it waits before the next."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core.backoff import exponential_delay
from ddpjob.core.names import Cause, Reason
from ddpjob.core.policy import FailurePolicy
from ddpjob.core.status import Backoff, Status
from ddpjob.core.times import since

# After an attempt in which all nodes ran for so long, the back-off begins anew.
LASTING = timedelta(minutes=5)

# Seconds of back-off. There is no wait after the first early failure in a row.
FIRST_DELAY = 10
LONGEST_DELAY = 300

# Reasons of disruptions that may be a job's own fault: a rank that ended too early looks like a
# lost peer, and a download may fill the disk of its node.
DOUBTFUL = (Reason.PEER_LOST, "TerminationByKubelet", "Evicted")


def is_used_up(status: Status, cause: Cause, policy: FailurePolicy, now: datetime) -> bool:
    """Return True if a restart for this cause would exceed its budget.

    With a window, only the restarts within it count.
    """
    if cause in (Cause.FAILURE, Cause.HANG):
        total, times, limit = status.failures, status.failure_times, policy.max_restarts
    elif cause is Cause.DISRUPTION:
        total, times, limit = status.disruptions, status.disruption_times, policy.max_disruptions
    else:
        return False
    if policy.window is not None:
        total = sum(since(time, now) <= policy.window for time in times)
    return total >= limit


def is_free(status: Status, cause: Cause, reason: str) -> bool:
    """Return True for an attempt that the cluster has lost before all its nodes ran.

    Its pods were rejected by a kubelet, or their node went away. That uses no budget, since a short
    fault of the cluster would use up any.
    """
    is_early = cause is Cause.DISRUPTION and status.running_time is None
    return is_early and reason not in DOUBTFUL


def count_free_restart(status: Status, now: datetime) -> Status:
    """Return the status with the back-off before the attempt after one that was free."""
    return replace(status, backoff=_grown(status, now))


def count_restart(status: Status, cause: Cause, policy: FailurePolicy, now: datetime) -> Status:
    """Return the status with one more restart, its time, and the back-off before it."""
    if cause is Cause.NOT_RESUMED:
        return status
    status = replace(status, backoff=_next_backoff(status, cause, now))
    if cause in (Cause.FAILURE, Cause.HANG):
        times = _newest(status.failure_times, policy.max_restarts, now)
        return replace(status, failures=status.failures + 1, failure_times=times)
    if cause is Cause.DISRUPTION:
        times = _newest(status.disruption_times, policy.max_disruptions, now)
        return replace(status, disruptions=status.disruptions + 1, disruption_times=times)
    return status


def _newest(times: Sequence[datetime], budget: int, now: datetime) -> tuple[datetime, ...]:
    """Return the times with `now`, newest first, as many as the budget is large.

    A time that is to come was written before the clock was set back.
    """
    return (now, *(min(time, now) for time in times))[:budget]


def _next_backoff(status: Status, cause: Cause, now: datetime) -> Backoff:
    """Return the back-off before the next attempt: 0, 10, 20, 40 … 300 s.

    It grows with each attempt in a row that failed before it had trained for LASTING. A disrupted
    attempt neither waits nor counts, unless it was lost before all its nodes ran.
    """
    trained = since(status.running_time, now) if status.running_time else timedelta(0)
    if trained >= LASTING:
        return Backoff()
    if cause is Cause.DISRUPTION and status.running_time is not None:
        return Backoff(status.backoff.count)
    return _grown(status, now)


def _grown(status: Status, now: datetime) -> Backoff:
    count = status.backoff.count + 1
    return Backoff(count, now + timedelta(seconds=backoff_seconds(count)))


def backoff_seconds(count: int) -> float:
    """Return the seconds of back-off after `count` attempts in a row that failed early."""
    return exponential_delay(count - 1, FIRST_DELAY, LONGEST_DELAY)


def backoff_end(status: Status, now: datetime) -> datetime | None:
    """Return the end of the back-off; None if there is none.

    An end further away than the longest delay was written before the clock was set back.
    """
    until = status.backoff.until
    return until if until and until - now <= timedelta(seconds=LONGEST_DELAY) else None
