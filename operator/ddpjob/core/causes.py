"""Why an attempt ended: the first thing that went wrong in it, judged from what its pods say.

Peers of a lost process fail a second later and must not be blamed; kubelets report in any order. So a verdict is given
at once only on what is certain: a sign of disruption, or torchrun's failure summary of a rank that is nobody's follower.
Facts: torchrun's agent itself always exits with 1; the summary is the tail of its log, which the kubelet keeps as the
termination message (2048 bytes); the agent's own log line carries microseconds, the summary whole seconds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from ddpjob.core.names import Cause, Reason
from ddpjob.core.observe import Fate, Pod, Sign

SETTLE = timedelta(seconds=10)
"""How long an uncertain first end waits for something better to be known."""

FOLLOWER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|remote process exited or there was a network error|NCCL communicator was aborted|ncclRemoteError"
    r"|RendezvousConnectionError|RendezvousClosedError|RendezvousStateError|recvValue failed|sendBytes failed"
    r"|Socket Timeout|Timed out waiting \d+ms for (send|recv) operation|Application timeout caused pair closure"
)
"""What a process says that lost its peer: it blames nobody."""

INTERRUPTED = (143, -15)
"""Ended by SIGTERM, or by a script's own answer to it: somebody took a pod away, which its own sign has yet to say."""

RENDEZVOUS_TIMEOUT = re.compile(r"RendezvousTimeoutError|RendezvousConnectionError")

AGENT_LINE = re.compile(r"^E(\d{4} \d\d:\d\d:\d\d\.\d+) .*failed \(exitcode: -?\d+\)", re.MULTILINE)
ROOT_CAUSE = "Root Cause (first observed failure):"
FIELD = re.compile(r"[ \t]*(time|rank|exitcode)[ \t]+: (\S+)(.*)")
PID = re.compile(r"\(pid: \d+\)")
EXCEPTION = re.compile(
    r"^[ \t]*(?:\[rank\d+\]:\s?)?(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Timeout)\b(?::.*)?)$",
    re.MULTILINE,
)
INTERPRETER = re.compile(r"^\S*python[\d.]*: (.+)$", re.MULTILINE)
"""What Python itself says when it finds no script or no module to run: its words, and no exception."""
LAUNCHER_ERROR = re.compile(
    r"^[\w.]*(?:ChildFailedError|SignalException|Rendezvous\w*Error)\b", re.MULTILINE
)
TRACEBACK = "Traceback (most recent call last):\n  File "

QUARTER = timedelta(minutes=15)
"""Every time zone is a whole number of these away from UTC."""

MOST_LINES = 400
RANK, EXIT_CODE = re.compile(r"[0-9]{1,9}"), re.compile(r"-?[0-9]{1,9}")

CUT = 2040
"""A termination message this long (bytes) is the tail of a log, so its first line may be half a line."""

SILENT = (1, -6)
"""What an uncaught exception and a watchdog's abort leave: without its words nobody can tell a culprit from a follower.
Eight processes fill the whole message with their summary, so on such nodes this is the usual case."""


