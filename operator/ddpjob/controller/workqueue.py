"""The queue of jobs to reconcile.

Each key is in it at most once, and no two workers hold the same key. A key is due now or later.
Due keys stand in a line that is fair to their groups, the namespaces.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

from ddpjob.controller.fair import FairLine
from ddpjob.core.api.backoff import exponential_delay

Key = TypeVar("Key", bound=Hashable)

# Number of workers. A job whose requests hang occupies one until they end.
WORKERS = 256

# Seconds before a failed key is tried again.
FIRST_RETRY = 0.5
LONGEST_RETRY = 60.0

# Outdated entries that the heap may have beside as many as there are keys.
MAX_OUTDATED = 64


class WorkQueue(Generic[Key]):
    """Keys and their due times, in seconds of `clock`.

    Of several times for one key the earliest counts. The later ones are forgotten: a look at a key
    computes the next time anew.
    """

    def __init__(
        self, clock: Callable[[], float], group_of: Callable[[Key], str] = lambda key: ""
    ) -> None:
        self._clock = clock
        self._group_of = group_of
        # Called when a worker takes a key, with the seconds since the key was due.
        self.on_wait: Callable[[float], None] = lambda seconds: None
        # The time and the number of the last entry of each key. Other entries are outdated.
        self._due: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._line: FairLine[Key] = FairLine()
        self._busy: set[Key] = set()
        # Busy keys that became due again. They enter the line when their worker is done.
        self._due_again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    def __len__(self) -> int:
        """Return the number of due keys."""
        now = self._clock()
        return sum(due <= now for due, _ in self._due.values())

    def add(self, key: Key, after: float = 0.0) -> None:
        """Make `key` due in `after` seconds, unless it is due earlier already."""
        due = self._clock() + after
        if key in self._due and due >= self._due[key][0]:
            return
        number = next(self._order)
        self._due[key] = due, number
        heapq.heappush(self._heap, (due, number, key))
        if len(self._heap) > 2 * len(self._due) + MAX_OUTDATED:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[:2]]
            heapq.heapify(self._heap)
        self._changed.set()

    async def get(self) -> Key:
        """Wait for a due key that no worker holds. `done` gives it back."""
        # One idle worker waits for the next key, and the others for their turn. Otherwise each key
        # would wake all of them.
        async with self._turn:
            while True:
                key, wait = self._take()
                if key is not None:
                    return key
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._changed.wait()

    def done(self, key: Key, failed: bool = False) -> None:
        """Give `key` back. A failed key is tried again, each time later."""
        self._busy.discard(key)
        group = self._group_of(key)
        self._line.end(group)
        if key in self._due_again:
            self._due_again.discard(key)
            self._line.add(group, key)
        if failed:
            failures = self._failures.get(key, 0) + 1
            self._failures[key] = failures
            self.add(key, exponential_delay(failures, FIRST_RETRY, LONGEST_RETRY))
        else:
            self._failures.pop(key, None)
        self._changed.set()

    def _take(self) -> tuple[Key | None, float | None]:
        """Return the next key in line.

        Without one, return the seconds until the next key is due, or None if there is none.
        """
        wait = self._let_due_keys_wait()
        if not self._line:
            return None, wait
        key = self._line.first()
        group = self._group_of(key)
        # A group has at most as many workers as it leaves free. So there is one for another group.
        if self._line.under_way[group] >= WORKERS - len(self._busy):
            return None, wait
        self._line.remove(group, key)
        self._line.begin(group)
        due, _ = self._due.pop(key)
        self.on_wait(max(0.0, self._clock() - due))
        self._busy.add(key)
        return key, None

    def _let_due_keys_wait(self) -> float | None:
        """Move due keys into the line. Return the seconds until the next one is due, if any."""
        now = self._clock()
        while self._heap:
            due, number, key = self._heap[0]
            if self._due.get(key) != (due, number):
                heapq.heappop(self._heap)
            elif due > now:
                return due - now
            else:
                heapq.heappop(self._heap)
                if key in self._busy:
                    self._due_again.add(key)
                else:
                    self._line.add(self._group_of(key), key)
        return None
