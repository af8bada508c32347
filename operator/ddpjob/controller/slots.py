"""Limits on work that runs side by side. Work that hangs does not use them up.

A limit protects something from load: the API server, or this process. Work that waits long for its
answer loads neither, for example a create whose admission webhook hangs. So its slot goes to the
next in line while it still waits.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

# Seconds that a piece of work counts as load. Most requests take a hundredth of it. A job stands in
# several lines one after another (worker, Service, pods), so this must be well below a second.
SLOT_SECONDS = 0.5

# Seconds after which work may be ended because too much of it hangs. If the API server is so slow
# with every request, the Lease cannot be renewed either.
HANG_SECONDS = 5.0


class Slot:
    """Counts a piece of work as load until it ends, but only for a limited time."""

    def __init__(self, timeout: asyncio.Timeout, release: Callable[[], None]) -> None:
        self._timeout = timeout
        self._release: Callable[[], None] | None = release
        self._timer: asyncio.TimerHandle | None = None
        # Time of the event loop from which on the work hangs.
        self.hangs_from = float("inf")

    def start(self) -> None:
        """Let the time run from now on. Before, the slot is held without a limit."""
        loop = asyncio.get_running_loop()
        self.hangs_from = loop.time() + HANG_SECONDS
        self._timer = loop.call_later(SLOT_SECONDS, self.give_back)

    def give_back(self) -> None:
        """Let the next piece of work begin. A second call has no effect."""
        if self._timer:
            self._timer.cancel()
        if self._release:
            self._release()
            self._release = None

    def end(self) -> None:
        """Raise TimeoutError in the work."""
        self._timeout.reschedule(asyncio.get_running_loop().time())


class Slots:
    """Slots for work of one kind: first come, first served.

    - `count`: pieces of work that count as load at the same time.
    - `total`: pieces of work under way at the same time, with those that do not count any more. It
      bounds the connections and the memory.
    """

    def __init__(self, count: int, total: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._total = total
        # The oldest comes first.
        self._under_way: list[Slot] = []
        self._one_ended = asyncio.Event()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Slot]:
        """Wait for a slot. The work must call its `start` when it begins to load anything.

        Raises TimeoutError in work that hangs, if other work needs its place.
        """
        await self._free.acquire()
        async with asyncio.timeout(None) as timeout:
            slot = Slot(timeout, self._free.release)
            try:
                await self._wait_for_room()
                self._under_way.append(slot)
                yield slot
            finally:
                slot.give_back()
                self._remove(slot)

    async def _wait_for_room(self) -> None:
        """Wait until less than `total` is under way, and end the oldest work if it hangs."""
        loop = asyncio.get_running_loop()
        while len(self._under_way) >= self._total:
            oldest = self._under_way[0]
            if oldest.hangs_from <= loop.time():
                self._remove(oldest)
                oldest.end()
            else:
                self._one_ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(oldest.hangs_from):
                        await self._one_ended.wait()

    def _remove(self, slot: Slot) -> None:
        if slot in self._under_way:
            self._under_way.remove(slot)
            self._one_ended.set()
