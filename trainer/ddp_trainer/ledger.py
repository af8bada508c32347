"""Which rank is where: kept outside the process group, so that it can still be read when the group is stuck.

When a rank is slow, its peers wait in an all-reduce and in the end raise a time-out that names nobody; the slow one
itself raises nothing until its peers are gone. So every rank writes into the rendezvous store how far it has got, and a
rank that timed out reads there for whom it has waited. Under torchrun the store lives in the agent of node 0, which
outlives the workers.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

WRITES_PER_SECOND = 1000  # of all ranks together: one store serves them all
SHORTEST_PAUSE = 0.2  # seconds between two writes of one rank
READ_TIMEOUT = timedelta(seconds=5)
NAMED = 8  # ranks that are listed beside the slowest, where they are as far behind


class SlowRankError(RuntimeError):
    """A collective timed out; the message names the rank that the others waited for."""


@dataclass(frozen=True)
class Entry:
    """Where a rank last was: since `time` (unix seconds, its own clock) in the forward or the backward pass of `step`."""

    step: int
    backward: bool
    time: float
    node: str

    @property
    def position(self) -> tuple[int, bool]:
        """What grows as a rank gets on."""
        return self.step, self.backward


class Ledger:
    """The entries of all ranks. Noting one costs nothing: a thread of its own does the writing."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._step = 0
        self._entry = Entry(0, True, time.time(), _node())
        self._pause = max(SHORTEST_PAUSE, world_size / WRITES_PER_SECOND)
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._writer.start()

    def finished(self, step: int) -> None:
        """This rank has taken the optimizer step of this number."""
        self._step = step

    def forward(self) -> None:
        """This rank begins the forward pass after the last finished step."""
        self._entry = Entry(self._step + 1, False, time.time(), self._entry.node)

    def backward(self) -> None:
        """Its forward pass is over; in the backward pass it needs its peers."""
        self._entry = Entry(self._step + 1, True, time.time(), self._entry.node)

    def rest(self) -> None:
        """What it noted since the last finished step was no step: forget it."""
        self._entry = Entry(self._step, True, time.time(), self._entry.node)

    def close(self) -> None:
        """Write no more. A thread that was still in the store when Python ends would abort the process."""
        self._closed.set()
        self._writer.join(1.0)

    def _write(self) -> None:
        written: Entry | None = None
        while True:
            entry = self._entry
            if entry is not written:
                try:
                    self._store.set(str(self._rank), json.dumps(asdict(entry)))
                except RuntimeError:  # the store's host is gone, and with it whoever could read this
                    return
                written = entry
            if self._closed.wait(self._pause):
                return

    def who_is_slow(self, timeout: float | None) -> str | None:
        """A sentence on the rank that the others wait for; None where all are equally far or the store is gone."""
        try:
            entries = {rank: self._read(rank) for rank in range(self._world_size)}
        except (RuntimeError, ValueError):
            return None
        return slowest(entries, time.time(), timeout)

    def _read(self, rank: int) -> Entry:
        self._store.wait([str(rank)], READ_TIMEOUT)
        return Entry(**json.loads(self._store.get(str(rank))))


def slowest(entries: Mapping[int, Entry], now: float, timeout: float | None) -> str | None:
    """Say which rank is behind, on which node, where it last was and how long its peers have waited. Pure.

    Of several that are equally far behind, the one not heard of for longest is named first, the others after it.
    """
    last = min(entries, key=lambda rank: (entries[rank].position, entries[rank].time))
    first = max(entries, key=lambda rank: (entries[rank].position, -entries[rank].time))
    slow, fast = entries[last], entries[first]
    if slow.position == fast.position:
        return None
    where = f"in step {slow.step}" if slow.step else "before its first step"
    limit = f"longer than the time-out of {timeout:g} s" if timeout else "longer than the time-out"
    others = [rank for rank, entry in entries.items() if entry.position == slow.position and rank != last]
    return (
        f"rank {last} on {slow.node} is slow or stuck: it was last seen {where}, {now - slow.time:.1f} s ago; rank "
        f"{first} on {fast.node} has waited for it in step {fast.step} for {now - fast.time:.1f} s, {limit}. "
        f"{_as_far_behind(others)}Look at that rank's node and log, or allow more with --timeout"
    )


def _as_far_behind(ranks: list[int]) -> str:
    if not ranks:
        return ""
    named = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"As far behind: rank {named}{more}. "


def _node() -> str:
    index = os.environ.get("GROUP_RANK")
    return f"node {index} ({socket.gethostname()})" if index else socket.gethostname()
