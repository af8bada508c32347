"""Times are read and written as Kubernetes writes them."""

from datetime import UTC, datetime, timedelta

import pytest
from builders.times import NOW
from hypothesis import example, given
from hypothesis import strategies as st

from ddpjob.core.api.times import LAST_MOMENT, format_time, later, parse_time, since


def test_a_time_is_written_in_utc_with_whole_seconds():
    assert format_time(NOW) == "2026-11-21T12:00:00Z"


@given(st.datetimes())
@example(datetime(1, 1, 1))
def test_a_time_that_was_written_is_read_to_the_second(moment):
    moment = moment.replace(tzinfo=UTC)
    assert parse_time(format_time(moment)) == moment.replace(microsecond=0)


@pytest.mark.parametrize("text", [None, "", "yesterday", 5, "0001-01-01T00:00:00+14:00"])
def test_a_value_that_is_no_time_is_read_as_none(text):
    assert parse_time(text) is None


def test_microseconds_and_time_zones_are_read():
    assert parse_time("2026-11-21T13:00:00.5+01:00") == NOW.replace(microsecond=500000)


def test_a_moment_beyond_the_last_one_is_the_last_one():
    far = parse_time("9999-12-31T23:59:59Z")
    assert later(far, timedelta(days=1)) == LAST_MOMENT
    assert later(NOW, timedelta.max) == LAST_MOMENT
    assert later(NOW, timedelta(seconds=5)) == NOW + timedelta(seconds=5)


def test_no_time_has_passed_since_a_moment_that_is_to_come():
    assert since(NOW + timedelta(hours=1), NOW) == timedelta(0)
    assert since(NOW - timedelta(hours=1), NOW) == timedelta(hours=1)
