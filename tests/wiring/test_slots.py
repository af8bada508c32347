"""Slots: who is next, how long work counts as load, and what ends or is refused if work hangs."""

import asyncio
from collections import defaultdict
from contextlib import suppress

import pytest
from gang import until

from ddpjob.controller import slots
from ddpjob.controller.errors import NotSent
from ddpjob.controller.slots import Slot, Slots, Times
from ddpjob.kube.errors import ApiError, Unreachable


class Work:
    """Pieces of work that stay in their slots until the test ends them.

    Each is known by its number: the first added is 0.
    """

    def __init__(self, count: int, total: int, share: int) -> None:
        self.slots = Slots(count, total, share)
        self.begun: list[int] = []
        self.timed_out: list[int] = []
        self.refused: list[int] = []
        self.may_end = asyncio.Event()
        self.answers: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.tasks: list[asyncio.Task[None]] = []
        self._begun_slots: dict[int, Slot] = {}

    def add(self, number: int, group: str = "", *, start: bool = True) -> None:
        for _ in range(number):
            self.tasks.append(asyncio.create_task(self._hang(len(self.tasks), group, start)))

    async def _hang(self, index: int, group: str, start: bool) -> None:
        try:
            async with self.slots.take(group) as slot:
                self.begun.append(index)
                self._begun_slots[index] = slot
                if start:
                    slot.start()
                ends = [self.may_end.wait(), self.answers[index].wait()]
                waiting = [asyncio.ensure_future(end) for end in ends]
                try:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for end in waiting:
                        end.cancel()
        except TimeoutError:
            self.timed_out.append(index)
        except NotSent:
            self.refused.append(index)

    def start(self) -> None:
        """Let the time run for all work that has begun."""
        for slot in self._begun_slots.values():
            slot.start()

    async def age(self, seconds: float) -> None:
        """Let all work under way have started so much earlier, and let what follows happen."""
        for slot in self._begun_slots.values():
            slot.started -= seconds
        self.slots._look()
        await self.settle()

    async def end(self, *numbers: int) -> None:
        """Let pieces of work end, and let what follows happen."""
        for number in numbers:
            self.tasks[number].cancel()
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that needs no timer."""
        for _ in range(10 * len(self.tasks)):
            await asyncio.sleep(0)

    def under_way(self) -> list[int]:
        return [index for index in self.begun if not self.tasks[index].done()]


@pytest.fixture
async def work():
    """Return a function for making a Work. It is cancelled after the test."""
    made = []

    def make(count=9, total=9, share=4):
        made.append(Work(count, total, share))
        return made[-1]

    yield make
    tasks = [task for one in made for task in one.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def no_time_is_over(monkeypatch):
    """Let work count as load, and have patience, for longer than a test, unless it says less."""
    monkeypatch.setattr(slots, "SHORTEST_LOAD", 1000)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 1000)
    monkeypatch.setattr(slots, "HANGS_AFTER", 10_000)
    monkeypatch.setattr(slots, "HANG_SECONDS", 10_000)


@pytest.fixture
def loads_shortly(monkeypatch):
    monkeypatch.setattr(slots, "SHORTEST_LOAD", 0.05)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 0.05)


# Seconds after which work has hung (HUNG), or may only be ended for other work (SLOW).
HUNG = 20_000
SLOW = 5_000


# The line


async def test_only_so_many_begin_and_the_others_follow_in_their_order(work):
    two = work(2)
    two.add(5)
    await two.settle()
    assert two.begun == [0, 1]
    two.may_end.set()
    await asyncio.gather(*two.tasks)
    assert two.begun == [0, 1, 2, 3, 4]


async def test_the_group_with_the_fewest_under_way_is_next(work):
    three = work(3)
    three.add(6, "many")
    await three.settle()
    three.add(2, "few")
    await three.end(0)
    assert three.begun == [0, 1, 2, 6]
    # Both groups have one under way, and it is the turn of the first.
    await three.end(1)
    assert three.begun == [0, 1, 2, 6, 3]
    await three.end(3)
    assert three.begun == [0, 1, 2, 6, 3, 7]


async def test_groups_with_as_many_under_way_take_turns(work):
    one = work(1)
    one.add(1, "first")
    one.add(2, "second")
    one.add(2, "third")
    for number in (0, 1, 3, 2):
        await one.settle()
        await one.end(number)
    assert one.begun == [0, 1, 3, 2, 4]


async def test_work_that_is_cancelled_in_the_line_takes_no_slot(work):
    one = work(1)
    one.add(3)
    await one.settle()
    await one.end(1)
    one.may_end.set()
    await asyncio.gather(one.tasks[0], one.tasks[2])
    assert one.begun == [0, 2]


async def test_work_that_is_cancelled_at_its_turn_gives_its_slot_to_the_next(work):
    one = work(1)
    one.add(3)
    await one.settle()
    # The second piece gets its turn in the moment of its cancellation.
    one.tasks[0].cancel()
    one.tasks[1].cancel()
    await one.settle()
    assert one.begun == [0, 2]


# Load


async def test_work_that_lasts_lets_the_next_begin(work, loads_shortly):
    two = work(2)
    two.add(5)
    await until(lambda: two.begun == [0, 1, 2, 3, 4])
    assert two.under_way() == [0, 1, 2, 3, 4]


async def test_the_time_of_a_slot_begins_when_its_work_starts(work, loads_shortly):
    waiting = work(1)
    waiting.add(1, start=False)
    waiting.add(1)
    started = work(1)
    started.add(3)
    await until(lambda: started.begun == [0, 1, 2])
    assert waiting.begun == [0]


async def test_a_slot_is_given_back_only_once(work, loads_shortly):
    one = work(1)
    one.add(2)
    await until(lambda: one.begun == [0, 1])
    await one.end(0)
    one.add(2, start=False)
    await until(lambda: one.begun == [0, 1, 2])
    await one.settle()
    assert one.begun == [0, 1, 2]


async def answer(made: Slots, seconds: float, group: str = "", times: int = 1) -> None:
    """Let work be answered after so many seconds."""
    for _ in range(times):
        async with made.take(group) as slot:
            slot.start()
            slot.started -= seconds


async def test_how_long_work_counts_as_load_follows_the_time_of_an_answer(monkeypatch):
    monkeypatch.setattr(slots, "SHORTEST_LOAD", 0.05)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 0.5)
    monkeypatch.setattr(slots, "HANGS_AFTER", 1)
    monkeypatch.setattr(slots, "HANG_SECONDS", 5)
    nine = Slots(9, 9, 4)
    for seconds, load in ((0.001, 0.05), (0.1, 0.2), (0.7, 0.5), (2, 0.5), (0.001, 0.05)):
        await answer(nine, seconds, times=50)
        assert nine._load_seconds == pytest.approx(load, rel=0.2)
    # What hangs says nothing about the API server.
    await answer(nine, 6, times=50)
    assert nine._load_seconds == 0.05


async def test_only_an_answer_shows_how_long_answers_take():
    nine = Slots(9, 9, 4)
    usual = nine._usual

    async def end_by(error: BaseException) -> None:
        with suppress(type(error)):
            async with nine.take() as slot:
                slot.start()
                raise error

    await end_by(asyncio.CancelledError())
    await end_by(Unreachable("no answer"))
    assert nine._usual == usual
    await end_by(ApiError(409, "Conflict", "it has changed"))
    assert nine._usual < usual


# Room


async def test_work_of_another_group_takes_the_place_of_the_oldest_beyond_the_share(work):
    six = work(total=6, share=4)
    six.add(6, "many")
    await six.settle()
    await six.age(SLOW)
    six.add(2, "few")
    await six.settle()
    # The oldest are nearest to their answer. It has the name of the webhook.
    assert (six.timed_out, six.under_way()) == ([4, 5], [0, 1, 2, 3, 6, 7])


async def test_work_is_not_ended_before_its_patience_is_over(work):
    six = work(total=6, share=4)
    six.add(6, "many")
    six.add(2, "few")
    await six.settle()
    assert (six.timed_out, six.begun) == ([], [0, 1, 2, 3, 4, 5])
    await six.end(0)
    assert six.begun == [0, 1, 2, 3, 4, 5, 6]


async def test_a_group_takes_no_place_from_one_that_has_as_few(work):
    six = work(total=6, share=4)
    six.add(3, "first")
    six.add(3, "second")
    await six.settle()
    await six.age(SLOW)
    six.add(4, "third")
    six.add(1, "first")
    await six.settle()
    # Two places are beyond the share. With them, all have two.
    assert (six.timed_out, six.begun[6:]) == ([4, 5], [6, 7])


async def test_work_ends_for_other_work_as_soon_as_its_patience_is_over(work, loads_shortly):
    six = work(total=6, share=4)
    six.add(6, "many")
    await until(lambda: len(six.begun) == 6)
    six.add(1, "few")
    await until(lambda: 6 in six.under_way())
    await until(lambda: six.timed_out == [4])


async def test_work_that_starts_late_is_ended_too(work, loads_shortly):
    six = work(total=6, share=4)
    six.add(6, "many", start=False)
    await six.settle()
    six.add(1, "few")
    await six.settle()
    six.start()
    await until(lambda: 6 in six.under_way())


async def test_work_that_is_cancelled_while_it_waits_for_room_takes_no_slot(work):
    six = work(total=6)
    six.add(8)
    await six.settle()
    await six.end(6)
    await six.end(0)
    assert six.begun == [0, 1, 2, 3, 4, 5, 7]


# The share of hanging groups


async def test_if_the_share_of_a_group_hangs_the_rest_of_it_is_refused(work):
    nine = work(share=2)
    nine.add(2, "bad")
    await nine.settle()
    nine.add(1, "bad")
    await nine.settle()
    assert nine.begun == [0, 1, 2]
    await nine.age(HUNG)
    nine.add(2, "bad")
    nine.add(1, "good")
    await nine.settle()
    # The first of them takes the place of an old one: it may show that the group has recovered.
    assert (nine.timed_out, nine.refused, nine.under_way()) == ([2], [4], [0, 1, 3, 5])


async def test_what_waits_is_refused_when_its_group_begins_to_hang(work, monkeypatch):
    monkeypatch.setattr(slots, "HANGS_AFTER", 1.0)
    four = work(total=4, share=2)
    four.add(6, "bad")
    await four.settle()
    assert four.refused == []
    await until(lambda: four.refused == [4, 5])


async def test_a_group_that_gets_answers_late_does_not_hang(work, monkeypatch):
    # An API server under load answers everything late.
    monkeypatch.setattr(slots, "HANGS_AFTER", 100)
    nine = work(share=2)
    nine.add(4, "late")
    await nine.settle()
    await nine.age(200)
    await answer_now(nine, 0)
    nine.add(3, "late")
    await nine.settle()
    assert (nine.refused, nine.under_way()) == ([], [1, 2, 3, 4, 5, 6])


async def test_all_groups_that_hang_have_one_share(work):
    six = work(total=6, share=4)
    for number in range(6):
        six.add(1, f"bad-{number}")
    await six.settle()
    await six.age(HUNG)
    six.add(3, "good")
    await six.settle()
    assert six.under_way() == [0, 1, 2, 3, 6, 7]
    # No more of a hanging group is added.
    six.add(1, "bad-0")
    await six.settle()
    assert six.refused == [9]


async def test_a_group_that_hung_may_show_that_it_has_recovered(work):
    nine = work(share=2)
    nine.add(2, "bad")
    await nine.settle()
    await nine.age(HUNG)
    # One new piece of its work is added, although older ones hang and the share is used up.
    nine.add(2, "bad")
    await nine.settle()
    assert (nine.under_way(), nine.refused) == ([0, 1, 2], [3])
    await answer_now(nine, 2)
    assert "bad" not in nine.slots._hung


async def answer_now(work: Work, number: int) -> None:
    """Let one piece of work be answered, and let what follows happen."""
    work.answers[number].set()
    await work.settle()


async def test_a_group_that_hangs_takes_no_place_of_one_that_is_only_slow(work):
    nine = work(total=9, share=2)
    nine.add(2, "bad")
    await nine.settle()
    await nine.age(HUNG)
    nine.add(5, "slow")
    await nine.settle()
    await nine.age(SLOW)
    nine.slots._hung.note("was-bad")
    nine.add(1, "was-bad")
    await nine.settle()
    assert nine.under_way() == [0, 1, 2, 3, 4, 5, 6, 7]
    nine.add(1, "bad")
    await nine.settle()
    assert (nine.timed_out, nine.refused) == ([], [8])


async def test_a_group_that_was_answered_just_now_is_only_slow(work, monkeypatch):
    six = work(total=6, share=2)
    await answer(six.slots, 0.001, "slow")
    six.add(6, "slow")
    await six.settle()
    await six.age(SLOW)
    six.add(1, "good")
    await six.settle()
    assert six.timed_out == [2]
    assert "slow" not in six.slots._hung
    monkeypatch.setattr(slots, "HANGS_AFTER", -1)
    six.add(1, "good")
    await six.settle()
    assert six.timed_out == [2, 3]
    assert "slow" in six.slots._hung


async def test_what_is_known_of_a_group_is_forgotten(monkeypatch):
    times = Times()
    times.note("old")
    monkeypatch.setattr(slots, "MEMORY", 0)
    assert "old" not in times
    times.note("new")
    assert times._times == {}


async def test_groups_that_may_have_recovered_take_turns(work):
    nine = work(share=2)
    nine.add(2, "bad")
    await nine.settle()
    await nine.age(HUNG)
    nine.slots._hung.note("first")
    nine.slots._hung.note("second")
    nine.add(1, "first")
    await nine.settle()
    nine.add(1, "second")
    await nine.settle()
    # There is one place for them, and the first has it until its patience is over.
    assert (nine.under_way(), nine.refused) == ([0, 1, 2], [3])
    await nine.age(SLOW)
    nine.add(1, "second")
    await nine.settle()
    assert (nine.under_way(), nine.timed_out) == ([0, 1, 4], [2])


async def test_a_group_that_hung_stays_within_its_share_until_one_is_answered_soon(work):
    nine = work(share=2)
    nine.add(1, "bad")
    await nine.settle()
    await nine.age(HUNG)
    await nine.end(0)
    nine.add(3, "bad")
    await nine.settle()
    assert (nine.begun, nine.refused) == ([0, 1, 2], [3])
    await answer_now(nine, 1)
    nine.add(3, "bad")
    await nine.settle()
    assert (nine.begun, nine.refused) == ([0, 1, 2, 4, 5, 6], [3])
