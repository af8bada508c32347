"""Search for the slow rank after a timeout.

If a rank is slow, its peers wait in an all-reduce and finally raise a timeout. The error does not
name the slow rank, and the slow rank itself raises nothing until its peers are gone. So every rank
writes its position into the rendezvous store, at least once per second. After a timeout, a rank
reads all positions and finds the slow rank:

    rank 0   forward │ backward ....... waits ....... timeout: "rank 2 is slow or stuck"
    rank 1   forward │ backward ....... waits ...................... lost its peer
    rank 2   forward ..............................................................
                │          │
                ▼          ▼    by a thread: step, number of passes, time, number of writes
    store    {0: (8, 2, …), 1: (8, 2, …), 2: (8, 1, …)}

A frozen rank writes nothing at all, so its number of writes does not grow. Under torchrun the store
is in the agent of node 0, and outlives the workers.
"""

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

# One store serves all ranks. This limits the writes of all of them together.
WRITES_PER_SECOND = 1000

# Shortest time between two writes of one rank, in seconds.
SHORTEST_PAUSE = 0.2

# Seconds after which a rank writes even if its position is unchanged.
BEAT = 1.0

# Seconds without a write after which a rank counts as frozen; more if the pauses are longer.
SILENCE = 3.0

READ_TIMEOUT = timedelta(seconds=5)

# Seconds. If the store's host is frozen, even a read with a timeout does not return.
ANSWER_TIMEOUT = 6.0

# Seconds left to gloo after the timeout, to raise its own error.
MARGIN = 1.0

# Number of remembered times of backward passes.
STEPS_REMEMBERED = 20

# Largest number of ranks listed in addition to the slowest one.
MAX_LISTED = 8

STORE_SILENT = (
    "a collective timed out and the rendezvous store does not answer, so the slow rank is unknown; "
    "the store is on node 0, which may be frozen or cut off from the network: check that node first"
)


@dataclass(frozen=True)
class Position:
    """The last known place of a rank: since `time`, in a forward or backward pass of `step`.

    `passes` counts the passes begun in the step: a forward and a backward pass, or several of each
    if gradients are accumulated. `time` is unix time by the rank's own clock. `beats` counts the
    writes of its process. If it does not grow, the process does not run.
    """

    step: int
    passes: int
    time: float
    node: str
    beats: int = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Return the step and the pass, to compare the progress of two ranks."""
        return self.step, self.passes

    @property
    def in_backward(self) -> bool:
        """Return True in a backward pass, where the rank needs its peers."""
        return self.passes > 0 and self.passes % 2 == 0


class StragglerDetector:
    """Writes the position of this rank, and reads those of all ranks after a timeout.

    Noting a position does not block, because a thread writes it. `timeout` is the longest wait for
    other ranks, in seconds. Shortly before its end, the thread also reads the positions of the
    other ranks. After the timeout this would be too late: the waiting ranks have ended too, and
    look like a frozen rank.

    With more than two ranks, gloo's own timeout begins anew with each message of a ring, and may
    come much later. So the thread also calls `on_stuck` with a sentence, once, if this rank waits
    longer in a backward pass for a rank without progress.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._on_stuck = on_stuck
        # Seconds of the last backward passes. The shortest is about this rank's own computation,
        # without waiting for others.
        self._backward_seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._keys = [str(other) for other in range(world_size)]
        self._step = 0
        self._position = Position(0, 0, time.time(), _node_name())
        self._pause = max(SHORTEST_PAUSE, world_size / WRITES_PER_SECOND)
        self._silence = max(SILENCE, 3 * self._pause)
        # The positions of all ranks as read before the timeout, with the time of each reading.
        length = 1 + math.ceil(self._silence / BEAT)
        self._readings: deque[tuple[float, dict[int, Position]]] = deque(maxlen=length)
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write, name="stragglers", daemon=True)
        self._writer.start()

    def finished(self, step: int) -> None:
        """Note the end of the optimizer step `step` on this rank."""
        self._note_backward_seconds()
        self._step = step

    def forward(self) -> None:
        """Note the start of a forward pass of the step after the last finished one."""
        self._note_backward_seconds()
        self._begin_pass()

    def backward(self) -> None:
        """Note the end of the forward pass. The backward pass follows."""
        self._begin_pass()

    def forget_passes(self) -> None:
        """Forget the passes since the last finished step: they were not part of a step."""
        self._move(self._step, 0)

    def _note_backward_seconds(self) -> None:
        """Remember the duration of the backward pass, if one ends now."""
        if self._is_in_step() and self._position.in_backward:
            self._backward_seconds.append(max(0.0, time.time() - self._position.time))

    def _begin_pass(self) -> None:
        passes = self._position.passes if self._is_in_step() else 0
        self._move(self._step + 1, passes + 1)

    def _is_in_step(self) -> bool:
        """Return True between the first pass of a step and its end."""
        return self._position.step > self._step

    def _move(self, step: int, passes: int) -> None:
        self._position = Position(step, passes, time.time(), self._position.node)

    def close(self) -> None:
        """Stop writing. A thread using the store at the end of Python would abort the process."""
        self._closed.set()
        self._writer.join(1.0)

    def _write(self) -> None:
        """Write the position whenever it has changed, and once per BEAT."""
        written: Position | None = None
        beats = 0
        last_write = 0.0
        waiting_since = 0.0
        while True:
            position = self._position
            now = time.monotonic()
            has_moved = position is not written
            if has_moved:
                waiting_since = now
            if has_moved or now - last_write >= BEAT:
                beats += 1
                last_write = now
                try:
                    entry = json.dumps(asdict(replace(position, beats=beats)))
                    self._store.set(str(self._rank), entry)
                except RuntimeError:
                    # The store's host is gone, so no other rank can read this.
                    return
                written = position
                near_timeout = self._timeout - 2 * self._silence
                if not has_moved and now - waiting_since >= near_timeout:
                    self._take_reading()
                    self._end_if_stuck(now - waiting_since)
            if self._closed.wait(self._pause):
                return

    def _take_reading(self) -> None:
        with suppress(RuntimeError, ValueError):
            # Without this check, reading would wait for the first write of every rank.
            if self._store.check(self._keys):
                positions = self._read()
                self._readings.append((time.monotonic(), positions))

    def _end_if_stuck(self, waited: float) -> None:
        """Call `on_stuck` if this rank has waited too long for a rank without progress."""
        if not self._on_stuck or not self._backward_seconds:
            return
        # Between two steps, such as in an evaluation, a rank may need long without its peers.
        if not self._is_in_step() or not self._position.in_backward:
            return
        # gloo's own error comes first if its timeout began once only.
        if waited < self._timeout + min(self._backward_seconds) + MARGIN:
            return
        earlier = self._earlier_reading()
        if earlier is None:
            return
        _, before = earlier
        _, now = self._readings[-1]
        slow = min(now, key=lambda rank: now[rank].progress)
        is_ahead = self._position.progress == max(entry.progress for entry in now.values())
        has_stopped = now[slow].progress == before[slow].progress
        # Under Join, finished ranks wait long for others, and these make progress.
        is_old = time.time() - now[slow].time >= self._timeout
        message = self._find()
        if is_ahead and has_stopped and is_old and message:
            on_stuck, self._on_stuck = self._on_stuck, None
            on_stuck(message)

    def describe_slow_rank(self) -> str | None:
        """Return a sentence on the slow rank, after a timeout.

        Return None if no rank differs from the others.
        """
        answers: list[str | None] = []
        reader = threading.Thread(target=lambda: answers.append(self._find()), daemon=True)
        reader.start()
        reader.join(ANSWER_TIMEOUT)
        if reader.is_alive():
            return STORE_SILENT
        return answers[0] if answers else None

    def _find(self) -> str | None:
        try:
            positions = self._read()
        except (RuntimeError, ValueError):
            # The store's host is gone.
            return None
        earlier = self._earlier_reading()
        if earlier:
            seconds, before = earlier
            found = describe_frozen(before, positions, seconds)
            if found:
                return found
        return describe_slowest(positions, time.time(), self._timeout)

    def _earlier_reading(self) -> tuple[float, dict[int, Position]] | None:
        """Return the newest reading old enough to show silence, with its age in seconds."""
        now = time.monotonic()
        for taken, positions in reversed(list(self._readings)):
            age = now - taken
            if age >= self._silence:
                return age, positions
        return None

    def _read(self) -> dict[int, Position]:
        self._store.wait(self._keys, READ_TIMEOUT)
        entries = self._store.multi_get(self._keys)
        return {rank: Position(**json.loads(entry)) for rank, entry in enumerate(entries)}


