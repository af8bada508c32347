"""The queue of jobs to reconcile.

Each key is in it at most once, and no two workers hold the same key. A key is due now or later.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ddpjob.core.backoff import exponential_delay

Key = TypeVar("Key", bound=Hashable)

# Seconds before a failed key is tried again.
FIRST_RETRY = 0.5
LONGEST_RETRY = 60.0

# Outdated entries that the heap may have beside as many as there are keys.
MAX_OUTDATED = 64


class WorkQueue(Generic[Key]):
    """Keys and the times at which they are due, in seconds of `clock`.

    Of several times for one key the earliest counts. The later ones are forgotten: a look at a key
    computes the next time anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        # Entries whose time is no longer that in `_due` are outdated.
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that are due."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    def add(self, key: Key, after: float = 0.0) -> None:
        """Make `key` due in `after` seconds, unless it is due earlier already."""
        due = self._clock() + after
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        if len(self._heap) > 2 * len(self._due) + MAX_OUTDATED:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        self._changed.set()

    async def get(self) -> Key:
        """Wait for a key that is due and that no worker holds. `done` gives it back."""
        while True:
            key, wait = self._take()
            if key is not None:
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def done(self, key: Key, failed: bool = False) -> None:
        """Give `key` back. A failed key is tried again, each time later."""
        self._busy.discard(key)
        if failed:
            failures = self._failures.get(key, 0) + 1
            self._failures[key] = failures
            self.add(key, exponential_delay(failures, FIRST_RETRY, LONGEST_RETRY))
        else:
            self._failures.pop(key, None)
        self._changed.set()

    def _take(self) -> tuple[Key | None, float | None]:
        """Return the first key that is due and not busy.

        Without one, return the seconds until the next key is due, or None if there is none.
        """
        now = self._clock()
        busy = []
        found = None
        wait = None
        while self._heap and found is None and wait is None:
            due, _, key = self._heap[0]
            if self._due.get(key) != due:
                heapq.heappop(self._heap)
            elif due > now:
                wait = due - now
            elif key in self._busy:
                busy.append(heapq.heappop(self._heap))
            else:
                heapq.heappop(self._heap)
                found = key
        # A busy key stays in the queue: it is due when its worker is done.
        for entry in busy:
            heapq.heappush(self._heap, entry)
        if found is not None:
            del self._due[found]
            self._busy.add(found)
        return found, wait
