"""The queue of jobs to look at: each key at most once, never by two workers at a time, now or later."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_RETRY, LONGEST_RETRY = 0.5, 60.0
"""Seconds before a failed key is tried again; doubled for each failure in a row."""


class Wakeups(Generic[Key]):
    """Keys and when each is due. The earliest wish for a key wins; a later look computes its next wish anew."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are due already."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    def add(self, key: Key, after: float = 0.0) -> None:
        """Wake `key` in `after` seconds, or earlier if that was asked for already."""
        due = self._clock() + after
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._changed.set()

    async def get(self) -> Key:
        """The next key that is due and in nobody's hands; `done` gives it back."""
        while True:
            key, wait = self._next()
            if key is not None:
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def done(self, key: Key, failed: bool = False) -> None:
        """The look at `key` is over; a failed one is repeated, later each time."""
        self._busy.discard(key)
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            self.add(key, min(FIRST_RETRY * 2.0 ** min(count - 1, 10), LONGEST_RETRY))
        else:
            self._failures.pop(key, None)
        self._changed.set()

    def _next(self) -> tuple[Key | None, float | None]:
        """A key that can be worked on now, else how many seconds until one may be."""
        now, held = self._clock(), []
        found: Key | None = None
        wait: float | None = None
        while self._heap and found is None:
            due, order, key = self._heap[0]
            if self._due.get(key) != due:  # an earlier wish for this key was served or came later
                heapq.heappop(self._heap)
            elif due > now:
                wait = due - now
                break
            else:
                heapq.heappop(self._heap)
                if key in self._busy:
                    held.append((due, order, key))
                else:
                    found = key
                    del self._due[key]
                    self._busy.add(key)
        for entry in held:
            heapq.heappush(self._heap, entry)
        return found, wait
