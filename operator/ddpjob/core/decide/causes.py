"""The cause of the end of an attempt: the first failure in it, found from its pods.

The peers of a lost process fail a second later, but they are not the cause. Kubelets report in any
order. So only a certain finding gives a verdict at once: a disruption, or torchrun's failure
summary of a rank other than a follower. Otherwise the verdict waits until every pod has ended, at
most for SETTLE_TIME of the operator's own clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from ddpjob.core.api.names import Cause
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.times import LAST_MOMENT, later
from ddpjob.core.decide.accounting import has_trained
from ddpjob.core.decide.budget import BY_TAINT
from ddpjob.core.decide.dead_nodes import find_end_of_node, is_not_ready, is_unreachable
from ddpjob.core.decide.describe import describe_pods
from ddpjob.core.decide.hangs import are_to_come, hang_verdict
from ddpjob.core.decide.hints import hint_for
from ddpjob.core.decide.verdict import Verdict
from ddpjob.core.observe.agent_state import WAITING
from ddpjob.core.observe.observation import Finding, Observation, Pod, TrainerState
from ddpjob.core.observe.pods import NOT_STARTED, OOM_KILLED
from ddpjob.core.observe.termination import SETUP_FAILED
from ddpjob.core.observe.torchrun_log import (
    RENDEZVOUS_TIMEOUT,
    Summary,
    last_line,
)

# Longest wait for certain findings after the first failure.
SETTLE_TIME = timedelta(seconds=10)
# The same after a hang. An agent with the order to write stacks needs ORDER_SECONDS and
# STACK_SECONDS, and its report a moment more.
HANG_SETTLE_TIME = timedelta(seconds=20)

# Reasons of a pod's own failure, whatever the other pods report.
CERTAIN_REASONS = (OOM_KILLED, SETUP_FAILED)

# The reason of a failed rank.
WORKER_FAILED = "WorkerFailed"

# The most pods named in one message.
MAX_NAMED = 5

# Every time zone differs from UTC by a multiple of this.
QUARTER = timedelta(minutes=15)

# Replaces an unknown time, so such a finding comes before those of its peers.
BEGINNING = datetime.min.replace(tzinfo=UTC)


class Undecided:
    """A trainer failed, and the cause is not certain yet."""


UNDECIDED = Undecided()


@dataclass(frozen=True, order=True)
class Precedence:
    """Order of certain findings: the earliest first, then disruptions, then by node."""

    time: datetime
    is_failure: bool
    index: int


Ranked = tuple[Precedence, Verdict]


def judge(obs: Observation, now: datetime) -> Verdict | Undecided | None:
    """Return the verdict on the current attempt, or None if no pod has failed or was lost.

    The verdict does not depend on the order of the pods.
    """
    not_resumed = _not_resumed(obs, now)
    if not_resumed:
        return not_resumed
    certain = [*_disruptions(obs, now), *_certain_failures(obs, now)]
    if certain:
        _, verdict = min(certain, key=lambda ranked: ranked[0])
        return hang_verdict(obs) if verdict.cause is Cause.HANG else verdict
    failed = [pod for pod in obs.current if pod.failed]
    if not failed:
        return None
    early = _early_end(failed, obs)
    if early:
        return early
    silent = [pod for pod in obs.current if not pod.ended]
    if silent and now < settles_at(obs, now):
        return UNDECIDED
    first = min(failed, key=_suspicion)
    return (
        _rendezvous_verdict(first, obs)
        or _silent_peer_verdict(failed, silent, obs)
        or _failure(obs, first, first.summary)
    )


def certain_verdict(obs: Observation, now: datetime) -> Verdict | None:
    """Return the verdict on the current attempt if there is one already."""
    verdict = judge(obs, now)
    return verdict if isinstance(verdict, Verdict) else None


def settles_at(obs: Observation, now: datetime) -> datetime:
    """Return when an undecided failure is judged, by the operator's own clock.

    The kubelets' clocks may be wrong.
    """
    first_seen = obs.status.attempt.undecided_since or now
    has_hung = any(pod.hang and pod.failed for pod in obs.current)
    return later(first_seen, HANG_SETTLE_TIME if has_hung else SETTLE_TIME)


def _not_resumed(obs: Observation, now: datetime) -> Verdict | None:
    """Return the verdict if a kept pod did not take part in the attempt.

    Most often it was lost, or failed, together with the culprit of the attempt before. That failure
    has been counted.
    """
    if obs.status.attempt.running_time:
        return None
    for index in obs.lost:
        born = obs.status.attempt.born(index)
        if born < obs.attempt:
            return _stayed_in_vain(obs.pod_name(index), index, None)
    for pod in sorted(obs.current, key=lambda pod: pod.index):
        was_kept = pod.born < obs.attempt
        is_lost = pod.disruption or find_end_of_node(obs, pod, now)
        if obs.has_missed_attempt(pod) or (was_kept and is_lost):
            return _stayed_in_vain(pod.name, pod.index, pod)
    return None


def _stayed_in_vain(name: str, index: int, pod: Pod | None) -> Verdict:
    message = f"pod {name} had stayed for the attempt, and ended before it took part"
    return Verdict(Cause.NOT_RESUMED, Reason.NOT_RESUMED, message, index, pod)


def judge_silence(obs: Observation) -> Verdict:
    """Return the verdict on a gang if some of its pods are not ready for too long.

    If the pods have never met in this attempt, the kept pods may be at fault.
    """
    first = obs.silent[0]
    described = [describe_pods([pod]) + said(obs, pod) for pod in obs.silent]
    named = _some(described)
    if obs.status.attempt.running_time is None:
        message = f"{named} did not become ready in the attempt; all pods are made anew"
        return Verdict(Cause.NOT_RESUMED, Reason.SILENT, message, first.index)
    message = f"{named} is not ready although it runs: its processes hang or cannot be reached"
    return Verdict(Cause.HANG, Reason.SILENT, message, first.index, first)


def _disruptions(obs: Observation, now: datetime) -> list[Ranked]:
    found = []
    for pod in obs.current:
        finding = pod.disruption or find_end_of_node(obs, pod, now) or _not_started(obs, pod)
        if finding:
            finding = _of_node(finding, obs, pod)
            found.append(_disrupted(finding, pod.index, pod))
    for index in obs.lost:
        name = obs.pod_name(index)
        message = f"pod {name} is gone: it was deleted, or its Kubernetes node was removed"
        # The time of the loss is not known. A certain failure was not caused by the loss.
        finding = Finding("PodDeleted", message, LAST_MOMENT)
        found.append(_disrupted(finding, index, None))
    return found


def _not_started(obs: Observation, pod: Pod) -> Finding | None:
    """Return why the runtime could not start the trainer of a job whose image is known to work."""
    if pod.exit_reason not in NOT_STARTED or not has_trained(obs.status):
        return None
    message = f"the container runtime could not start pod {pod.name}: {last_line(pod.message)}"
    return Finding(pod.exit_reason, message, pod.finished)


def _of_node(finding: Finding, obs: Observation, pod: Pod) -> Finding:
    """Return the finding, with the reason of a lost node if its taint has driven the pod away.

    Kubernetes taints a node when it is unreachable or not ready. Without the right to read nodes,
    any taint may be such a one.
    """
    if finding.reason != BY_TAINT:
        return finding
    if obs.nodes and not is_not_ready(obs, pod.node_name):
        return finding
    return replace(finding, reason=Reason.NODE_UNREACHABLE)


def _disrupted(finding: Finding, index: int, pod: Pod | None) -> Ranked:
    verdict = Verdict(Cause.DISRUPTION, finding.reason, finding.message, index, pod)
    precedence = Precedence(
        finding.time or BEGINNING,
        is_failure=False,
        index=index,
    )
    return precedence, verdict


def _certain_failures(obs: Observation, now: datetime) -> list[Ranked]:
    """Return the failures known to have begun on their node, whatever the other nodes report.

    A hang is certain when all pods have written their stacks.
    """
    found = []
    waits = are_to_come(obs, now, settles_at(obs, now))
    for pod in obs.current:
        if not pod.failed:
            continue
        has_cause = pod.summary is not None and pod.summary.certain
        is_certain = not waits if pod.hang else has_cause
        if is_certain or pod.own_limit or pod.exit_reason in CERTAIN_REASONS:
            precedence = Precedence(
                _end_time(pod) or BEGINNING,
                is_failure=True,
                index=pod.index,
            )
            found.append((precedence, _failure(obs, pod, pod.summary)))
    return found


def _failure(obs: Observation, pod: Pod, summary: Summary | None) -> Verdict:
    if pod.hang:
        return Verdict(
            Cause.HANG,
            Reason.HANG,
            pod.message,
            pod.index,
            pod,
            exit_code=pod.exit_code,
        )
    own = _own_failure(obs, pod)
    if summary and summary.ended_early and not own:
        place = f"rank {summary.rank} in pod {pod.name}"
        message = summary.exception.replace(f"rank {summary.rank}", place, 1)
        return _ended_early(pod, summary.rank, message)
    rank = None
    exit_code = pod.exit_code
    exception = ""
    if own:
        reason = own.reason
        message = own.message
    elif summary is None:
        reason = pod.exit_reason or "Error"
        exception = last_line(pod.message)
        message = f"pod {pod.name} failed with exit code {pod.exit_code}"
        if exception:
            message += f": {exception}"
    else:
        reason = WORKER_FAILED
        rank = summary.rank
        exit_code = summary.exit_code
        exception = summary.exception
        message = f"rank {rank} in pod {pod.name} failed with exit code {exit_code}"
        if exception:
            message += f": {exception}"
        hint = hint_for(obs.job, exit_code, exception)
        if hint:
            message += f"; {hint}"
    missing = summary is not None and summary.script_missing
    if missing and has_trained(obs.status):
        reason = Reason.SCRIPT_NOT_FOUND
    return Verdict(
        Cause.FAILURE,
        reason,
        message,
        pod.index,
        pod,
        rank,
        exit_code,
        script_missing=missing,
        exception=exception,
    )


def _own_failure(obs: Observation, pod: Pod) -> Finding | None:
    """Return what a kubelet or the setup says of a failed pod, or None."""
    if pod.own_limit:
        message = (
            f"pod {pod.name} was evicted by its kubelet: {pod.own_limit.message}; raise "
            "resources.limits.ephemeral-storage or the volume's sizeLimit, or write less"
        )
        return Finding(pod.own_limit.reason, message)
    if pod.exit_reason == OOM_KILLED:
        message = (
            f"pod {pod.name} ran out of memory (OOMKilled); raise resources.limits.memory or "
            "use less memory"
        )
        return Finding(OOM_KILLED, message)
    if pod.exit_reason == SETUP_FAILED:
        message = f"spec.setup failed in pod {pod.name}: {last_line(pod.message)}"
        hint = hint_for(obs.job, pod.exit_code, "")
        if hint:
            message += f"; {hint}"
        return Finding(Reason.SETUP_FAILED, message)
    return None


def _rendezvous_verdict(pod: Pod, obs: Observation) -> Verdict | None:
    """Return the verdict if the rendezvous timed out before every node had started.

    The job itself did not fail then.
    """
    late = [other.name for other in obs.current if not other.started]
    if not obs.latched:
        late += [obs.pod_name(index) for index in obs.missing]
    if not late or not RENDEZVOUS_TIMEOUT.search(pod.message):
        return None
    message = f"the rendezvous timed out; not started by then: {_some(late)}"
    return Verdict(
        Cause.RENDEZVOUS,
        Reason.RENDEZVOUS_TIMEOUT,
        message,
        pod.index,
        pod,
        exit_code=pod.exit_code,
    )


def _silent_peer_verdict(
    failed: Sequence[Pod],
    silent: Sequence[Pod],
    obs: Observation,
) -> Verdict | None:
    """Return the verdict if every failed pod has only lost a peer, and a pod has not ended.

    The silent pod is the peer: its node has crashed, it is cut off, or it hangs. A failed pod
    without a text may be a follower too. It counts as one if the silent pod's node is unreachable.
    """
    unreachable = [pod for pod in silent if is_unreachable(obs, pod.node_name)]
    if not all(_is_innocent(pod, bool(unreachable)) for pod in failed):
        return None
    # No process of a pod in its setup has connected to another one.
    connected = [pod for pod in silent if not pod.sets_up and not _only_waits(obs, pod)]
    suspects = unreachable or connected
    if not suspects:
        return None
    failing = _failing_peer(suspects, obs)
    if failing:
        return failing
    mute = [pod for pod in suspects if obs.answer_of(pod) is None]
    peers = mute or suspects
    first = peers[0]
    described = [describe_pods([pod]) for pod in peers]
    message = f"the other pods lost their connection to {_some(described)}, which has not ended"
    if mute:
        message += ": its node or network failed, or it hangs"
        return Verdict(Cause.DISRUPTION, Reason.PEER_LOST, message, first.index, first)
    # Its node and the way to it work.
    message += f" and answers{said(obs, first)}: its processes hang, or are slower than a time-out"
    return Verdict(Cause.HANG, Reason.PEER_HANGS, message, first.index, first)


def _failing_peer(suspects: Sequence[Pod], obs: Observation) -> Verdict | None:
    """Return the verdict if a rank of a pod has failed, and the pod has not ended yet."""
    for pod in suspects:
        answer = obs.answer_of(pod)
        if answer is None or answer.failed is None:
            continue
        rank, code = answer.failed
        how = "" if code is None else f" with exit code {code}"
        message = f"rank {rank} in pod {pod.name} ended{how}, and its pod has not ended yet"
        return Verdict(
            Cause.FAILURE,
            WORKER_FAILED,
            message,
            pod.index,
            pod,
            rank,
            exit_code=code,
        )
    return None


def _only_waits(obs: Observation, pod: Pod) -> bool:
    """Return True if the processes of a pod have ended, and its agent waits for an attempt."""
    answer = obs.answer_of(pod)
    return answer is not None and answer.activity == WAITING


def said(obs: Observation, pod: Pod) -> str:
    """Return what the agent of a pod has answered, in brackets, or an empty string."""
    words = str(obs.answer_of(pod) or "")
    return f" ({words})" if words else ""


def _early_end(failed: Sequence[Pod], obs: Observation) -> Verdict | None:
    """Return the verdict if a rank has ended with 0, and the failed ranks have only lost it.

    There is none unless every running pod has answered: a mute pod may be the lost peer.
    """
    if not all(_is_innocent(pod, False) for pod in failed):
        return None
    running = [pod for pod in obs.current if not pod.ended]
    answers = [(pod, answer) for pod in running if (answer := obs.answer_of(pod))]
    if len(answers) < len(running):
        return None
    for pod, answer in answers:
        if answer.ended_early:
            rank = answer.ended_early[0]
            return _ended_early(pod, rank, _early_message(pod, rank, failed))
    if any(answer.failed for _, answer in answers):
        return None
    # All ranks of such a pod have ended.
    for pod in obs.current:
        if pod.state is TrainerState.SUCCEEDED and not obs.has_missed_attempt(pod):
            rank = pod.index * obs.status.resolved.nproc_per_node
            return _ended_early(pod, rank, _early_message(pod, rank, failed))
    return None


def _early_message(pod: Pod, rank: int, failed: Sequence[Pod]) -> str:
    others = [peer.summary.rank for peer in failed if peer.summary]
    other = f"rank {others[0]}" if others else "another rank"
    return (
        f"rank {rank} in pod {pod.name} ended with exit code 0 while {other} was still "
        "training: do all ranks make the same number of steps?"
    )


def _ended_early(pod: Pod, rank: int, message: str) -> Verdict:
    return Verdict(
        Cause.FAILURE,
        Reason.ENDED_EARLY,
        message,
        pod.index,
        pod,
        rank,
        exit_code=0,
    )


def _is_innocent(pod: Pod, ambiguous_too: bool) -> bool:
    summary = pod.summary
    if summary is None:
        return pod.follower
    return summary.lost_peer or (summary.ambiguous and ambiguous_too)


def _suspicion(pod: Pod) -> tuple[bool, bool, datetime, int]:
    """Return the sort key of a failed pod. The best evidence of the cause comes first.

    Followers come last, and among them those with a broken connection: their peer may have ended
    because it had waited too long for a third process.
    """
    ended = _end_time(pod) or LAST_MOMENT
    return pod.follower, not pod.timed_out, ended, pod.index


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list as text."""
    listed = ", ".join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{listed} and {more} more" if more > 0 else listed


def _end_time(pod: Pod) -> datetime | None:
    """Return when a trainer ended, or None if the time is not known."""
    return _summary_time(pod, pod.summary) or pod.finished


def _summary_time(pod: Pod, summary: Summary | None) -> datetime | None:
    """Return the summary's time in UTC.

    torchrun writes its container's local time. The offset of the time zone is the multiple of 15
    minutes that brings this time closest to the end of the pod.
    """
    if summary is None:
        return None
    if summary.time is None or pod.finished is None:
        return summary.time
    quarters = round((pod.finished - summary.time) / QUARTER)
    return later(summary.time, quarters * QUARTER)
