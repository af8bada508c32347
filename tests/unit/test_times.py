"""Times are read and written as Kubernetes writes them."""

import pytest
from builders import NOW
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core.times import format_time, parse_time


def test_a_time_is_written_in_utc_with_whole_seconds():
    assert format_time(NOW) == "2026-11-21T12:00:00Z"


@given(st.datetimes(min_value=NOW.replace(year=1990, tzinfo=None)))
def test_a_time_that_was_written_is_read_to_the_second(moment):
    moment = moment.replace(tzinfo=NOW.tzinfo)
    assert parse_time(format_time(moment)) == moment.replace(microsecond=0)


@pytest.mark.parametrize("text", [None, "", "yesterday", 5, "0001-01-01T00:00:00+14:00"])
def test_a_value_that_is_no_time_is_read_as_none(text):
    assert parse_time(text) is None


def test_microseconds_and_time_zones_are_read():
    assert parse_time("2026-11-21T13:00:00.5+01:00") == NOW.replace(microsecond=500000)
