"""Limits on work that runs side by side. Work that hangs does not use them up.

A limit protects something from load: the API server, or this process. Work that waits long for its
answer loads neither, for example a create whose admission webhook hangs. So its slot goes to the
next in line while it still waits.

Work belongs to a group: the namespace of its request. A webhook that hangs mostly concerns a few
namespaces. So only a share of the places is for work of one group that hangs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from ddpjob.controller.errors import Unreachable

# Seconds that a piece of work counts as load. Most requests take a hundredth of it. A job stands in
# several lines one after another (worker, Service, pods), so this must be well below a second.
SLOT_SECONDS = 0.5

# Seconds after which work hangs. If more than its share of a group hangs, the rest of that group is
# refused, and may be ended for work of another group.
HANGS_AFTER = 1.0

# Seconds after which any work may be ended because too much hangs. If the API server is so slow
# with every request, the Lease cannot be renewed either.
HANG_SECONDS = 5.0

TOO_MANY_HANG = (
    "{number} other requests of this kind have had no answer in this namespace for more than a "
    "second"
)


class Slot:
    """Counts a piece of work as load until it ends, but only for a limited time."""

    def __init__(self, group: str, timeout: asyncio.Timeout, release: Callable[[], None]) -> None:
        self.group = group
        self._timeout = timeout
        self._release: Callable[[], None] | None = release
        self._timer: asyncio.TimerHandle | None = None
        # Time of the event loop at which the work began to load anything.
        self.started = float("inf")

    def start(self) -> None:
        """Let the time run from now on. Before, the slot is held without a limit."""
        loop = asyncio.get_running_loop()
        self.started = loop.time()
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
    - `share`: pieces of work of one group that may hang at the same time.
    """

    def __init__(self, count: int, total: int, share: int | None = None) -> None:
        self._free = asyncio.Semaphore(count)
        self._total = total
        self._share = share or total + 1
        # The oldest comes first.
        self._under_way: list[Slot] = []
        self._one_ended = asyncio.Event()
        # Groups of which work hung until its end, and none has ended quickly since then.
        self._hung: set[str] = set()

    @asynccontextmanager
    async def take(self, group: str = "") -> AsyncIterator[Slot]:
        """Wait for a slot. The work must call its `start` when it begins to load anything.

        Raises TimeoutError in work that hangs, if other work needs its place. Raises Unreachable,
        before the work begins, if too much of its group hangs.
        """
        await self._free.acquire()
        async with asyncio.timeout(None) as timeout:
            slot = Slot(group, timeout, self._free.release)
            try:
                await self._wait_for_room(group)
                self._under_way.append(slot)
                yield slot
            finally:
                slot.give_back()
                self._remove(slot)

    async def _wait_for_room(self, group: str) -> None:
        """Wait until less than `total` is under way, and end work that hangs to make room."""
        loop = asyncio.get_running_loop()
        while True:
            if self._too_many_from(group, self._share) <= loop.time():
                raise Unreachable(TOO_MANY_HANG.format(number=self._share))
            if len(self._under_way) < self._total:
                return
            first = min(self._under_way, key=self._may_end_from)
            moment = self._may_end_from(first)
            if moment <= loop.time():
                self._hung.add(first.group)
                self._remove(first)
                first.end()
            else:
                self._one_ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(moment):
                        await self._one_ended.wait()

    def _may_end_from(self, slot: Slot) -> float:
        """Return the time from which the work may be ended, because other work needs its place."""
        return min(slot.started + HANG_SECONDS, self._too_many_from(slot.group, self._share + 1))

    def _too_many_from(self, group: str, number: int) -> float:
        """Return from when on `number` pieces of a group are too many, because its share hangs."""
        started = sorted(slot.started for slot in self._under_way if slot.group == group)
        if len(started) < number:
            return float("inf")
        return 0.0 if group in self._hung else started[self._share - 1] + HANGS_AFTER

    def _remove(self, slot: Slot) -> None:
        if slot not in self._under_way:
            return
        self._under_way.remove(slot)
        self._one_ended.set()
        lasted = asyncio.get_running_loop().time() - slot.started
        if lasted >= HANG_SECONDS:
            self._hung.add(slot.group)
        elif 0 <= lasted < HANGS_AFTER:
            self._hung.discard(slot.group)
