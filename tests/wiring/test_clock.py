"""The clock of the operator does not jump with the clock of its machine."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from ddpjob.controller.clock import PATIENCE, TOLERANCE, SteadyClock

START = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class Machine:
    """A machine with a wall clock wrong by `error`. `passed` is in seconds."""

    passed: float = 0.0
    error: timedelta = timedelta(0)

    def wall(self) -> datetime:
        return START + timedelta(seconds=self.passed) + self.error

    def monotonic(self) -> float:
        return 1000 + self.passed


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def clock(machine):
    return SteadyClock(machine.wall, machine.monotonic)


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_jump_does_not_change_the_time(machine, clock, hours):
    machine.passed, machine.error = 10, timedelta(hours=hours)
    assert clock.now() == START + timedelta(seconds=10)
    machine.passed, machine.error = 20, timedelta(0)
    assert clock.now() == START + timedelta(seconds=20)


def test_small_corrections_are_followed(machine, clock):
    for passed in range(0, 100, 10):
        machine.passed = passed
        machine.error += TOLERANCE / 2
        assert clock.now() == machine.wall()


def test_a_jump_that_lasts_is_followed(machine, clock):
    machine.error = timedelta(hours=2)
    machine.passed = PATIENCE
    assert clock.now() == START + timedelta(seconds=PATIENCE)
    machine.passed = PATIENCE + 1
    assert clock.now() == machine.wall()
