"""Which rank is where: kept outside the process group, so that it can still be read when the group is stuck.

When a rank is slow, its peers wait in an all-reduce and in the end raise a time-out that names nobody; the slow one
itself raises nothing until its peers are gone. So every rank writes into the rendezvous store how far it has got, and
every second that it lives, and a rank that timed out reads there for whom it has waited. Under torchrun the store lives
in the agent of node 0, which outlives the workers.
"""

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

WRITES_PER_SECOND = 1000  # of all ranks together: one store serves them all
SHORTEST_PAUSE = 0.2  # seconds between two writes of one rank
BEAT = 1.0  # seconds after which a rank writes even where it has got no further
SILENCE = 3.0  # seconds without a beat after which a rank counts as frozen; more where the pauses are longer
READ_TIMEOUT = timedelta(seconds=5)
ANSWER_TIMEOUT = 6.0  # seconds; a store whose host is frozen keeps even a read that has a time-out of its own waiting
NAMED = 8  # ranks that are listed beside the slowest, where they are as far behind


class SlowRankError(RuntimeError):
    """A collective timed out; the message names the rank that the others waited for."""


@dataclass(frozen=True)
class Entry:
    """Where a rank last was: since `time` (unix seconds, its own clock) in the forward or the backward pass of `step`.

    `beats` is how often its process has written; where it no longer grows, the process stands still.
    """

    step: int
    backward: bool
    time: float
    node: str
    beats: int = 0

    @property
    def position(self) -> tuple[int, bool]:
        """What grows as a rank gets on."""
        return self.step, self.backward


class Ledger:
    """The entries of all ranks. Noting one costs nothing: a thread of its own does the writing.

    `timeout` is how many seconds the ranks wait for each other. Shortly before it is over the thread also looks at what the
    others write: afterwards those that waited as well are gone, too, and nothing would tell them from one that is frozen.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._keys = [str(other) for other in range(world_size)]
        self._step = 0
        self._entry = Entry(0, True, time.time(), _node())
        self._pause = max(SHORTEST_PAUSE, world_size / WRITES_PER_SECOND)
        self._silence = max(SILENCE, 3 * self._pause)
        self._looks: deque[tuple[float, dict[int, Entry]]] = deque(
            maxlen=1 + math.ceil(self._silence / BEAT)
        )
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
        beats, since, last = 0, 0.0, 0.0
        while True:
            entry, now = self._entry, time.monotonic()
            further = entry is not written
            if further:
                since = now
            if further or now - last >= BEAT:
                beats, last = beats + 1, now
                try:
                    self._store.set(
                        str(self._rank), json.dumps(asdict(replace(entry, beats=beats)))
                    )
                except (
                    RuntimeError
                ):  # the store's host is gone, and with it whoever could read this
                    return
                written = entry
                if not further and now - since >= self._timeout - 2 * self._silence:
                    self._look()
            if self._closed.wait(self._pause):
                return

    def _look(self) -> None:
        with suppress(RuntimeError, ValueError):
            if self._store.check(self._keys):  # at once: all have written something
                found = self._read()
                self._looks.append((time.monotonic(), found))

    def who_is_slow(self) -> str | None:
        """A sentence on the rank that the others wait for, after a time-out; None where nothing tells it from the others."""
        said: list[str | None] = []
        asking = threading.Thread(target=lambda: said.append(self._ask()), daemon=True)
        asking.start()
        asking.join(ANSWER_TIMEOUT)
        if asking.is_alive():
            return STORE_SILENT
        return said[0] if said else None

    def _ask(self) -> str | None:
        try:
            entries = self._read()
        except (RuntimeError, ValueError):  # the store's host is gone
            return None
        now = time.monotonic()
        old_enough = [
            (now - at, earlier) for at, earlier in list(self._looks) if now - at >= self._silence
        ]
        who = frozen(old_enough[-1][1], entries, old_enough[-1][0]) if old_enough else None
        return who or slowest(entries, time.time(), self._timeout)

    def _read(self) -> dict[int, Entry]:
        self._store.wait(self._keys, READ_TIMEOUT)
        return {
            rank: Entry(**json.loads(found))
            for rank, found in enumerate(self._store.multi_get(self._keys))
        }


def slowest(entries: Mapping[int, Entry], now: float, timeout: float) -> str | None:
    """Say which rank is behind, on which node, where it last was and how long its peers have waited. Pure.

    Of several that are equally far behind, the one not heard of for longest is named first, the others after it.
    """
    last = min(entries, key=lambda rank: (entries[rank].position, entries[rank].time))
    first = max(entries, key=lambda rank: (entries[rank].position, -entries[rank].time))
    slow, fast = entries[last], entries[first]
    if slow.position == fast.position:
        return None
    others = [
        rank for rank, entry in entries.items() if entry.position == slow.position and rank != last
    ]
    return (
        f"rank {last} on {slow.node} is slow or stuck: it was last seen {_where(slow)}, {now - slow.time:.1f} s ago; rank "
        f"{first} on {fast.node} has waited for it in step {fast.step} for {now - fast.time:.1f} s, longer than the "
        f"time-out of {timeout:g} s. {_likewise('As far behind', others)}Look at that rank's node and log, or allow more with "
        "--timeout"
    )


def frozen(before: Mapping[int, Entry], after: Mapping[int, Entry], seconds: float) -> str | None:
    """Say which of the ranks furthest behind have written nothing in the seconds between; None where that is none or all.

    Goes by what was written, not by when: the clocks of two nodes may differ. Pure.
    """
    position = min(entry.position for entry in after.values())
    behind = [rank for rank, entry in after.items() if entry.position == position]
    silent = [rank for rank in behind if after[rank].beats == before[rank].beats]
    if not silent or len(silent) == len(behind):
        return None
    first, *others = silent
    return (
        f"rank {first} on {before[first].node} is frozen or cut off: it was last seen {_where(before[first])}, where "
        f"others wait for it, and its process has written nothing for {seconds:.0f} s or more. "
        f"{_likewise('Likewise', others)}Look at that rank's node and log"
    )


STORE_SILENT = (
    "a collective has timed out, and the rendezvous store does not answer, so nobody can say which rank is slow: the store "
    "is on node 0, which may be frozen or cut off from the network. Look at that node first"
)


def _where(entry: Entry) -> str:
    return f"in step {entry.step}" if entry.step else "before its first step"


def _likewise(how: str, ranks: list[int]) -> str:
    if not ranks:
        return ""
    named = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"{how}: rank {named}{more}. "


def _node() -> str:
    index = os.environ.get("GROUP_RANK")
    return f"node {index} ({socket.gethostname()})" if index else socket.gethostname()
