"""Quotations and suggestions in messages. The readers of values are tested with the spec."""

import pytest

from ddpjob.core.api.readers import MAX_QUOTED, did_you_mean, quoted


@pytest.mark.parametrize(
    ("value", "text"),
    [("two", '"two"'), (True, "true"), (None, "null"), ({"a": [1]}, '{"a": [1]}'), ("ä", '"ä"')],
)
def test_a_value_is_quoted_as_json(value, text):
    assert quoted(value) == text


def test_a_value_that_is_not_json_is_quoted_as_a_string():
    assert quoted({1}) == '"{1}"'


def test_a_long_value_is_shortened():
    text = quoted("x" * 1000)
    assert text == '"' + "x" * (MAX_QUOTED - 1) + "…"


def test_a_misspelt_name_gets_the_closest_known_one():
    assert did_you_mean("nodez", ("nodes", "image")) == " (did you mean 'nodes'?)"


def test_a_name_that_resembles_no_known_one_gets_no_suggestion():
    assert did_you_mean("suspend", ("nodes", "image")) == ""
