"""The budgets of a job: how many restarts it has used, and how long it waits before the next."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob.core.api.backoff import exponential_delay
from ddpjob.core.api.history import FIRST_DELAY, LONGEST_DELAY, Backoff
from ddpjob.core.api.names import Cause
from ddpjob.core.api.policy import FailurePolicy
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.observe.disruptions import BY_CRITICAL_POD, BY_KUBELET

# After an attempt in which all nodes ran for so long, the back-off begins anew.
LASTING = timedelta(minutes=5)

# Times of restarts in the status, unless the limit is larger.
KEPT_TIMES = 100

# Reasons of disruptions that may be a job's own fault: a rank with an early end looks like a lost
# peer, and a download may fill the disk of its node.
DOUBTFUL = (Reason.PEER_LOST, BY_KUBELET)

# Kubernetes' reason for the deletion of a pod without a toleration for its node's taint.
BY_TAINT = "DeletionByTaintManager"

# Reasons of announced disruptions: an eviction by the API as in a drain, a taint, a pod of higher
# priority, a critical pod in its place, and the shutdown of a node.
ANNOUNCED = (
    "EvictionByEvictionAPI",
    BY_TAINT,
    "PreemptionByScheduler",
    BY_CRITICAL_POD,
    Reason.NODE_SHUTDOWN,
    Reason.NODE_ENDING,
)


@dataclass(frozen=True)
class Budget:
    """One budget of a job.

    - `total` and `times`: its fields in `status.budget`, the restarts and their newest times.
    - `limit`: its field in the policy. `option`: the same field in a manifest.
    - `used_up`: the reason of a job without a restart left.
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
    "announced",
    "announced_times",
    "max_announced",
    "maxAnnouncedDisruptions",
    Reason.MAX_DISRUPTIONS,
)


def budget_of(status: Status, cause: Cause, reason: str) -> Budget | None:
    """Return the budget used by a restart, or None.

    A disruption before all nodes ran uses none: the pods were rejected by a kubelet, or their node
    went away. Otherwise a short fault of the cluster would use up any budget.
    """
    if reason == Reason.SCRIPT_NOT_FOUND:
        # The script was there before, so its volume may come back.
        return None
    if cause in (Cause.FAILURE, Cause.HANG):
        return FAILURES
    is_early = status.attempt.running_time is None and reason not in DOUBTFUL
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
    used = status.budget
    total: int = getattr(used, budget.total) - getattr(used.retried, budget.total)
    if policy.window is not None:
        total = sum(now - time <= policy.window for time in getattr(used, budget.times))
    return total >= limit


def count_restart(
    status: Status,
    cause: Cause,
    reason: str,
    policy: FailurePolicy,
    now: datetime,
) -> Status:
    """Return the status with one more restart, its time, and the back-off before it."""
    if cause is Cause.NOT_RESUMED:
        return status
    budget = budget_of(status, cause, reason)
    status = replace(status, backoff=_next_backoff(status, cause, now))
    if budget is None:
        return status
    limit = getattr(policy, budget.limit) or 0
    kept = max(limit, KEPT_TIMES)
    used = status.budget
    counted = {
        budget.total: getattr(used, budget.total) + 1,
        # The newest first. A smaller limit, or none, may become larger.
        budget.times: (now, *getattr(used, budget.times))[:kept],
    }
    return replace(status, budget=replace(used, **counted))


def _next_backoff(status: Status, cause: Cause, now: datetime) -> Backoff:
    """Return the back-off before the next attempt: 0, 10, 20, 40 … 300 s.

    It grows with each attempt in a row that ended before it had trained for LASTING. A disrupted
    attempt neither waits nor counts, unless it was lost before all its nodes ran.
    """
    if _has_lasted(status, now):
        return Backoff()
    if cause is Cause.DISRUPTION and status.attempt.running_time is not None:
        return Backoff(status.backoff.count)
    count = status.backoff.count + 1
    return Backoff(count, now + timedelta(seconds=backoff_seconds(count)))


def kept_backoff(status: Status, now: datetime) -> Backoff:
    """Return the back-off after an attempt without a failure, such as a suspended one."""
    return Backoff() if _has_lasted(status, now) else status.backoff


def _has_lasted(status: Status, now: datetime) -> bool:
    ran = status.attempt.running_time
    return ran is not None and now - ran >= LASTING


def backoff_seconds(count: int) -> float:
    """Return the seconds of back-off after `count` early failures in a row."""
    return exponential_delay(count - 1, FIRST_DELAY, LONGEST_DELAY)