def describe_slowest(positions: Mapping[int, Position], now: float, timeout: float) -> str | None:
    """Return a sentence on the rank furthest behind, or None if all are equally far.

    Of several such ranks, the one with the oldest position comes first. `now` is unix time.
    """

    def order(rank: int) -> tuple[tuple[int, int], float]:
        return positions[rank].progress, positions[rank].time

    last = min(positions, key=order)
    most = max(position.progress for position in positions.values())
    leaders = [rank for rank, position in positions.items() if position.progress == most]
    first = min(leaders, key=order)
    slow = positions[last]
    fast = positions[first]
    if slow.progress == fast.progress:
        return None
    others = [
        rank
        for rank, position in positions.items()
        if position.progress == slow.progress and rank != last
    ]
    return (
        f"rank {last} on {slow.node} is slow or stuck: it was last seen {_describe_step(slow)}, "
        f"{now - slow.time:.1f} s ago; rank {first} on {fast.node} has waited for it in step "
        f"{fast.step} for {now - fast.time:.1f} s, longer than the timeout of {timeout:g} s. "
        f"{_list_ranks('As far behind', others)}Check that rank's node and log, or allow a longer "
        "timeout"
    )


def describe_frozen(
    before: Mapping[int, Position], after: Mapping[int, Position], seconds: float
) -> str | None:
    """Return a sentence on the frozen ranks: furthest behind, without a write between two readings.

    `seconds` is the time between the readings. Return None if none of the ranks furthest behind is
    frozen, or if all of them are. Times are not compared, because the clocks of two nodes may
    differ.
    """
    least = min(position.progress for position in after.values())
    behind = [rank for rank, position in after.items() if position.progress == least]
    silent = [rank for rank in behind if after[rank].beats == before[rank].beats]
    if not silent or len(silent) == len(behind):
        return None
    first = silent[0]
    return (
        f"rank {first} on {before[first].node} is frozen or cut off: it was last seen "
        f"{_describe_step(before[first])}, where others wait for it, and its process has written "
        f"nothing for at least {seconds:.0f} s. {_list_ranks('Likewise', silent[1:])}"
        "Check that rank's node and log"
    )


def _describe_step(position: Position) -> str:
    return f"in step {position.step}" if position.step else "before its first step"


def _list_ranks(introduction: str, ranks: list[int]) -> str:
    if not ranks:
        return ""
    listed = ", ".join(str(rank) for rank in ranks[:MAX_LISTED])
    more = f" and {len(ranks) - MAX_LISTED} more" if len(ranks) > MAX_LISTED else ""
    return f"{introduction}: rank {listed}{more}. "


def _node_name() -> str:
    index = os.environ.get("GROUP_RANK")
    return f"node {index} ({socket.gethostname()})" if index else socket.gethostname()
