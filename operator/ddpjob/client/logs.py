"""Read the logs of a job's pods: a choice of lines, and the lines of all pods ordered by time."""

import asyncio
import heapq
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpjob.client.errors import Rejected
from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, children
from ddpjob.jobs.terminal import as_displayed
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import PODS
from ddpjob.kube.request import Request, Verb

if TYPE_CHECKING:
    from ddpjob.kube.api import ApiClient

# Logs read at the same time, each by a connection of its own.
MAX_STREAMS = 120

PODS_ENDED = ("Succeeded", "Failed")

# The beginning of a time as the kubelet writes it.
TIME = re.compile(r"\d{4}-\d\d-\d\dT")

# The agent's line at the beginning of an attempt, and the mark of a line of one rank.
ATTEMPT_BEGINS = re.compile(r"ddpjob agent: attempt (\d+) begins")
RANK_MARK = re.compile(r"\[rank(\d+)\]: ?")


@dataclass(frozen=True)
class LogLine:
    """A line of a pod's log: its time in UTC as the kubelet wrote it, where it is from, its text.

    `rank` is None if the node has one rank, or if the line has no mark of a rank.
    """

    time: str
    index: int
    pod: str
    attempt: int
    text: str
    rank: int | None = None

    def __str__(self) -> str:
        return self.text

    def __lt__(self, other: "LogLine") -> bool:
        """Return True if this line was written earlier."""
        return (self.time, self.index) < (other.time, other.index)

    @property
    def is_json(self) -> bool:
        return self.text.startswith("{") and self.text.endswith("}")


@dataclass(frozen=True)
class LogChoice:
    """A user's choice of lines: all, unless a field limits them.

    `since` is in seconds, and `tail` is the number of last lines of each pod, or of an attempt in
    each pod. `ranks_per_node` is needed to find the node of a rank; a client fills it in. Raises
    ValueError for an attempt together with `since`: the beginning of an attempt is only found in a
    whole log.
    """

    nodes: frozenset[int] = frozenset()
    rank: int | None = None
    attempt: int | None = None
    since: int | None = None
    tail: int | None = None
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.attempt is not None and self.since is not None:
            raise ValueError("an attempt cannot be chosen together with since")

    @property
    def requested_tail(self) -> int | None:
        """Return the number of last lines to request of a log, or None for the whole log.

        The kubelet counts the lines of all attempts, so the tail of one attempt is taken here.
        """
        return self.tail if self.attempt is None else None

    def has_pod(self, pod: "PodLog") -> bool:
        if self.attempt is not None and pod.born > self.attempt:
            return False
        if self.rank is not None and pod.index != self.rank // self.ranks_per_node:
            return False
        return not self.nodes or pod.index in self.nodes

    def has_line(self, line: LogLine) -> bool:
        if self.attempt is not None and line.attempt != self.attempt:
            return False
        if self.rank is None or self.ranks_per_node == 1:
            return True
        if line.rank is None and line.is_json:
            # The agent leaves lines of JSON as they are. Trainers print them on one rank of a node.
            return self.rank % self.ranks_per_node == 0
        return line.rank == self.rank

    def of_new_pods(self) -> "LogChoice":
        """Return the choice for a pod started during the watch. All its lines are new."""
        return replace(self, since=None, tail=None)

    def query(self) -> dict[str, str]:
        found = {"container": names.TRAINER, "timestamps": "true"}
        if self.since is not None:
            found["sinceSeconds"] = str(self.since)
        if self.requested_tail is not None:
            found["tailLines"] = str(self.requested_tail)
        return found


ALL_LINES = LogChoice()


