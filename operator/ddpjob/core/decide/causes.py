"""The cause of the end of an attempt: the first failure in it, found from its pods.

The peers of a lost process fail a second later, but they are not the cause. Kubelets report in any
order. So only a certain finding gives a verdict at once: a disruption, or torchrun's failure
summary of a rank other than a follower. Otherwise the verdict waits until every pod has ended, at
most for SETTLE_TIME of the operator's own clock.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from ddpjob.core.api.names import Cause
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import LAST_MOMENT, later
from ddpjob.core.decide.budget import BY_TAINT
from ddpjob.core.decide.dead_nodes import find_end_of_node, is_not_ready, is_unreachable
from ddpjob.core.decide.describe import describe_pods
from ddpjob.core.decide.hangs import are_to_come
from ddpjob.core.decide.hints import hint_for
from ddpjob.core.decide.stacks import find_culprit, read_stacks
from ddpjob.core.observe.agent_state import WAITING
from ddpjob.core.observe.observation import Finding, Observation, Pod, TrainerState
from ddpjob.core.observe.pods import OOM_KILLED
from ddpjob.core.observe.termination import SETUP_FAILED
from ddpjob.core.observe.torchrun_log import (
    RENDEZVOUS_TIMEOUT,
    Summary,
    last_line,
)

# Longest wait for certain findings after the first failure.
SETTLE_TIME = timedelta(seconds=10)

# A kubelet's reasons for not admitting a pod. The node, not the job, is at fault.
REJECTED = re.compile(r"UnexpectedAdmissionError|OutOf\w+")

# Reasons of a pod's own failure, whatever the other pods report.
CERTAIN_REASONS = (OOM_KILLED, SETUP_FAILED)

# The most pods named in one message.
MAX_NAMED = 5

# The age of a heartbeat in the report on a hang.
AGE = re.compile(r"no heartbeat for (\d{1,9}) s")

# Every time zone differs from UTC by a multiple of this.
QUARTER = timedelta(minutes=15)

# Replaces an unknown time, so such a finding comes before those of its peers.
BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Verdict:
    """The cause of the end of an attempt: `reason` in one word, `message` in one sentence.

    `index` is the node in the gang. `pod` is None if the pod is gone. `script_missing`: Python did
    not find the script, so another attempt would fail in the same way. `exception`: the last line
    of the failed process's traceback, or of its output.
    """

    cause: Cause
    reason: str
    message: str
    index: int
    pod: Pod | None = None
    rank: int | None = None
    exit_code: int | None = None
    script_missing: bool = False
    exception: str = ""

    @property
    def is_own_failure(self) -> bool:
        """True if the pod itself failed. A follower has only lost its connection to a peer."""
        if self.cause is not Cause.FAILURE or self.pod is None:
            return False
        # The other ranks of the node may be followers of the rank in the summary.
        summary = self.pod.summary
        return not (summary.lost_peer if summary else self.pod.follower)

    @property
    def blames_node(self) -> bool:
        """True if the pod's Kubernetes node may be broken. A follower is no evidence of that."""
        # Nor is a rank that ended early, or a package index that did not answer.
        is_own = self.is_own_failure and self.reason not in (Reason.ENDED_EARLY, SETUP_FAILED)
        return is_own or bool(REJECTED.fullmatch(self.reason))


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
        verdict = min(certain, key=lambda ranked: ranked[0])[1]
        return _hang(obs) if verdict.cause is Cause.HANG else verdict
    failed = [pod for pod in obs.current if pod.state is TrainerState.FAILED]
    if not failed:
        return None
    early = _early_end(failed, obs)
    if early:
        return early
    silent = [pod for pod in obs.current if not pod.ended]
    if silent and now < settles_at(obs.status, now):
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


def settles_at(status: Status, now: datetime) -> datetime:
    """Return when an undecided failure is judged, by the operator's own clock.

    The kubelets' clocks may be wrong.
    """
    first_seen = status.attempt.undecided_since or now
    return later(first_seen, SETTLE_TIME)


