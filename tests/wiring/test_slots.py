"""Slots: how many count as load, for how long, and what ends if too much is under way."""

import asyncio

import pytest
from gang import until

from ddpjob.controller import slots
from ddpjob.controller.slots import Slots


class Work:
    """Pieces of work that stay in their slots until the test ends them."""

    def __init__(self, count: int, total: int) -> None:
        self.slots = Slots(count, total)
        self.begun: list[int] = []
        self.timed_out: list[int] = []
        self.may_end = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, number: int, *, start: bool = True) -> None:
        for _ in range(number):
            self.tasks.append(asyncio.create_task(self._hang(len(self.tasks), start)))

    async def _hang(self, index: int, start: bool) -> None:
        try:
            async with self.slots.take() as slot:
                self.begun.append(index)
                if start:
                    slot.start()
                await self.may_end.wait()
        except TimeoutError:
            self.timed_out.append(index)

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

    def make(count, total=9):
        made.append(Work(count, total))
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
