"""Limits on concurrent work. Hanging work does not use them up.

A limit protects the API server or this process from load. Work loads neither of them during a long
wait for its answer, for example if an admission webhook hangs. So its place goes to the next in
line while it still waits. How long it keeps the place depends on how long answers take at present.

Work belongs to a group: the namespace and the kind of its request. A hanging webhook concerns some
groups, few or many. So the line is fair to groups, and all groups with hanging work together get
only a share of the work under way.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from ddpjob.controller.errors import NotSent
from ddpjob.controller.fair import FairLine, Group
from ddpjob.kube.errors import ApiError

# A piece of work counts as load for so many times the usual time of an answer, within these limits
# in seconds. Most requests take a hundredth of a second. A job stands in several lines one after
# another, so the longest must be well below a second.
USUAL_TIMES = 2
SHORTEST_LOAD = 0.05
LONGEST_LOAD = 0.5

# The usual time until the first answers, and the weight of each answer.
FIRST_USUAL = 0.02
WEIGHT = 1 / 8

# Work may be ended for other work after so many times as long as it counts as load.
PATIENCE = 2

# Seconds until work counts as hanging, unless other work of its group was answered as recently: an
# API server under load answers everything late. The group then gets only the share.
HANGS_AFTER = 1.0

# Seconds until the group of the work is remembered as a hanging one. A later answer says nothing
# about the API server.
HANG_SECONDS = 5.0

# Seconds until a group is forgotten.
MEMORY = 300.0

TOO_MANY_HANG = (
    "requests of this kind hang, and {number} or more of those are under way, so this one was not "
    "sent"
)


class Slot:
    """A piece of work: first in the line, then under way. It counts as load only for some time."""

    def __init__(self, slots: "Slots", group: Group, timeout: asyncio.Timeout) -> None:
        self.group = group
        # The result is True if the work may begin, and False if it is refused.
        self.turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Event loop time at which the work began to load anything.
        self.started = inf
        self.loads = False
        self.timer: asyncio.TimerHandle | None = None
        self._slots = slots
        self._timeout = timeout

    def start(self) -> None:
        """Let the time run from now on. Before, the slot is held without a limit."""
        self._slots.start(self)

    def end(self) -> None:
        """Raise TimeoutError in the work."""
        self._timeout.reschedule(asyncio.get_running_loop().time())


class Slots:
    """Slots for work of one kind. The line for them is fair to groups.

    - `count`: pieces of work that count as load at the same time.
    - `total`: pieces of work under way at the same time, including those that no longer count as
      load. It bounds the connections and the memory.
    - `share`: of these, pieces of work of hanging groups. Half as many more are for groups that may
      have recovered: one new piece of each. Without a share, no work is ended or refused.
    """

    def __init__(self, count: int, total: int, share: int | None = None) -> None:
        assert share is None or (share >= 2 and share + share // 2 <= total)
        self._count = count
        self._total = total
        self._share = share
        self._loading = 0
        self._line: FairLine[Slot] = FairLine()
        self._under_way: list[Slot] = []
        # Groups whose work lasted for HANG_SECONDS or was ended, with the time of it. An answer
        # within HANGS_AFTER removes a group.
        self._hung: Times = Times()
        # When a group last got an answer, except answers after HANG_SECONDS.
        self._answered: Times = Times()
        # How long an answer usually takes, in seconds.
        self._usual = FIRST_USUAL
        self._next_look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def take(self, group: Group = "") -> AsyncIterator[Slot]:
        """Wait for a slot. The work must call its `start` when it begins to load anything.

        Raises TimeoutError in hanging work if other work needs its place. Raises NotSent,
        before the work begins, if its group hangs and the share is used up.
        """
        async with asyncio.timeout(None) as timeout:
            slot = Slot(self, group, timeout)
            self._line.add(group, slot)
            try:
                self._look()
                if not await slot.turn:
                    raise NotSent(TOO_MANY_HANG.format(number=self._share))
                try:
                    yield slot
                except ApiError:
                    self._learn(slot)
                    raise
                else:
                    self._learn(slot)
            finally:
                self._leave(slot)

    def start(self, slot: Slot) -> None:
        """Let the time of a piece of work run from now on."""
        loop = asyncio.get_running_loop()
        slot.started = loop.time()
        slot.timer = loop.call_later(self._load_seconds, self._stop_load, slot)

    # The line

    def _look(self) -> None:
        """Let work begin in turn, as far as there is room."""
        while self._line and self._loading < self._count:
            slot = self._line.first()
            suspects = self._suspects(slot.group)
            if slot.turn.cancelled():
                self._line.remove(slot.group, slot)
            elif self._has_room(slot.group, suspects) or self._end_one_for(slot.group, suspects):
                self._line.remove(slot.group, slot)
                self._begin(slot)
            elif self._is_share_used_up(slot.group, suspects):
                self._line.remove(slot.group, slot)
                slot.turn.set_result(False)
            else:
                self._look_later()
                return

    def _begin(self, slot: Slot) -> None:
        slot.loads = True
        self._loading += 1
        self._under_way.append(slot)
        self._line.begin(slot.group)
        slot.turn.set_result(True)

    def _look_later(self) -> None:
        """Look again when time has changed what may begin."""
        now = _now()
        moments = [
            slot.started + seconds
            for slot in self._under_way
            for seconds in (self._patience, HANGS_AFTER)
        ]
        # Later work changes nothing before its patience is over.
        moment = min([moment for moment in moments if moment > now], default=inf)
        if self._next_look:
            self._next_look.cancel()
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_at(min(moment, now + self._patience), self._look)

    # Hanging work

    def _suspects(self, group: Group) -> set[Group]:
        """Return the groups whose work probably hangs, among those under way and `group`."""
        if self._share is None:
            return set()
        before = _now() - HANGS_AFTER
        late = {slot.group for slot in self._under_way if slot.started <= before}
        hanging = {other for other in late if not self._is_answered(other)}
        known = {other for other in (group, *self._line.under_way) if other in self._hung}
        return hanging | known

    def _is_answered(self, group: Group) -> bool:
        """Return True if a group gets answers: its work is then only slow."""
        return _now() - self._answered.of(group) <= HANGS_AFTER

    def _held(self, suspects: set[Group]) -> int:
        return sum(self._line.under_way[group] for group in suspects)

    def _has_new(self, group: Group) -> bool:
        """Return True if work of a group is under way and does not hang yet."""
        after = _now() - HANGS_AFTER
        return any(slot.group == group and slot.started > after for slot in self._under_way)

    def _has_room(self, group: Group, suspects: set[Group]) -> bool:
        if len(self._under_way) >= self._total:
            return False
        if group not in suspects:
            return True
        assert self._share is not None
        # The group may have recovered. One new piece of its work tests this.
        more = 0 if self._has_new(group) else self._share // 2
        return self._held(suspects) < self._share + more

    def _is_share_used_up(self, group: Group, suspects: set[Group]) -> bool:
        return group in suspects and self._share is not None and self._held(suspects) >= self._share

    def _end_one_for(self, group: Group, suspects: set[Group]) -> bool:
        """End a piece of work for work of a group, and return True if there was one.

        The oldest pieces of all are not ended, as many as the share: the answer of a hanging
        webhook comes late, and has its name. Of the others, one of a hanging group is ended first,
        then one of a group with more pieces than this group has. A hanging group gets no place of
        others.
        """
        if self._share is None or (group in suspects and self._has_new(group)):
            return False
        before = _now() - self._patience
        oldest = sorted(self._under_way, key=lambda slot: slot.started)[self._share :]
        may_end = [slot for slot in oldest if slot.started <= before]
        under_way = self._line.under_way
        found = [slot for slot in may_end if slot.group in suspects]
        if not found and group not in suspects:
            found = [slot for slot in may_end if under_way[slot.group] > under_way[group]]
        if not found:
            return False
        ended = found[0]
        if not self._is_answered(ended.group):
            self._hung.note(ended.group)
        self._remove(ended)
        ended.end()
        return True

    # Time

    @property
    def _load_seconds(self) -> float:
        """Return the seconds for which work counts as load."""
        return min(max(SHORTEST_LOAD, USUAL_TIMES * self._usual), LONGEST_LOAD)

    @property
    def _patience(self) -> float:
        """Return the seconds after which work may be ended for other work."""
        return PATIENCE * self._load_seconds

    def _learn(self, slot: Slot) -> None:
        """Remember how long an answer took, and when its group got it."""
        lasted = _now() - slot.started
        if not 0 <= lasted < HANG_SECONDS:
            return
        self._usual += WEIGHT * (min(lasted, HANGS_AFTER) - self._usual)
        self._answered.note(slot.group)
        if lasted < HANGS_AFTER:
            self._hung.forget(slot.group)

    # The end of work

    def _stop_load(self, slot: Slot) -> None:
        """Let the next piece of work begin. A second call has no effect."""
        self._forget_load(slot)
        self._look()

    def _leave(self, slot: Slot) -> None:
        if slot in self._under_way:
            if _now() - slot.started >= HANG_SECONDS:
                self._hung.note(slot.group)
            self._remove(slot)
        elif self._line.contains(slot.group, slot):
            self._line.remove(slot.group, slot)
        self._look()

    def _remove(self, slot: Slot) -> None:
        self._forget_load(slot)
        self._under_way.remove(slot)
        self._line.end(slot.group)

    def _forget_load(self, slot: Slot) -> None:
        if slot.timer:
            slot.timer.cancel()
        self._loading -= slot.loads
        slot.loads = False


class Times:
    """When something last happened to each group, for MEMORY seconds."""

    def __init__(self) -> None:
        # The oldest is first.
        self._times: dict[Group, float] = {}

    def __contains__(self, group: Group) -> bool:
        return _now() - self.of(group) < MEMORY

    def of(self, group: Group) -> float:
        return self._times.get(group, -inf)

    def note(self, group: Group) -> None:
        """Note the present time, and forget what is too old."""
        now = _now()
        self.forget(group)
        self._times[group] = now
        while self._times and now - next(iter(self._times.values())) >= MEMORY:
            del self._times[next(iter(self._times))]

    def forget(self, group: Group) -> None:
        self._times.pop(group, None)


def _now() -> float:
    return asyncio.get_running_loop().time()