def _not_resumed(obs: Observation, now: datetime) -> Verdict | None:
    """Return the verdict if a kept pod did not take part in the attempt.

    Most often it was lost, or failed, together with the culprit of the attempt before. That failure
    has been counted.
    """
    if obs.status.attempt.running_time:
        return None
    for index in obs.lost:
        if obs.status.attempt.born(index) < obs.attempt:
            return _stayed_in_vain(obs.pod_name(index), index, None)
    for pod in sorted(obs.current, key=lambda pod: pod.index):
        is_lost = pod.disruption or find_end_of_node(obs, pod, now)
        if obs.has_missed_attempt(pod) or (pod.born < obs.attempt and is_lost):
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
    named = _some([f"{describe_pods([pod])}{said(obs, pod)}" for pod in obs.silent])
    if obs.status.attempt.running_time is None:
        message = f"{named} did not become ready in the attempt; all pods are made anew"
        return Verdict(Cause.NOT_RESUMED, Reason.SILENT, message, first.index)
    message = f"{named} is not ready although it runs: its processes hang or cannot be reached"
    return Verdict(Cause.HANG, Reason.SILENT, message, first.index, first)


def _disruptions(obs: Observation, now: datetime) -> list[Ranked]:
    found = []
    for pod in obs.current:
        finding = pod.disruption or find_end_of_node(obs, pod, now)
        if finding:
            found.append(_disrupted(_of_node(finding, obs, pod), pod.index, pod))
    for index in obs.lost:
        name = obs.pod_name(index)
        message = f"pod {name} is gone: it was deleted, or its Kubernetes node was removed"
        # The time of the loss is not known. A certain failure was not caused by the loss.
        finding = Finding("PodDeleted", message, LAST_MOMENT)
        found.append(_disrupted(finding, index, None))
    return found


def _of_node(finding: Finding, obs: Observation, pod: Pod) -> Finding:
    """Return the finding, with the reason of a lost node if its taint has driven the pod away.

    Kubernetes taints a node when it is unreachable or not ready. Without the right to read nodes,
    any taint may be such a one.
    """
    if finding.reason != BY_TAINT or (obs.nodes and not is_not_ready(obs, pod.node_name)):
        return finding
    return replace(finding, reason=Reason.NODE_UNREACHABLE)


def _disrupted(finding: Finding, index: int, pod: Pod | None) -> Ranked:
    verdict = Verdict(Cause.DISRUPTION, finding.reason, finding.message, index, pod)
    return Precedence(finding.time or BEGINNING, False, index), verdict


def _certain_failures(obs: Observation, now: datetime) -> list[Ranked]:
    """Return the failures known to have begun on their node, whatever the other nodes report.

    A hang is certain when all pods have written their stacks.
    """
    found = []
    waits = are_to_come(obs, now, settles_at(obs.status, now))
    for pod in obs.current:
        if pod.state is not TrainerState.FAILED:
            continue
        summary = pod.summary
        has_cause = summary is not None and summary.certain
        is_certain = not waits if pod.hang else has_cause
        if is_certain or pod.own_limit or pod.exit_reason in CERTAIN_REASONS:
            time = _summary_time(pod, summary) or pod.finished or BEGINNING
            found.append((Precedence(time, True, pod.index), _failure(obs, pod, summary)))
    return found


def _failure(obs: Observation, pod: Pod, summary: Summary | None) -> Verdict:
    if pod.hang:
        return Verdict(Cause.HANG, Reason.HANG, pod.message, pod.index, pod, None, pod.exit_code)
    rank = None
    exit_code = pod.exit_code
    exception = ""
    if pod.own_limit:
        reason = pod.own_limit.reason
        message = (
            f"pod {pod.name} was evicted by its kubelet: {pod.own_limit.message}; raise "
            "resources.limits.ephemeral-storage or the volume's sizeLimit, or write less"
        )
    elif pod.exit_reason == OOM_KILLED:
        reason = OOM_KILLED
        message = (
            f"pod {pod.name} ran out of memory (OOMKilled); raise resources.limits.memory or "
            "use less memory"
        )
    elif pod.exit_reason == SETUP_FAILED:
        reason = Reason.SETUP_FAILED
        message = f"spec.setup failed in pod {pod.name}: {last_line(pod.message)}"
        hint = hint_for(obs.job, exit_code, "")
        message += f"; {hint}" if hint else ""
    elif summary is None:
        reason = pod.exit_reason or "Error"
        exception = last_line(pod.message)
        message = f"pod {pod.name} failed with exit code {pod.exit_code}"
        if exception:
            message += f": {exception}"
    else:
        reason = "WorkerFailed"
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
    return Verdict(
        Cause.FAILURE, reason, message, pod.index, pod, rank, exit_code, missing, exception
    )