@dataclass
class PodLog:
    """The state of reading a pod's log. The pod was created in attempt `born`."""

    namespace: str
    name: str
    index: int
    born: int
    attempt: int = field(init=False)
    # The time of the last line. After a reconnect, lines up to `resumed_after` are repeats.
    last_time: str = ""
    resumed_after: str = ""

    def __post_init__(self) -> None:
        self.attempt = self.born

    @classmethod
    def from_pod(cls, pod: Dict) -> "PodLog | None":
        """Return the log of a pod, or None if the pod is not the operator's."""
        metadata = pod["metadata"]
        name = metadata["name"]
        index = str(child(metadata, "labels").get(names.LABEL_INDEX, ""))
        # The name ends with the attempt and the index. The label has the newest attempt instead.
        parts = name.split("-")
        born = parts[-2] if len(parts) > 1 else ""
        if not index.isdecimal() or not born.isdecimal():
            return None
        return cls(
            metadata["namespace"],
            name,
            index=int(index),
            born=int(born),
        )

    def take(self, raw: bytes) -> LogLine | None:
        """Return a line of the log, or None for a repeated line."""
        line = raw.decode(errors="replace")
        time, _, text = line.partition(" ")
        if not TIME.match(time):
            # This is a message of the kubelet itself, for example about a missing log.
            return self.read(self.last_time, line)
        if self.resumed_after:
            if time <= self.resumed_after:
                return None
            self.resumed_after = ""
        self.last_time = time
        return self.read(time, text)

    def read(self, time: str, text: str) -> LogLine:
        """Return a line as a terminal shows it, with its attempt and rank."""
        text = as_displayed(text)
        begins = ATTEMPT_BEGINS.match(text)
        if begins:
            self.attempt = int(begins[1])
        mark = RANK_MARK.match(text)
        return LogLine(
            time,
            self.index,
            self.name,
            self.attempt,
            text,
            rank=int(mark[1]) if mark else None,
        )


def has_begun(pod: Dict) -> bool:
    """Return True if the trainer of a pod runs, or has run."""
    return "running" in _state(pod) or has_ended(pod)


def has_ended(pod: Dict) -> bool:
    """Return True if the trainer of a pod has ended, or never runs any more."""
    phase = child(pod, "status").get("phase")
    return "terminated" in _state(pod) or phase in PODS_ENDED


def _state(pod: Dict) -> Dict:
    statuses = children(child(pod, "status"), "containerStatuses")
    for status in statuses:
        if status.get("name") == names.TRAINER:
            return child(status, "state")
    return {}


async def read_log(
    api: "ApiClient", pod: PodLog, choice: LogChoice
) -> AsyncGenerator[LogLine, None]:
    """Yield the lines written by a pod so far. A deleted pod has none."""
    async with aclosing(_chosen_lines(api, pod, choice)) as lines:
        if choice.tail == choice.requested_tail:
            async for line in lines:
                yield line
            return
        last: deque[LogLine] = deque(maxlen=choice.tail)
        async for line in lines:
            last.append(line)
    for line in last:
        yield line


async def _chosen_lines(
    api: "ApiClient", pod: PodLog, choice: LogChoice
) -> AsyncGenerator[LogLine, None]:
    request = Request(
        Verb.GET,
        PODS,
        pod.namespace,
        pod.name,
        "log",
        query=choice.query(),
    )
    try:
        async for raw in api.stream(request):
            line = pod.take(raw)
            if line is not None and choice.has_line(line):
                yield line
    except CallFailed as error:
        status = error.status if isinstance(error, ApiError) else 0
        if status in (401, 403):
            raise
        # 400: the container waits to start. One kubelet without an answer must not hide the logs of
        # the other nodes.
        if status not in (400, 404):
            text = f"{names.AGENT_LINE}the log of this pod cannot be read: {error}"
            yield LogLine(pod.last_time, pod.index, pod.name, pod.attempt, text)


async def merged_logs(
    api: "ApiClient", pods: Iterable[Dict], choice: LogChoice
) -> AsyncGenerator[LogLine, None]:
    """Yield the lines written by the pods so far, in the order of their times.

    Raises Rejected if the logs need too many connections.
    """
    chosen = [pod for pod in map(PodLog.from_pod, pods) if pod and choice.has_pod(pod)]
    if len(chosen) > MAX_STREAMS:
        raise too_many_logs(len(chosen))
    async with AsyncExitStack() as held:
        streams = []
        for pod in chosen:
            reading = aclosing(read_log(api, pod, choice))
            streams.append(await held.enter_async_context(reading))
        # All have to end before one of them can be closed.
        begun = (anext(stream, None) for stream in streams)
        firsts = await asyncio.gather(*begun, return_exceptions=True)
        for first in firsts:
            if isinstance(first, BaseException):
                raise first
        # The next line of each stream, the oldest first.
        waiting: list[tuple[LogLine, int]] = []
        for number, first in enumerate(firsts):
            if isinstance(first, LogLine):
                waiting.append((first, number))
        heapq.heapify(waiting)
        while waiting:
            line, number = heapq.heappop(waiting)
            yield line
            following = await anext(streams[number], None)
            if following is not None:
                heapq.heappush(waiting, (following, number))


def too_many_logs(pods: int) -> Rejected:
    return Rejected(
        f"the job has the logs of {pods} pods, and at most {MAX_STREAMS} can be read at once; "
        f"choose nodes with --node, such as --node 0-{MAX_STREAMS - 1}"
    )
