"""Slots: how many count as load, for how long, and what ends if too much is under way."""

import asyncio

import pytest
from gang import until

from ddpjob.controller import slots
from ddpjob.controller.errors import Unreachable
from ddpjob.controller.slots import Slot, Slots


class Work:
    """Pieces of work that stay in their slots until the test ends them."""

    def __init__(self, count: int, total: int, share: int | None = None) -> None:
        self.slots = Slots(count, total, share)
        self.begun: list[int] = []
        self.timed_out: list[int] = []
        self.refused: list[int] = []
        self.may_end = asyncio.Event()
        self._begun_slots: list[Slot] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, number: int, group: str = "", *, start: bool = True) -> None:
        for _ in range(number):
            self.tasks.append(asyncio.create_task(self._hang(len(self.tasks), group, start)))

    async def _hang(self, index: int, group: str, start: bool) -> None:
        try:
            async with self.slots.take(group) as slot:
                self.begun.append(index)
                self._begun_slots.append(slot)
                if start:
                    slot.start()
                await self.may_end.wait()
        except TimeoutError:
            self.timed_out.append(index)
        except Unreachable:
            self.refused.append(index)

    def start(self) -> None:
        """Let the time of all work that has begun run."""
        for slot in self._begun_slots:
            slot.start()

    def age(self) -> None:
        """Let all work under way hang: let it have started long ago."""
        for slot in self._begun_slots:
            slot.started -= slots.HANGS_AFTER

    async def settle(self) -> None:
        """Let everything happen that needs no timer."""
        for _ in range(10 * len(self.tasks)):
            await asyncio.sleep(0)

    def under_way(self) -> list[int]:
        return [index for index in self.begun if not self.tasks[index].done()]


@pytest.fixture
async def work():
    """Return a function that makes a Work, which is cancelled after the test."""
    made = []

    def make(count, total=9, share=None):
        made.append(Work(count, total, share))
        return made[-1]

    yield make
    tasks = [task for one in made for task in one.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.05)
    monkeypatch.setattr(slots, "HANG_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Let no time be over, unless a test uses `quick`."""
    monkeypatch.setattr(slots, "SLOT_SECONDS", 1000)
    monkeypatch.setattr(slots, "HANG_SECONDS", 1000)
    monkeypatch.setattr(slots, "HANGS_AFTER", 1000)


async def test_only_so_many_begin_and_the_others_follow_in_their_order(work):
    two = work(2)
    two.add(5)
    await two.settle()
    assert two.begun == [0, 1]
    two.may_end.set()
    await asyncio.gather(*two.tasks)
    assert two.begun == [0, 1, 2, 3, 4]


async def test_work_that_lasts_lets_the_next_begin(work, quick):
    two = work(2)
    two.add(5)
    await until(lambda: two.begun == [0, 1, 2, 3, 4])
    assert two.under_way() == [0, 1, 2, 3, 4]


async def test_the_time_of_a_slot_begins_when_its_work_starts(work, quick):
    waiting = work(1)
    waiting.add(1, start=False)
    waiting.add(1)
    started = work(1)
    started.add(3)
    await until(lambda: started.begun == [0, 1, 2])
    assert waiting.begun == [0]


async def test_a_slot_is_given_back_only_once(work, quick):
    one = work(1)
    one.add(2)
    await until(lambda: one.begun == [0, 1])
    one.tasks[0].cancel()
    one.add(2, start=False)
    await until(lambda: one.begun == [0, 1, 2])
    await one.settle()
    assert one.begun == [0, 1, 2]


async def test_work_that_is_cancelled_in_the_line_takes_no_slot(work):
    one = work(1)
    one.add(3)
    await one.settle()
    one.tasks[1].cancel()
    await one.settle()
    one.may_end.set()
    await asyncio.gather(one.tasks[0], one.tasks[2])
    assert one.begun == [0, 2]


async def test_if_too_much_hangs_the_oldest_ends_for_the_next(work, quick):
    three = work(1, total=3)
    three.add(5)
    await until(lambda: three.under_way() == [2, 3, 4])
    assert three.timed_out == [0, 1]


async def test_if_no_other_work_waits_nothing_ends(work, quick):
    three, other = work(1, total=3), work(1, total=3)
    three.add(3)
    other.add(4)
    await until(lambda: other.timed_out == [0])
    await until(lambda: len(three.begun) == 3)
    assert three.timed_out == []


async def test_work_that_is_only_slow_is_not_ended(work, monkeypatch):
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.05)
    three = work(1, total=3)
    three.add(5)
    await until(lambda: three.begun == [0, 1, 2])
    three.may_end.set()
    await asyncio.gather(*three.tasks)
    assert (three.begun, three.timed_out) == ([0, 1, 2, 3, 4], [])


