"""The cause of the end of an attempt: the first failure in it, found from its pods.

The peers of a lost process fail a second later, but they are not the cause. Kubelets report in any
order. So only a certain finding gives a verdict at once: a disruption, or torchrun's failure
summary of a rank that is not a follower. Otherwise the verdict waits until every pod has ended, at
most for SETTLE_TIME.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ddpjob.core.names import Cause, Reason
from ddpjob.core.observe import Finding, Pod, TrainerState
from ddpjob.core.torchrun_log import (
    RENDEZVOUS_TIMEOUT,
    Summary,
    is_follower,
    last_line,
    parse_summary,
)

# Longest wait for certain findings after the first failure.
SETTLE_TIME = timedelta(seconds=10)

# Every time zone differs from UTC by a multiple of this.
QUARTER = timedelta(minutes=15)

# Replaces an unknown time, so that such a finding comes before those of its peers.
BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Verdict:
    """The cause of the end of an attempt: `reason` in one word, `message` in one sentence.

    `index` is the node in the gang. `pod` is None if the pod is gone.
    """

    cause: Cause
    reason: str
    message: str
    index: int
    pod: Pod | None = None
    rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Undecided:
    """A trainer failed, and the cause is not certain yet. Decide at `until` at the latest."""

    until: datetime


@dataclass(frozen=True, order=True)
class Precedence:
    """Order of certain findings: the earliest first, then disruptions, then by node."""

    time: datetime
    is_failure: bool
    index: int


Ranked = tuple[Precedence, Verdict]


def judge(
    pods: Sequence[Pod], lost: Sequence[int], now: datetime, not_created: Sequence[int] = ()
) -> Verdict | Undecided | None:
    """Return the verdict on an attempt, or None if no pod has failed or was lost.

    `lost` are the indices of pods that had been seen and are gone. `not_created` are the indices of
    pods that were not created yet. The verdict does not depend on the order of `pods`.
    """
    certain = [*_disruptions(pods, lost), *_certain_failures(pods)]
    if certain:
        return min(certain, key=lambda ranked: ranked[0])[1]
    failed = [pod for pod in pods if pod.state is TrainerState.FAILED]
    if not failed:
        return None
    settled = min(_end_time(pod, now) for pod in failed) + SETTLE_TIME
    if now < settled and not all(pod.ended for pod in pods):
        return Undecided(settled)
    # Followers come last: one of them is named only if all are followers.
    first = min(failed, key=lambda pod: (is_follower(pod.message), _end_time(pod, now), pod.index))
    return _uncertain_verdict(first, pods, not_created)


def _disruptions(pods: Sequence[Pod], lost: Sequence[int]) -> list[Ranked]:
    found = []
    for pod in pods:
        if pod.disruption:
            found.append(_disrupted(pod.disruption, pod.index, pod))
    for index in lost:
        finding = Finding("PodDeleted", f"the pod of node {index} is gone")
        found.append(_disrupted(finding, index, None))
    return found


def _disrupted(finding: Finding, index: int, pod: Pod | None) -> Ranked:
    verdict = Verdict(Cause.DISRUPTION, finding.reason, finding.message, index, pod)
    return Precedence(finding.time or BEGINNING, False, index), verdict


def _certain_failures(pods: Sequence[Pod]) -> list[Ranked]:
    """Return failures that began on their node, whatever the other nodes report."""
    found = []
    for pod in pods:
        if pod.state is not TrainerState.FAILED:
            continue
        summary = parse_summary(pod.message)
        is_certain = summary is not None and summary.certain
        if is_certain or pod.exit_reason == "OOMKilled":
            time = _summary_time(pod, summary) or pod.finished or BEGINNING
            found.append((Precedence(time, True, pod.index), _failure(pod, summary)))
    return found


def _failure(pod: Pod, summary: Summary | None) -> Verdict:
    rank = None
    exit_code = pod.exit_code
    if pod.exit_reason == "OOMKilled":
        reason = "OOMKilled"
        message = (
            f"node {pod.index} ran out of memory (OOMKilled); raise resources.limits.memory or "
            "use less memory"
        )
    elif summary is None:
        reason = pod.exit_reason or "Error"
        line = last_line(pod.message)
        message = f"node {pod.index} failed with exit code {pod.exit_code}"
        if line:
            message += f": {line}"
    else:
        reason = "WorkerFailed"
        rank = summary.rank
        exit_code = summary.exit_code
        message = f"rank {rank} on node {pod.index} failed with exit code {exit_code}"
        if summary.exception:
            message += f": {summary.exception}"
    return Verdict(Cause.FAILURE, reason, message, pod.index, pod, rank, exit_code)


def _uncertain_verdict(pod: Pod, pods: Sequence[Pod], not_created: Sequence[int]) -> Verdict:
    """Return the verdict if nothing certain was found.

    If the rendezvous timed out before every node had started, the job itself did not fail.
    """
    late = sorted(other.name for other in pods if not other.started)
    late += [f"node {index}" for index in not_created]
    if RENDEZVOUS_TIMEOUT.search(pod.message) and late:
        message = f"the rendezvous timed out before these had started: {', '.join(late)}"
        reason = Reason.RENDEZVOUS_TIMEOUT
        return Verdict(Cause.RENDEZVOUS, reason, message, pod.index, pod, None, pod.exit_code)
    return _failure(pod, parse_summary(pod.message))


def _end_time(pod: Pod, now: datetime) -> datetime:
    return _summary_time(pod, parse_summary(pod.message)) or pod.finished or now


def _summary_time(pod: Pod, summary: Summary | None) -> datetime | None:
    """Return the summary's time in UTC.

    torchrun writes its container's local time. The quarters of an hour that bring it closest to the
    end of the pod are the offset of its time zone.
    """
    if summary is None or summary.time is None or pod.finished is None:
        return summary.time if summary else None
    quarters = round((pod.finished - summary.time) / QUARTER)
    return summary.time + quarters * QUARTER
