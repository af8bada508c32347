"""The budgets of a job: how many restarts it has used, and how long it waits before the next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob.core.api.backoff import exponential_delay
from ddpjob.core.api.history import Backoff
from ddpjob.core.api.names import Cause
from ddpjob.core.api.policy import FailurePolicy
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import since
from ddpjob.core.observe.pods import BY_KUBELET, EVICTED

# After an attempt in which all nodes ran for so long, the back-off begins anew.
LASTING = timedelta(minutes=5)

# Seconds of back-off. There is no wait after the first early failure in a row.
FIRST_DELAY = 10
LONGEST_DELAY = 300

# Reasons of disruptions that may be a job's own fault: a rank that ended too early looks like a
# lost peer, and a download may fill the disk of its node.
DOUBTFUL = (Reason.PEER_LOST, BY_KUBELET, EVICTED)

# The reason of Kubernetes for a pod that does not tolerate a taint of its node.
BY_TAINT = "DeletionByTaintManager"

# Reasons of disruptions that were announced: an eviction by the API as in a drain, a taint,
# a pod of higher priority, and the shutdown of a node.
ANNOUNCED = (
    "EvictionByEvictionAPI",
    BY_TAINT,
    "PreemptionByScheduler",
    Reason.NODE_SHUTDOWN,
    Reason.NODE_ENDING,
)


@dataclass(frozen=True)
class Budget:
    """One budget of a job.

    - `total` and `times`: its fields in the status, the restarts and the newest of their times.
    - `limit`: its field in the policy. `option`: that field in a manifest.
    - `used_up`: the reason of a job that has no restart left.
    """

    total: str
    times: str
    limit: str
    option: str
    used_up: Reason


FAILURES = Budget("failures", "failure_times", "max_restarts", "maxRestarts", Reason.MAX_RESTARTS)
DISRUPTIONS = Budget(
    "disruptions", "disruption_times", "max_disruptions", "maxDisruptions", Reason.MAX_DISRUPTIONS
)
ANNOUNCED_DISRUPTIONS = Budget(
    "announced_disruptions",
    "announced_times",
    "max_announced",
    "maxAnnouncedDisruptions",
    Reason.MAX_DISRUPTIONS,
)


def budget_of(status: Status, cause: Cause, reason: str) -> Budget | None:
    """Return the budget that a restart uses, or None.

    An attempt that the cluster has lost before all its nodes ran uses none: its pods were rejected
    by a kubelet, or their node went away. A short fault of the cluster would use up any budget.
    """
    if cause in (Cause.FAILURE, Cause.HANG):
        return FAILURES
    is_early = status.running_time is None and reason not in DOUBTFUL
    if cause is not Cause.DISRUPTION or is_early:
        return None
    return ANNOUNCED_DISRUPTIONS if reason in ANNOUNCED else DISRUPTIONS


def is_used_up(status: Status, budget: Budget, policy: FailurePolicy, now: datetime) -> bool:
    """Return True if one more restart would exceed a budget.

    Restarts before the job was last taken up again do not count. With a window, only those within
    it do.
    """
    limit: int | None = getattr(policy, budget.limit)
    if limit is None:
        return False
    total: int = getattr(status, budget.total) - getattr(status.retried, budget.total)
    if policy.window is not None:
        total = sum(since(time, now) <= policy.window for time in getattr(status, budget.times))
    return total >= limit


def count_restart(
    status: Status, cause: Cause, reason: str, policy: FailurePolicy, now: datetime
) -> Status:
    """Return the status with one more restart, its time, and the back-off before it."""
    if cause is Cause.NOT_RESUMED:
        return status
    budget = budget_of(status, cause, reason)
    status = replace(status, backoff=_next_backoff(status, cause, now))
    if budget is None:
        return status
    limit = getattr(policy, budget.limit) or 0
    counted = {
        budget.total: getattr(status, budget.total) + 1,
        budget.times: _newest(getattr(status, budget.times), limit, now),
    }
    return replace(status, **counted)


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
    if _has_lasted(status, now):
        return Backoff()
    if cause is Cause.DISRUPTION and status.running_time is not None:
        return Backoff(status.backoff.count)
    count = status.backoff.count + 1
    return Backoff(count, now + timedelta(seconds=backoff_seconds(count)))


def kept_backoff(status: Status, now: datetime) -> Backoff:
    """Return the back-off after an attempt that did not fail, such as a suspended one."""
    return Backoff() if _has_lasted(status, now) else status.backoff


def _has_lasted(status: Status, now: datetime) -> bool:
    return status.running_time is not None and since(status.running_time, now) >= LASTING


def backoff_seconds(count: int) -> float:
    """Return the seconds of back-off after `count` attempts in a row that failed early."""
    return exponential_delay(count - 1, FIRST_DELAY, LONGEST_DELAY)


def backoff_end(status: Status, now: datetime) -> datetime | None:
    """Return the end of the back-off; None if there is none.

    An end further away than the longest delay was written before the clock was set back.
    """
    until = status.backoff.until
    return until if until and until - now <= timedelta(seconds=LONGEST_DELAY) else None
