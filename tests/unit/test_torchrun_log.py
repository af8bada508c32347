"""torchrun's failure summary is parsed from logs written by torchrun 2.13."""

from time import process_time

import pytest
from builders.messages import FOLLOWER_ERROR, TAILS, torchrun_summary, torchrun_tail
from builders.times import NOW

from ddpjob.core.observe.torchrun_log import parse_summary

SUMMARY = torchrun_summary(rank=1)


@pytest.mark.parametrize(
    ("tail", "rank", "code", "exception"),
    [
        ("raise", 1, 1, "ValueError: boom: the data file is broken"),
        ("exit", 1, 17, ""),
        ("kill", 1, -9, "SIGKILL"),
        ("record", 1, 1, "ValueError: boom: the data file is broken"),
        ("record-long", 0, 1, "ValueError: boom: the data file is broken"),
        ("siblings", 1, 1, ""),
        ("module", 0, 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "no-script",
            0,
            2,
            "can't open file '/scripts/missing.py': [Errno 2] No such file or directory",
        ),
    ],
)
def test_the_summary_has_the_rank_the_exit_code_and_the_exception(tail, rank, code, exception):
    summary = parse_summary(torchrun_tail(tail))
    assert (summary.rank, summary.exit_code, summary.exception) == (rank, code, exception)
    assert not summary.follower


def test_a_timeout_that_names_the_slow_rank_is_that_of_a_follower():
    summary = parse_summary(torchrun_tail("slow-rank"))
    expected = (
        "SlowRankError: rank 1 on node 0 (a0-n1) is slow or stuck: it was last seen before its"
    )
    assert expected in summary.exception
    assert summary.follower


def test_a_module_that_python_does_not_find_is_a_certain_cause():
    summary = parse_summary(torchrun_tail("no-module"))
    assert "http.server.nope" in summary.exception
    assert summary.certain


@pytest.mark.parametrize(
    "tail", ["raise-follower", "exit-follower", "kill-follower", "terminated-follower"]
)
def test_a_process_that_lost_its_peer_is_a_follower(tail):
    summary = parse_summary(torchrun_tail(tail))
    assert summary.follower
    assert summary.rank == 0


@pytest.mark.parametrize("tail", ["terminated", "rendezvous-timeout", "rendezvous-no-host"])
def test_an_agent_whose_workers_did_not_fail_writes_no_summary(tail):
    assert parse_summary(torchrun_tail(tail)) is None


def test_the_time_of_a_failure_has_the_microseconds_of_the_agents_log_line():
    expected = NOW.replace(hour=15, minute=53, second=36, microsecond=540000)
    assert parse_summary(torchrun_tail("raise")).time == expected


def test_if_the_log_line_was_cut_off_the_time_has_whole_seconds():
    summary = parse_summary(torchrun_tail("eight-processes-follower"))
    assert summary.time == NOW.replace(hour=16, minute=6, second=36)


def siblings_log(output):
    """Return the log of a node with a failed rank 1, and with rank 0 after the loss of its peer.

    `output` is the earlier output of the processes.
    """
    return output + torchrun_tail("siblings").partition("\n")[2]


def test_a_rank_that_failed_by_itself_is_no_follower_even_if_its_sibling_is():
    log = siblings_log(f"epoch 1\n[rank1]: ValueError: boom\n[rank0]: {FOLLOWER_ERROR}\n")
    assert not parse_summary(log).follower
    assert parse_summary(log).exception == "ValueError: boom"


def test_a_cause_is_no_follower_wherever_the_log_was_cut():
    log = siblings_log(f"[rank0]: {FOLLOWER_ERROR}\n")
    for length in range(300):
        cut = log.replace("W1121", "x" * length + "\nW1121", 1)[-2048:]
        assert not parse_summary(cut).follower, cut[:100]


@pytest.mark.parametrize("tail", sorted(path.stem for path in TAILS.glob("*.txt")))
def test_the_exception_is_never_torchruns_own_wherever_the_log_was_cut(tail):
    text = torchrun_tail(tail)
    for start in range(0, len(text), 50):
        summary = parse_summary(text[start:])
        assert summary is None or "ChildFailedError" not in summary.exception


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Root Cause (first observed failure):",
        "x" * 2048,
        "\x00\ud800 rank : 1",
        SUMMARY.replace("rank      : 1", "rank      : -1"),
    ],
)
def test_a_message_without_a_valid_summary_gives_none(text):
    assert parse_summary(text) is None


def test_a_summary_with_an_impossible_time_is_read_without_the_time():
    summary = parse_summary(SUMMARY.replace("2026-11-21_", "2026-99-99_"))
    assert summary.time is None
    assert summary.rank == 1


def parse_time_of(message):
    """Return the CPU seconds of one parse. Each message is parsed once, so 50 variants are."""
    began = process_time()
    for number in range(50):
        parse_summary(f"{message}{number}")
    return (process_time() - began) / 50


def test_no_message_makes_parsing_slow():
    # A process with its own termination message must not be able to stop the operator.
    header = "Root Cause (first observed failure):time : a\n"
    message = header * 40 + "rank : 1\n" * 60 + "exitcode : 1\n" * 60 + "\n" * 500
    slow = parse_time_of(message[:4096])
    ordinary = parse_time_of(torchrun_tail("raise"))
    assert slow < 20 * max(ordinary, 1e-4)