def _hang(obs: Observation) -> Verdict:
    """Return the verdict on a hung gang, with the probable culprit's rank."""
    hung = [pod for pod in obs.current if pod.hang and pod.state is TrainerState.FAILED]
    stacks = {pod.name: read_stacks(pod.message) for pod in hung}
    ranks = {rank: pod for pod in hung for rank in stacks[pod.name]}
    steps = {r: pod.steps[obs.attempt][1] for r, pod in ranks.items() if obs.attempt in pod.steps}
    merged = {rank: stack for each in stacks.values() for rank, stack in each.items()}
    culprit = find_culprit(merged, steps)
    rank = culprit.ranks[0] if culprit else None
    pod = hung[0] if rank is None else ranks[rank]
    lines = pod.message.splitlines()[:-1]
    why = culprit.message if culprit else "no rank stands out" if len(merged) > 1 else ""
    exception = max((_exception_of(each) for each in hung), key=_age_in)
    own = [line for line in lines if rank is None or line.startswith(f"rank {rank}: ")]
    message = "; ".join(filter(None, [f"pod {pod.name} hangs: {exception}", why, *own]))
    return Verdict(Cause.HANG, Reason.HANG, message, pod.index, pod, rank, pod.exit_code)


def _exception_of(pod: Pod) -> str:
    return (pod.message.splitlines() or [""])[-1]


def _age_in(exception: str) -> int:
    """Return the age of the last heartbeat in the report of a pod, or -1 if it has none."""
    found = AGE.search(exception)
    return int(found[1]) if found else -1


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
    reason = Reason.RENDEZVOUS_TIMEOUT
    return Verdict(Cause.RENDEZVOUS, reason, message, pod.index, pod, None, pod.exit_code)


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
    innocent = all(_is_innocent(pod, bool(unreachable)) for pod in failed)
    # No process of a pod in its setup has connected to another one.
    connected = [pod for pod in silent if not pod.sets_up and not _only_waits(obs, pod)]
    suspects = unreachable or connected
    if not suspects or not innocent:
        return None
    failing = _failing_peer(suspects, obs)
    if failing:
        return failing
    mute = [pod for pod in suspects if obs.answer_of(pod) is None]
    described = [describe_pods([pod]) for pod in mute or suspects]
    message = f"the other pods lost their connection to {_some(described)}, which has not ended"
    first = (mute or suspects)[0]
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
        if answer and answer.failed:
            rank, code = answer.failed
            how = "" if code is None else f" with exit code {code}"
            message = f"rank {rank} in pod {pod.name} ended{how}, and its pod has not ended yet"
            reason = "WorkerFailed"
            return Verdict(Cause.FAILURE, reason, message, pod.index, pod, rank, code)
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
    answers = [(pod, obs.answer_of(pod)) for pod in obs.current if not pod.ended]
    is_known = all(answer for _, answer in answers)
    if not is_known or not all(_is_innocent(pod, False) for pod in failed):
        return None
    for pod, answer in answers:
        if answer and answer.ended_early:
            rank = answer.ended_early[0]
            others = [peer.summary.rank for peer in failed if peer.summary]
            other = f"rank {others[0]}" if others else "another rank"
            message = (
                f"rank {rank} in pod {pod.name} ended with exit code 0 while {other} was still "
                "training: do all ranks make the same number of steps?"
            )
            reason = Reason.ENDED_EARLY
            return Verdict(Cause.FAILURE, reason, message, pod.index, pod, rank, 0)
    return None


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
    return pod.follower, not pod.timed_out, _end_time(pod), pod.index


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list as text."""
    listed = ", ".join(names[:MAX_NAMED])
    return listed if len(names) <= MAX_NAMED else f"{listed} and {len(names) - MAX_NAMED} more"


def _end_time(pod: Pod) -> datetime:
    """Return when a trainer ended. An unknown time comes last."""
    return _summary_time(pod, pod.summary) or pod.finished or LAST_MOMENT


def _summary_time(pod: Pod, summary: Summary | None) -> datetime | None:
    """Return the summary's time in UTC.

    torchrun writes its container's local time. The offset of the time zone is the multiple of 15
    minutes that brings this time closest to the end of the pod.
    """
    if summary is None or summary.time is None or pod.finished is None:
        return summary.time if summary else None
    quarters = round((pod.finished - summary.time) / QUARTER)
    return later(summary.time, quarters * QUARTER)
