"""Many writes at once: how many, and what is said of those that failed."""

import asyncio

import pytest

from ddpjob.controller.errors import LeaseLost, Refused, Unreachable
from ddpjob.controller.writer import MAX_WRITES, run_all

REFUSED, UNREACHABLE, LOST = (
    Refused("QuotaExceeded", "no room"),
    Unreachable("no answer"),
    LeaseLost("led too long"),
)


class Calls:
    """Calls that note when they are made and done; those named in `failing` raise.

    With `together` none of them ends before so many are under way.
    """

    def __init__(
        self,
        number: int,
        failing: dict[int, Exception] | None = None,
        together: asyncio.Barrier | None = None,
    ) -> None:
        self.number, self.failing, self.together = number, failing or {}, together
        self.made = self.done = self.most = 0

    def __iter__(self):
        for number in range(self.number):
            self.made += 1
            self.most = max(self.most, self.made - self.done)
            yield self.call(number)

    async def call(self, number: int) -> None:
        if self.together:
            await self.together.wait()
        self.done += 1
        if error := self.failing.get(number):
            raise error


async def test_a_call_is_made_only_when_a_slot_is_free():
    calls = Calls(5 * MAX_WRITES, together=asyncio.Barrier(MAX_WRITES))
    await run_all(calls)
    assert (calls.done, calls.most) == (5 * MAX_WRITES, MAX_WRITES)


@pytest.mark.parametrize(
    ("failing", "raised"),
    [
        ({0: UNREACHABLE}, UNREACHABLE),
        ({0: UNREACHABLE, 3: REFUSED}, REFUSED),
        ({1: REFUSED, 2: UNREACHABLE}, REFUSED),
    ],
)
async def test_all_calls_run_and_a_refusal_comes_before_a_retryable_error(failing, raised):
    calls = Calls(3 * MAX_WRITES, failing, asyncio.Barrier(MAX_WRITES))
    with pytest.raises(type(raised)) as caught:
        await run_all(calls)
    assert (caught.value, calls.done) == (raised, 3 * MAX_WRITES)


async def test_the_loss_of_the_lease_ends_the_run_and_comes_first():
    calls = Calls(100 * MAX_WRITES, {0: REFUSED} | dict.fromkeys(range(1, 100 * MAX_WRITES), LOST))
    with pytest.raises(LeaseLost):
        await run_all(calls)
    assert calls.done <= MAX_WRITES + 1


async def test_a_pod_that_cannot_be_rendered_leaves_no_call_behind():
    done, both = [], asyncio.Barrier(2)

    async def call(number: int) -> None:
        await both.wait()
        done.append(number)

    def calls():
        yield call(0)
        yield call(1)
        raise ValueError("cannot render the third")

    with pytest.raises(ValueError, match="the third"):
        await run_all(calls())
    assert sorted(done) == [0, 1]
