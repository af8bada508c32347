"""The queue: each job at most once, never in two hands, at the earliest of its requested times."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpjob.controller import workqueue
from ddpjob.controller.workqueue import LONGEST_RETRY, WorkQueue


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(clock):
    return WorkQueue[str](clock)


async def taken(queue):
    """Return what a worker gets now, or None if it would have to wait."""
    try:
        return await asyncio.wait_for(queue.get(), 0.02)
    except TimeoutError:
        return None


async def test_a_key_added_several_times_is_taken_once(queue):
    for _ in range(3):
        queue.add("a")
    assert await taken(queue) == "a"
    queue.done("a")
    assert await taken(queue) is None


async def test_no_two_workers_have_the_same_key(queue):
    queue.add("a")
    assert await taken(queue) == "a"
    queue.add("a")
    queue.add("b")
    assert await taken(queue) == "b"
    assert await taken(queue) is None


async def test_a_key_added_while_a_worker_has_it_is_taken_again(queue):
    queue.add("a")
    await taken(queue)
    queue.add("a")
    queue.done("a")
    assert await taken(queue) == "a"


@pytest.mark.parametrize("wishes", [(5, 10), (10, 5)])
async def test_the_earliest_time_of_a_key_counts(queue, clock, wishes):
    for after in wishes:
        queue.add("a", after)
    clock.now = 4.9
    assert await taken(queue) is None
    clock.now = 5
    assert await taken(queue) == "a"
    queue.done("a")
    clock.now = 10
    assert await taken(queue) is None


async def test_a_failed_key_is_retried_later_each_time_until_it_succeeds(queue, clock):
    async def fails_and_comes_back_after(seconds):
        queue.done("a", failed=True)
        clock.now += seconds - 0.1
        assert await taken(queue) is None
        clock.now += 0.2
        assert await taken(queue) == "a"

    queue.add("a")
    await taken(queue)
    for seconds in (0.5, 1, 2, 4, 8, 16, 32, LONGEST_RETRY, LONGEST_RETRY):
        await fails_and_comes_back_after(seconds)
    queue.done("a")
    queue.add("a")
    await taken(queue)
    await fails_and_comes_back_after(0.5)


async def test_a_failing_key_that_is_added_is_taken_at_once(queue):
    queue.add("a")
    await taken(queue)
    queue.done("a", failed=True)
    queue.add("a")
    assert await taken(queue) == "a"


async def test_a_waiting_worker_is_woken_by_an_earlier_key_than_the_one_it_waits_for(queue):
    queue.add("late", 1000)
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("now")
    assert await asyncio.wait_for(worker, 5) == "now"


async def test_of_two_waiting_workers_each_gets_one_of_two_keys(queue):
    workers = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("a")
    queue.add("b")
    assert set(await asyncio.wait_for(asyncio.gather(*workers), 5)) == {"a", "b"}


async def test_a_key_that_is_added_twice_for_the_same_time_is_taken_once(queue, clock):
    queue.add("a", 5)
    queue.add("a", 1)
    clock.now = 1
    assert await taken(queue) == "a"
    queue.done("a")
    # The first entry is still in the heap, for the same time.
    queue.add("a", 4)
    clock.now = 5
    assert await taken(queue) == "a"
    queue.done("a")
    assert await taken(queue) is None


async def test_a_key_wakes_only_one_of_many_idle_workers(queue, monkeypatch):
    looks = []
    take = queue._take
    monkeypatch.setattr(queue, "_take", lambda: looks.append(0) or take())
    workers = [asyncio.create_task(queue.get()) for _ in range(100)]
    await asyncio.sleep(0.01)
    for key in ("a", "b"):
        looks.clear()
        queue.add(key)
        await asyncio.sleep(0.01)
        # The worker with the key, and the next one, which then waits.
        assert len(looks) <= 3
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


# Groups


@pytest.fixture
def grouped(clock):
    """Return a queue of keys with their group as the first letter."""
    return WorkQueue[str](clock, group_of=lambda key: key[0])


async def test_many_keys_of_one_group_do_not_delay_the_key_of_another(grouped):
    for number in range(100):
        grouped.add(f"a{number}")
    grouped.add("b0")
    assert [await taken(grouped) for _ in range(3)] == ["a0", "b0", "a1"]


async def test_a_group_leaves_as_many_workers_free_as_it_has(grouped, monkeypatch):
    monkeypatch.setattr(workqueue, "WORKERS", 4)
    for number in range(4):
        grouped.add(f"a{number}")
    assert [await taken(grouped) for _ in range(3)] == ["a0", "a1", None]
    grouped.add("b0")
    assert await taken(grouped) == "b0"
    grouped.add("c0")
    assert await taken(grouped) == "c0"
    for key in ("a0", "b0", "c0"):
        grouped.done(key)
    assert await taken(grouped) == "a2"


async def test_a_waiting_worker_is_woken_when_its_group_may_have_one_more(grouped, monkeypatch):
    monkeypatch.setattr(workqueue, "WORKERS", 2)
    grouped.add("a0")
    grouped.add("a1")
    assert await taken(grouped) == "a0"
    worker = asyncio.create_task(grouped.get())
    await asyncio.sleep(0)
    grouped.done("a0")
    assert await asyncio.wait_for(worker, 5) == "a1"


def test_the_length_is_the_number_of_due_keys(queue):
    queue.add("now")
    queue.add("later", 10)
    assert len(queue) == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from([0, 1, 5])),
        st.tuples(st.just("take")),
        st.tuples(st.just("done"), st.sampled_from("abc"), st.booleans()),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 1, 5])),
    ),
    max_size=40,
)


@settings(max_examples=50)
@given(STEPS)
def test_no_key_is_lost_and_no_two_workers_have_the_same_key_in_any_history(steps):
    asyncio.run(_play(steps))


async def _play(steps):
    clock = Clock()
    queue, hands, wanted = WorkQueue[str](clock), set(), set()

    def take():
        key, _ = queue._take()
        if key is not None:
            assert key not in hands
            hands.add(key)
            wanted.discard(key)

    for kind, *details in steps:
        if kind == "add":
            queue.add(*details)
            wanted.add(details[0])
        elif kind == "take":
            take()
        elif kind == "pass":
            clock.now += details[0]
        elif details[0] in hands:
            hands.remove(details[0])
            queue.done(*details)
    for key in list(hands):
        hands.remove(key)
        queue.done(key)
    clock.now += LONGEST_RETRY
    for _ in range(3):
        take()
    assert not wanted


def test_outdated_times_do_not_pile_up():
    queue = WorkQueue(lambda: 0.0)
    for number in range(10_000):
        queue.add("job", after=20_000.0 - number)
    assert len(queue._heap) < 100
