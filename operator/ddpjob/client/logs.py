"""The logs of a job's pods: which lines are wanted, and all of them in the order of their times."""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from ddpjob.client.errors import Rejected
from ddpjob.core import names
from ddpjob.core.readers import Dict, child, children
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError
from ddpjob.kube.kinds import PODS

# Logs that are read at the same time, each by a connection of its own.
MAX_STREAMS = 120

PODS_ENDED = ("Succeeded", "Failed")

# The agent's line at the beginning of an attempt, and the mark of a line of one rank.
ATTEMPT_BEGINS = re.compile(r"ddpjob agent: attempt (\d+) begins")
RANK_MARK = re.compile(r"\[rank(\d+)\]: ?")


@dataclass(frozen=True, order=True)
class LogLine:
    """A line of a pod's log: its time in UTC as the kubelet wrote it, where it is from, its text.

    `rank` is None if the node has one rank, or for a line that is not of a rank.
    """

    time: str
    index: int
    pod: str
    attempt: int
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class LogChoice:
    """The lines that a user wants: all, unless a field says less.

    `ranks_per_node` tells to which node a rank belongs. `since` is in seconds.
    """

    nodes: frozenset[int] = frozenset()
    rank: int | None = None
    attempt: int | None = None
    since: int | None = None
    tail: int | None = None
    ranks_per_node: int = 1

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
        return line.rank == self.rank

    def query(self) -> dict[str, str]:
        found = {"container": names.TRAINER, "timestamps": "true"}
        if self.since is not None:
            found["sinceSeconds"] = str(self.since)
        if self.tail is not None:
            found["tailLines"] = str(self.tail)
        return found


ALL_LINES = LogChoice()


@dataclass
class PodLog:
    """A pod whose log is read. `born` is the attempt in which it was created."""

    namespace: str
    name: str
    index: int
    born: int
    attempt: int = field(init=False)
    # The time of the last line, after which a broken connection continues.
    last_time: str = ""

    def __post_init__(self) -> None:
        self.attempt = self.born

    @classmethod
    def from_pod(cls, pod: Dict) -> "PodLog | None":
        """Return the log of a pod, or None if the pod is not the operator's."""
        metadata = pod["metadata"]
        index = str(child(metadata, "labels").get(names.LABEL_INDEX, ""))
        # The name ends with the attempt and the index. The label has the newest attempt instead.
        born = metadata["name"].split("-")[-2:-1]
        if not (index.isdecimal() and born and born[0].isdecimal()):
            return None
        return cls(metadata["namespace"], metadata["name"], int(index), int(born[0]))

    def take(self, raw: bytes) -> LogLine | None:
        """Return a line of the log, or None for one that was read before."""
        time, _, text = raw.decode(errors="replace").partition(" ")
        if time <= self.last_time:
            return None
        self.last_time = time
        return self.read(time, text)

    def read(self, time: str, text: str) -> LogLine:
        """Return a line with the attempt that it belongs to."""
        begins = ATTEMPT_BEGINS.match(text)
        if begins:
            self.attempt = int(begins[1])
        mark = RANK_MARK.match(text)
        rank = int(mark[1]) if mark else None
        return LogLine(time, self.index, self.name, self.attempt, text.rstrip("\r"), rank)


def has_begun(pod: Dict) -> bool:
    """Return True if the trainer of a pod runs, or has run."""
    return "running" in _state(pod) or has_ended(pod)


def has_ended(pod: Dict) -> bool:
    """Return True if the trainer of a pod has ended, or never runs any more."""
    return "terminated" in _state(pod) or child(pod, "status").get("phase") in PODS_ENDED


def _state(pod: Dict) -> Dict:
    for status in children(child(pod, "status"), "containerStatuses"):
        if status.get("name") == names.TRAINER:
            return child(status, "state")
    return {}


async def read_log(api: ApiClient, pod: PodLog, choice: LogChoice) -> AsyncGenerator[LogLine, None]:
    """Yield the lines that a pod has written so far. A pod that is gone has none."""
    path = PODS.path(pod.namespace, pod.name, "log")
    try:
        async for raw in api.stream(path, choice.query()):
            line = pod.take(raw)
            if line is not None and choice.has_line(line):
                yield line
    except ApiError as error:
        # 400: the container waits to start.
        if error.status not in (400, 404):
            raise


async def merged_logs(
    api: ApiClient, pods: Iterable[Dict], choice: LogChoice
) -> AsyncGenerator[LogLine, None]:
    """Yield the lines that the pods have written so far, in the order of their times.

    Raises Rejected if that needs too many connections.
    """
    chosen = [pod for pod in map(PodLog.from_pod, pods) if pod and choice.has_pod(pod)]
    if len(chosen) > MAX_STREAMS:
        raise Rejected(
            f"the job has the logs of {len(chosen)} pods, and at most {MAX_STREAMS} can be read at "
            f"once; choose nodes with --node, such as --node 0-{MAX_STREAMS - 1}"
        )
    streams = [read_log(api, pod, choice) for pod in chosen]
    waiting: dict[int, LogLine] = {}
    firsts = await asyncio.gather(*(anext(stream, None) for stream in streams))
    for number, line in enumerate(firsts):
        if line is not None:
            waiting[number] = line
    while waiting:
        number = min(waiting, key=lambda key: waiting[key])
        yield waiting.pop(number)
        line = await anext(streams[number], None)
        if line is not None:
            waiting[number] = line
