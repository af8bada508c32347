"""The termination message of a trainer: the agent's report, or the tail of its log."""

import json
from datetime import UTC, datetime

import pytest
from builders.messages import torchrun_summary
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core.observe.termination import read_termination


def report(**changes):
    entries = {
        "agent": 1,
        "attempt": 2,
        "cause": "Failure",
        "rank": 5,
        "localRank": 1,
        "exitCode": 1,
        "exception": "ValueError: bad batch",
        "time": 1_790_000_000.25,
        "lines": ["step 7", "ValueError: bad batch"],
        **changes,
    }
    return json.dumps(entries)


def test_a_report_names_the_rank_that_failed_first():
    found = read_termination(report())
    assert (found.summary.rank, found.summary.exit_code) == (5, 1)
    assert found.summary.exception == "ValueError: bad batch"
    assert found.summary.time == datetime(2026, 9, 21, 14, 13, 20, 250_000, UTC)
    assert found.summary.certain
    assert found.text == "step 7\nValueError: bad batch\nValueError: bad batch"


@pytest.mark.parametrize(
    ("changes", "certain", "follower"),
    [
        ({"cause": "Failure"}, True, False),
        ({"cause": "Follower"}, False, True),
        ({"cause": "Unclear"}, False, False),
        ({"cause": "Stopped"}, False, True),
        # A process ended by a signal to stop, from any sender.
        ({"cause": "Failure", "exitCode": -15}, False, True),
    ],
)
def test_the_cause_of_a_report_decides_who_is_a_follower(changes, certain, follower):
    summary = read_termination(report(**changes)).summary
    assert (summary.certain, summary.follower) == (certain, follower)


def test_a_script_that_python_does_not_find_is_recognised():
    lines = ["python3: can't open file '/x.py': [Errno 2] No such file or directory"]
    found = read_termination(report(exitCode=2, exception="can't open file", lines=lines))
    assert found.summary.script_missing


def test_a_report_without_a_rank_has_only_its_text():
    message = json.dumps({"agent": 1, "cause": "Failure", "exception": "RendezvousTimeoutError"})
    found = read_termination(message)
    assert found.summary is None
    assert found.text == "RendezvousTimeoutError"


def test_a_report_of_success_has_the_result():
    found = read_termination('{"agent": 1, "cause": "Succeeded", "result": {"accuracy": 0.9}}')
    assert found.result == {"accuracy": "0.9"}
    assert found.summary is None


def test_a_result_that_a_script_wrote_itself_is_read_too():
    assert read_termination('{"accuracy": 0.9}').result == {"accuracy": "0.9"}


def test_the_tail_of_a_log_is_parsed():
    found = read_termination(torchrun_summary(rank=3))
    assert found.summary.rank == 3
    assert found.result == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*json.loads(report()), "result"]), JSON))
def test_a_report_of_any_shape_is_read(entries):
    found = read_termination(json.dumps({"agent": 1, **entries}))
    found.text.encode()
    assert all(isinstance(value, str) for value in found.result.values())


def test_half_a_character_in_a_report_is_replaced():
    found = read_termination(report(exception="\ud83d", lines=["\ud83d", 1, ["x"]]))
    assert found.summary.exception == "?"
    assert found.text == "?\n\n\n?"


@pytest.mark.parametrize("message", ['{"agent": ', '{"agent": 1', '{"agent": ' + "[" * 100_000])
def test_a_damaged_report_is_taken_for_a_log(message):
    assert read_termination(message).summary is None
