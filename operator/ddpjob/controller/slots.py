"""Limits on work that runs side by side. Work that hangs does not use them up.

A limit protects something from load: the API server, or this process. Work that waits long for its
answer loads neither, for example a create whose admission webhook hangs. So its slot goes to the
next in line while it still waits.

Work belongs to a group: the namespace and the kind of its request. A webhook that hangs concerns
some groups, few or many. So only a share of the places is for groups of which work hangs, all of
them together.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import inf

from ddpjob.controller.errors import NotSent

# Seconds that a piece of work counts as load. Most requests take a hundredth of it. A job stands in
# several lines one after another (worker, Service, pods), so this must be well below a second.
SLOT_SECONDS = 0.5

# Seconds after which work hangs. It may then be ended for other work, except for the share.
HANGS_AFTER = 1.0

# Seconds after which the group of work is remembered as one that hangs. If there is no share, work
# may be ended for other work after this time: if the API server is so slow with every request, the
# Lease cannot be renewed either.
HANG_SECONDS = 5.0

TOO_MANY_HANG = (
    "requests of this kind hang, and {number} or more of those are under way, so this one was not "
    "sent"
)


class Slot:
    """Counts a piece of work as load until it ends, but only for a limited time."""

    def __init__(self, group: str, timeout: asyncio.Timeout, release: Callable[[], None]) -> None:
        self.group = group
        self._timeout = timeout
        self._release: Callable[[], None] | None = release
        self._timer: asyncio.TimerHandle | None = None
        # Time of the event loop at which the work began to load anything.
        self.started = inf

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
    - `share`: pieces of work that may hang at the same time although other work needs their places.
      Half as many more are for groups that may have recovered: one piece of each. Without a share,
      no group is refused.
    """

    def __init__(self, count: int, total: int, share: int | None = None) -> None:
        assert share is None or (share >= 2 and share + share // 2 <= total)
        self._free = asyncio.Semaphore(count)
        self._total = total
        self._share = share
        self._under_way: list[Slot] = []
        self._one_ended = asyncio.Event()
        # Groups of which work lasted for HANG_SECONDS or was ended, and none was quick since then.
        self._hung: set[str] = set()

    @asynccontextmanager
    async def take(self, group: str = "") -> AsyncIterator[Slot]:
        """Wait for a slot. The work must call its `start` when it begins to load anything.

        Raises TimeoutError in work that hangs, if other work needs its place. Raises NotSent,
        before the work begins, if its group hangs and the share is used up.
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
            if self._share is not None and not self._may_add(group, self._share, loop.time()):
                raise NotSent(TOO_MANY_HANG.format(number=self._share))
            if len(self._under_way) < self._total:
                return
            moment = self._end_one(loop.time())
            if moment > loop.time():
                self._one_ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(moment):
                        await self._one_ended.wait()

    def _may_add(self, group: str, share: int, now: float) -> bool:
        """Return True if work of a group may be added. Ends other work if that is necessary."""
        hanging = {slot.group for slot in self._under_way if slot.started + HANGS_AFTER <= now}
        suspects = self._hung | hanging
        if group not in suspects:
            return True
        held = [slot.group for slot in self._under_way if slot.group in suspects]
        if len(held) < share:
            return True
        # The group may have recovered. One piece of its work shows whether it has.
        if group in held:
            return False
        return len(held) < share + share // 2 or self._end_one(now) <= now

    def _end_one(self, now: float) -> float:
        """End the oldest work that may end for other work. Return from when on it may.

        The oldest pieces of all are the share: the answer of a webhook that hangs comes late, and
        has its name.
        """
        first = self._share or 0
        wait = HANG_SECONDS if self._share is None else HANGS_AFTER
        oldest = sorted(self._under_way, key=lambda slot: slot.started)[first]
        moment = oldest.started + wait
        if moment <= now:
            self._hung.add(oldest.group)
            self._remove(oldest)
            oldest.end()
        # Work that begins to load something later may have to end earlier.
        return min(moment, now + wait)

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
