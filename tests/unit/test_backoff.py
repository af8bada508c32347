"""The one formula for every retry of the operator."""

import pytest

from ddpjob.core.api.backoff import exponential_delay


def test_the_delay_doubles_with_each_failure_up_to_the_limit():
    delays = [exponential_delay(failures, first=10, longest=300) for failures in range(1, 8)]
    assert delays == [10, 20, 40, 80, 160, 300, 300]


@pytest.mark.parametrize("failures", [0, -1])
def test_without_a_failure_there_is_no_delay(failures):
    assert exponential_delay(failures, first=10, longest=300) == 0


def test_the_first_delay_is_never_longer_than_the_limit():
    assert exponential_delay(1, first=10, longest=4) == 4


@pytest.mark.parametrize("failures", [33, 1000, 10**9])
def test_any_number_of_failures_has_a_delay(failures):
    # 2 ** 1024 would not fit into a float.
    assert exponential_delay(failures, first=0.5, longest=60) == 60