@dataclass(frozen=True)
class Summary:
    """torchrun's account of the first failure on one node."""

    rank: int
    exit_code: int
    time: datetime | None
    exception: str
    follower: bool
    silent: bool

    @property
    def certain(self) -> bool:
        """Whether this rank failed on its own account, whatever the other nodes may say."""
        return not self.follower and not self.silent


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended. `reason` one word, `message` a sentence; `pod` None where it is gone."""

    cause: Cause
    reason: str
    message: str
    index: int
    pod: Pod | None = None
    rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Undecided:
    """Something ended, but who is to blame is not certain before `until`."""

    until: datetime


@lru_cache(maxsize=4096)
def read_summary(message: str) -> Summary | None:
    """torchrun's failure summary in a termination message, if there is one.

    Line by line, and each message once: whoever writes the message must not be able to make reading it slow.
    """
    before, header, after = message.rpartition(ROOT_CAUSE)
    lines = after.splitlines()[:MOST_LINES]
    fields = {found[1]: found for line in lines if (found := FIELD.match(line))}
    if (
        not header
        or not RANK.fullmatch(_value(fields, "rank"))
        or not EXIT_CODE.fullmatch(_value(fields, "exitcode"))
    ):
        return None
    rank, code = int(_value(fields, "rank")), int(_value(fields, "exitcode"))
    rest = after.partition(fields["exitcode"][0])[2]
    signal = PID.sub("", fields["exitcode"][3])
    written = _of_the_script(_whole_lines(before, cut=len(message.encode(errors="replace")) >= CUT))
    words = rest if EXCEPTION.search(rest) else _words_of(rank, written)
    exception = _last_exception(words)
    return Summary(
        rank=rank,
        exit_code=code,
        time=_failure_time(before, _value(fields, "time")),
        exception=exception or signal.strip(" ()"),
        follower=code in INTERRUPTED or bool(FOLLOWER.search(words)),
        silent=code in SILENT and not exception,
    )


def _value(fields: Mapping[str, re.Match[str]], name: str) -> str:
    return fields[name][2] if name in fields else ""


def _of_the_script(text: str) -> str:
    """What the user's processes wrote: everything above the launcher's own traceback, which may be all that is left."""
    error = LAUNCHER_ERROR.search(text)
    return text[: max(0, text.rfind(TRACEBACK, 0, error.start()))] if error else text


def _whole_lines(text: str, *, cut: bool) -> str:
    return text.partition("\n")[2] if cut else text


def _words_of(rank: int, text: str) -> str:
    """The lines of one rank, as torch marks those of an uncaught exception; where it marked none, the unmarked lines."""
    lines = text.splitlines()
    own = [line for line in lines if line.startswith(f"[rank{rank}]:")]
    return "\n".join(own or [line for line in lines if not line.startswith("[rank")])


def _last_exception(text: str) -> str:
    found = EXCEPTION.findall(text) or INTERPRETER.findall(text)
    return str(found[-1]).strip()[:500] if found else ""


def _failure_time(before: str, summary_time: str) -> datetime | None:
    """The agent's log line (MMDD and microseconds) with the summary's year; the summary alone where the line was cut off."""
    try:
        moment = datetime.strptime(summary_time, "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC)
        lines = AGENT_LINE.findall(before)
        return (
            datetime.strptime(f"{moment.year}{lines[0]}", "%Y%m%d %H:%M:%S.%f").replace(tzinfo=UTC)
            if lines
            else moment
        )
    except ValueError:
        return None


def judge(
    pods: Sequence[Pod], vanished: Sequence[int], now: datetime, unborn: Sequence[int] = ()
) -> Verdict | Undecided | None:
    """The verdict on an attempt; None while nothing has gone wrong. Does not depend on the order of `pods`.

    `vanished`: indices whose pods had been seen and are gone. `unborn`: indices whose pods were not created yet.
    """
    certain = [*_disruptions(pods, vanished), *_own_failures(pods)]
    if certain:
        return min(certain, key=lambda c: c[0])[1]
    failed = sorted(
        (p for p in pods if p.fate is Fate.FAILED), key=lambda p: (_blame(p), _end(p, now), p.index)
    )
    if not failed:
        return None
    settled = min(_end(p, now) for p in failed) + SETTLE
    if now < settled and not all(p.ended for p in pods):
        return Undecided(settled)
    return _uncertain(failed[0], pods, unborn)


Ranked = tuple[tuple[datetime, int, int], Verdict]
BEGINNING = datetime.min.replace(tzinfo=UTC)


def _disruptions(pods: Sequence[Pod], vanished: Sequence[int]) -> list[Ranked]:
    """Signs of disruption; one without a time outranks whatever its peers did about it."""
    signs = [(pod.index, pod, pod.disruption) for pod in pods if pod.disruption]
    gone = [
        (index, None, Sign("PodDeleted", f"the pod of node {index} is gone")) for index in vanished
    ]
    return [
        (
            (sign.time or BEGINNING, 0, index),
            Verdict(Cause.DISRUPTION, sign.reason, sign.message, index, pod),
        )
        for index, pod, sign in [*signs, *gone]
    ]


def _own_failures(pods: Sequence[Pod]) -> list[Ranked]:
    """Failures that are certainly a node's own: torchrun names a rank that is no follower, or the kernel ran out of memory."""
    found = []
    for pod in (p for p in pods if p.fate is Fate.FAILED):
        summary = read_summary(pod.message)
        own = (summary is not None and summary.certain) or pod.exit_reason == "OOMKilled"
        if own:
            time = _summary_time(pod, summary) or pod.finished or BEGINNING
            found.append(((time, 1, pod.index), _failure(pod, summary)))
    return found


def _failure(pod: Pod, summary: Summary | None) -> Verdict:
    if pod.exit_reason == "OOMKilled":
        text = "ran out of memory (OOMKilled); raise resources.limits.memory or use less"
        return Verdict(
            Cause.FAILURE,
            "OOMKilled",
            f"node {pod.index} {text}",
            pod.index,
            pod,
            None,
            pod.exit_code,
        )
    if summary is None:
        last = _last_words(pod.message)
        text = f"node {pod.index} ended with exit code {pod.exit_code}" + (
            f": {last}" if last else ""
        )
        return Verdict(
            Cause.FAILURE, pod.exit_reason or "Error", text, pod.index, pod, None, pod.exit_code
        )
    what = f": {summary.exception}" if summary.exception else ""
    text = f"rank {summary.rank} on node {pod.index} ended with exit code {summary.exit_code}{what}"
    return Verdict(
        Cause.FAILURE, "WorkerFailed", text, pod.index, pod, summary.rank, summary.exit_code
    )


def _uncertain(pod: Pod, pods: Sequence[Pod], unborn: Sequence[int]) -> Verdict:
    """What is left when nothing certain came: a rendezvous that not every node reached blames nobody."""
    late = [*sorted(p.name for p in pods if not p.started), *(f"node {index}" for index in unborn)]
    if RENDEZVOUS_TIMEOUT.search(pod.message) and late:
        text = f"the rendezvous timed out while {', '.join(late)} had not started"
        return Verdict(
            Cause.RENDEZVOUS, Reason.RENDEZVOUS_TIMEOUT, text, pod.index, pod, None, pod.exit_code
        )
    return _failure(pod, read_summary(pod.message))


def _blame(pod: Pod) -> int:
    """Followers last: one of them is named only when everybody is one."""
    return (
        1
        if FOLLOWER.search(_of_the_script(pod.message)) or FOLLOWER.search(_last_words(pod.message))
        else 0
    )


def _end(pod: Pod, now: datetime) -> datetime:
    return _summary_time(pod, read_summary(pod.message)) or pod.finished or now


def _summary_time(pod: Pod, summary: Summary | None) -> datetime | None:
    """torchrun writes its container's local time: it is moved by the quarters of an hour that bring it to the pod's end."""
    if summary is None or summary.time is None or pod.finished is None:
        return summary.time if summary else None
    quarters = round((pod.finished - summary.time) / QUARTER)
    return summary.time + quarters * QUARTER


def _last_words(message: str) -> str:
    """The last line that says something; torchrun ends its summary with a rule."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" =-")]
    return lines[-1][:300] if lines else ""