async def test_work_that_is_cancelled_while_it_waits_for_room_takes_no_slot(work, monkeypatch):
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.05)
    two = work(1, total=2)
    two.add(4)
    await until(lambda: two.begun == [0, 1])
    two.tasks[2].cancel()
    two.tasks[0].cancel()
    await until(lambda: two.begun == [0, 1, 3])


# The share of a group


@pytest.fixture
def hangs_soon(monkeypatch):
    monkeypatch.setattr(slots, "HANGS_AFTER", 0.2)


async def test_if_the_share_of_a_group_hangs_the_rest_of_it_is_refused(work, hangs_soon):
    nine = work(9, share=2)
    nine.add(2, "bad")
    await nine.settle()
    nine.add(1, "bad")
    await nine.settle()
    assert nine.begun == [0, 1, 2]
    await asyncio.sleep(0.2)
    nine.add(1, "bad")
    nine.add(1, "good")
    await nine.settle()
    assert (nine.refused, nine.under_way()) == ([3], [0, 1, 2, 4])


async def test_what_a_group_has_beyond_its_share_ends_for_another_group(work, hangs_soon):
    four = work(9, total=4, share=2)
    four.add(6, "bad")
    four.add(2, "good")
    await until(lambda: len(four.timed_out) == 2)
    await four.settle()
    assert set(four.refused) == {4, 5}
    # The oldest are nearest to their answer, which has the name of the webhook.
    assert sorted(four.under_way()) == [0, 1, 6, 7]


async def test_all_groups_that_hang_have_one_share(work, hangs_soon):
    six = work(9, total=6, share=2)
    for number in range(6):
        six.add(1, f"bad-{number}")
    six.add(3, "good")
    await until(lambda: len(set(six.under_way()) & {6, 7, 8}) == 3)
    assert six.under_way()[:2] == [0, 1]
    # Another piece of a group that hangs is not added, and one of a new group is.
    six.add(1, "bad-0")
    six.add(1, "new")
    await until(lambda: six.refused == [9])
    await until(lambda: 10 in six.under_way())


async def test_a_group_that_hung_may_show_that_it_has_recovered(work):
    nine = work(9, share=2)
    nine.add(2, "bad")
    await nine.settle()
    nine.age()
    nine.slots._hung.add("was-bad")
    # One piece of its work is added although the share is used up, and no second one.
    nine.add(2, "was-bad")
    await nine.settle()
    assert (nine.under_way(), nine.refused) == ([0, 1, 2], [3])
    nine.tasks[2].cancel()
    await nine.settle()
    nine.add(2, "was-bad")
    await nine.settle()
    assert nine.under_way() == [0, 1, 4, 5]


async def test_groups_that_may_have_recovered_take_turns(work):
    nine = work(9, share=2)
    nine.add(2, "bad")
    await nine.settle()
    nine.age()
    nine.slots._hung |= {"first", "second"}
    nine.add(1, "first")
    await nine.settle()
    nine.add(1, "second")
    await nine.settle()
    # There is one place for them, and the first has it for HANGS_AFTER.
    assert (nine.under_way(), nine.refused) == ([0, 1, 2], [3])
    nine.age()
    nine.add(1, "second")
    await nine.settle()
    assert (nine.under_way(), nine.timed_out) == ([0, 1, 4], [2])


async def test_work_that_starts_later_is_ended_too(work, hangs_soon):
    four = work(9, total=4, share=2)
    four.add(4, "bad", start=False)
    await four.settle()
    four.add(1, "good")
    await four.settle()
    four.start()
    await until(lambda: 4 in four.under_way())


async def test_a_group_that_hung_stays_within_its_share_until_one_ends_quickly(work, monkeypatch):
    monkeypatch.setattr(slots, "HANG_SECONDS", 0.1)
    nine = work(9, share=2)
    nine.add(1, "bad")
    await asyncio.sleep(0.2)
    nine.tasks[0].cancel()
    await nine.settle()
    nine.add(3, "bad")
    await nine.settle()
    assert (nine.begun, nine.refused) == ([0, 1, 2], [3])
    nine.tasks[1].cancel()
    await nine.settle()
    nine.add(3, "bad")
    await nine.settle()
    assert (nine.begun, nine.refused) == ([0, 1, 2, 4, 5, 6], [3])
