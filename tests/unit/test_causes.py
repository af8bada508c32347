"""Who is to blame for the end of an attempt, from what torchrun really writes."""

from itertools import permutations
from time import process_time

import pytest
from builders import (
    FOLLOWER_WORDS,
    NOW,
    TAILS,
    a_follower,
    a_pod,
    a_summary,
    at,
    disruption_target,
    ended,
    evicted,
    failed,
    oom_killed,
    read,
    refused_by_kubelet,
    running,
    succeeded,
    torchrun_tail,
    unschedulable,
    waiting,
)

from ddpjob.core.causes import Undecided, Verdict, judge
from ddpjob.core.names import Cause
from ddpjob.core.torchrun_log import parse_summary

OWN = a_summary(rank=1)


def verdict_on(*pods, vanished=(), now=NOW, **more):
    return judge(read(*pods), vanished, now, **more)


# --- torchrun's summary, real ones


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
def test_the_summary_names_rank_exit_code_and_exception(tail, rank, code, exception):
    summary = parse_summary(torchrun_tail(tail))
    assert (summary.rank, summary.exit_code, summary.exception) == (rank, code, exception)
    assert not summary.follower


def test_a_time_out_that_names_the_slow_rank_is_a_cause_and_not_a_follower():
    summary = parse_summary(torchrun_tail("slow-rank"))
    assert (
        "SlowRankError: rank 1 on node 0 (a0-n1) is slow or stuck: it was last seen before its"
        in summary.exception
    )
    assert summary.certain
    assert not summary.follower


def test_a_module_that_python_does_not_find_is_named_and_nobody_else_blamed():
    summary = parse_summary(torchrun_tail("no-module"))
    assert "http.server.nope" in summary.exception
    assert summary.certain


@pytest.mark.parametrize(
    "tail", ["raise-follower", "exit-follower", "kill-follower", "terminated-follower"]
)
def test_who_lost_its_peer_is_a_follower(tail):
    summary = parse_summary(torchrun_tail(tail))
    assert summary.follower
    assert summary.rank == 0


@pytest.mark.parametrize("tail", ["terminated", "rendezvous-timeout", "rendezvous-no-host"])
def test_an_agent_that_ended_without_its_workers_failing_leaves_no_summary(tail):
    assert parse_summary(torchrun_tail(tail)) is None


def test_the_time_of_a_failure_has_microseconds_from_the_agents_own_line():
    assert parse_summary(torchrun_tail("raise")).time == NOW.replace(
        hour=15, minute=53, second=36, microsecond=540000
    )


def test_where_that_line_was_cut_off_whole_seconds_are_left():
    summary = parse_summary(torchrun_tail("eight-processes-follower"))
    assert summary.time == NOW.replace(hour=16, minute=6, second=36)


def siblings_with(words):
    """The end of the log of a node whose rank 1 failed and whose rank 0 lost its peer and was told to end."""
    return words + torchrun_tail("siblings").partition("\n")[2]


def test_a_rank_that_failed_by_itself_is_none_though_its_sibling_is_a_follower():
    log = siblings_with(f"epoch 1\n[rank1]: ValueError: boom\n[rank0]: {FOLLOWER_WORDS}\n")
    assert not parse_summary(log).follower
    assert parse_summary(log).exception == "ValueError: boom"


def test_wherever_the_log_was_cut_a_culprit_is_no_follower():
    log = siblings_with(f"[rank0]: {FOLLOWER_WORDS}\n")
    for length in range(300):
        cut = log.replace("W1121", "x" * length + "\nW1121", 1)[-2048:]
        assert not parse_summary(cut).follower, cut[:100]


@pytest.mark.parametrize("tail", sorted(path.stem for path in TAILS.glob("*.txt")))
def test_wherever_the_log_was_cut_the_launcher_is_no_exception_of_the_script(tail):
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
        OWN.replace("rank      : 1", "rank      : -1"),
    ],
)
def test_other_last_words_hold_no_summary(text):
    assert parse_summary(text) is None


def test_a_summary_with_an_impossible_time_still_counts():
    text = OWN.replace("2026-11-21_", "2026-99-99_")
    assert parse_summary(text).time is None
    assert verdict_on(a_pod(1, failed(text))).rank == 1


# --- verdicts


def test_nothing_went_wrong():
    assert verdict_on(a_pod(0, running()), a_pod(1, succeeded())) is None
    assert verdict_on() is None


@pytest.mark.parametrize("case", ["raise", "exit", "kill"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_culprit_is_blamed_and_never_the_follower(case, order):
    pods = [
        a_pod(0, failed(torchrun_tail(f"{case}-follower"))),
        a_pod(1, failed(torchrun_tail(case))),
    ]
    verdict = verdict_on(*(pods[i] for i in order), now=at(20000))
    assert (verdict.cause, verdict.index, verdict.rank) == (Cause.FAILURE, 1, 1)


@pytest.mark.parametrize("case", ["raise", "exit", "kill"])
def test_a_follower_that_is_seen_first_is_not_blamed_meanwhile(case):
    pods = a_pod(0, failed(torchrun_tail(f"{case}-follower"))), a_pod(1, running())
    assert isinstance(verdict_on(*pods, now=at(-600)), Undecided)


@pytest.mark.parametrize("zone", [-8, 0, 5.75, 9])
def test_torchruns_local_time_is_brought_to_the_pods_end_whatever_its_time_zone(zone):
    local = at(zone * 3600 - 2)
    ended_here = a_pod(0, failed(a_follower(0, when=local), when=NOW))
    assert isinstance(verdict_on(ended_here, a_pod(1, running()), now=at(7)), Undecided)
    assert verdict_on(ended_here, a_pod(1, running()), now=at(9)).index == 0


def test_a_message_made_to_be_slow_to_read_is_not():
    """Whoever writes the termination message must not be able to stop the operator."""
    nasty = (
        "Root Cause (first observed failure):time : a\n" * 40
        + "rank : 1\n" * 60
        + "exitcode : 1\n" * 60
        + "\n" * 500
    )[:4096]
    began = process_time()
    for number in range(50):
        parse_summary(f"{nasty}{number}")
    once = (process_time() - began) / 50
    plain = process_time()
    for number in range(50):
        parse_summary(f"{torchrun_tail('raise')}{number}")
    assert once < 20 * max((process_time() - plain) / 50, 1e-4)


def test_a_container_that_the_kubelet_lost_is_a_disruption():
    lost = ended(137, reason="ContainerStatusUnknown")
    assert verdict_on(a_pod(0, lost), a_pod(1, running())).cause is Cause.DISRUPTION


@pytest.mark.parametrize("case", ["raise", "kill", "exit"])
def test_a_culprit_is_certain_at_once(case):
    verdict = verdict_on(a_pod(0, running()), a_pod(1, failed(torchrun_tail(case))))
    assert (verdict.index, verdict.reason) == (1, "WorkerFailed")


def test_a_follower_on_a_node_of_eight_is_not_blamed_though_its_words_were_cut_off():
    """The summary of eight processes fills the whole termination message."""
    silent = a_pod(0, failed(torchrun_tail("eight-processes-follower")))
    assert isinstance(verdict_on(silent, a_pod(1, running()), now=NOW), Undecided)
    assert verdict_on(silent, a_pod(1, failed(a_summary(rank=9, when=at(20000))))).index == 1


def test_eight_processes_that_say_nothing_are_blamed_when_nobody_else_can_be():
    silent = a_pod(0, failed(torchrun_tail("eight-processes-follower")))
    verdict = verdict_on(silent, a_pod(1, failed(a_follower(rank=8))))
    assert (verdict.index, verdict.rank, verdict.exit_code) == (0, 3, 1)


def test_the_agent_that_got_sigterm_outranks_its_follower_once_everything_has_ended():
    pods = (
        a_pod(0, failed(torchrun_tail("terminated-follower"))),
        a_pod(1, failed(torchrun_tail("terminated"))),
    )
    verdict = verdict_on(*pods)
    assert verdict.index == 1
    assert "signal: 15" in verdict.message


def test_among_own_failures_the_earliest_torchrun_time_wins():
    first, second = a_summary(rank=1, when=at(0.2)), a_summary(rank=0, when=at(0.7))
    pods = a_pod(0, failed(second, when=at(0))), a_pod(1, failed(first, when=at(5)))
    assert verdict_on(*pods).index == 1


def test_a_container_that_ran_out_of_memory_says_so():
    verdict = verdict_on(a_pod(0, failed(a_follower())), a_pod(1, oom_killed()))
    assert (verdict.index, verdict.reason, verdict.exit_code) == (1, "OOMKilled", 137)
    assert "resources.limits.memory" in verdict.message


@pytest.mark.parametrize(
    "taken",
    [
        a_pod(2, running(), deleted_at=at(8)),
        a_pod(2, failed(conditions=[disruption_target(when=at(8))])),
        a_pod(2, evicted()),
        a_pod(2, refused_by_kubelet()),
    ],
    ids=["deleted", "drained", "evicted", "refused"],
)
def test_a_sign_of_disruption_outranks_every_follower(taken):
    followers = [a_pod(i, failed(a_follower(rank=i), when=at(0))) for i in range(2)]
    verdict = verdict_on(*followers, taken)
    assert (verdict.cause, verdict.index) == (Cause.DISRUPTION, 2)


def test_a_vanished_pod_outranks_every_follower():
    verdict = verdict_on(a_pod(0, failed(a_follower())), vanished=(1,))
    assert (verdict.cause, verdict.index, verdict.pod) == (Cause.DISRUPTION, 1, None)


def test_a_failure_before_a_deletion_is_the_cause():
    pods = a_pod(0, failed(a_summary(0, when=at(1)))), a_pod(1, running(), deleted_at=at(5))
    assert verdict_on(*pods).cause is Cause.FAILURE


def test_a_failure_after_a_deletion_is_not():
    pods = (
        a_pod(0, failed(a_summary(0, when=at(9)))),
        a_pod(1, running(), deleted_at=at(5), grace=45),
    )
    assert verdict_on(*pods).cause is Cause.DISRUPTION


def test_a_deletion_counts_from_when_it_was_asked_for_and_not_from_the_end_of_its_grace():
    pods = (
        a_pod(0, running(), deleted_at=at(9), grace=5),
        a_pod(1, running(), deleted_at=at(8), grace=300),
    )
    assert verdict_on(*pods).index == 1


def test_a_disruption_says_who_did_it():
    verdict = verdict_on(
        a_pod(0, failed(conditions=[disruption_target("TaintManager", "taint x on node-0")]))
    )
    assert (verdict.reason, verdict.message) == ("TaintManager", "taint x on node-0")


def test_a_worker_that_was_told_to_end_waits_for_the_sign_of_who_did_it():
    told = a_pod(1, failed(a_summary(1, -15, "")))
    assert verdict_on(a_pod(0, running()), told, now=at(1)) == Undecided(at(10))
    pods = (
        a_pod(0, running()),
        a_pod(1, failed(a_summary(1, -15, ""), conditions=[disruption_target()])),
    )
    assert verdict_on(*pods).cause is Cause.DISRUPTION


def test_without_a_summary_nothing_is_certain_before_10_seconds_after_the_first_end():
    pods = (
        a_pod(0, failed("bad interpreter", when=at(0))),
        a_pod(1, failed("", when=at(3))),
        a_pod(2, running()),
    )
    assert verdict_on(*pods, now=at(9)) == Undecided(at(10))
    assert verdict_on(*pods, now=at(10)).index == 0


def test_when_every_pod_has_ended_nobody_waits():
    pods = a_pod(0, failed("bad interpreter", when=at(0))), a_pod(1, succeeded())
    verdict = verdict_on(*pods, now=at(1))
    assert verdict.message == "node 0 ended with exit code 1: bad interpreter"


def test_when_everybody_is_a_follower_the_first_one_is_named():
    pods = [a_pod(i, failed(a_follower(i, when=at(3 - i)), when=at(3 - i))) for i in range(3)]
    assert verdict_on(*pods).index == 2


def test_a_container_that_could_not_be_run_is_a_failure_with_its_reason():
    verdict = verdict_on(a_pod(0, ended(128, "exec: torchrun: not found", reason="StartError")))
    assert (verdict.reason, verdict.exit_code) == ("StartError", 128)
    assert "torchrun: not found" in verdict.message


def test_a_record_so_long_that_its_head_was_cut_off_still_says_the_exception():
    verdict = verdict_on(a_pod(0, failed(torchrun_tail("record-long")[1200:])))
    assert (
        verdict.message
        == "node 0 ended with exit code 1: ValueError: boom: the data file is broken"
    )


# --- the rendezvous


@pytest.mark.parametrize("tail", ["rendezvous-timeout", "rendezvous-no-host"])
@pytest.mark.parametrize(
    "late", [a_pod(1, unschedulable()), a_pod(1, waiting())], ids=["unschedulable", "pulling"]
)
def test_a_rendezvous_that_a_pod_never_reached_blames_nobody(tail, late):
    verdict = verdict_on(a_pod(0, failed(torchrun_tail(tail))), late, now=at(10))
    assert verdict.cause is Cause.RENDEZVOUS
    assert verdict.message == "the rendezvous timed out while digits-0-1 had not started"


def test_a_rendezvous_that_a_pod_never_made_could_not_reach_blames_nobody():
    verdict = verdict_on(a_pod(0, failed(torchrun_tail("rendezvous-timeout"))), unborn=(1,))
    assert verdict.cause is Cause.RENDEZVOUS
    assert verdict.message == "the rendezvous timed out while node 1 had not started"


def test_a_rendezvous_that_failed_though_every_pod_had_started_is_a_failure():
    pods = [a_pod(i, failed(torchrun_tail("rendezvous-timeout"))) for i in range(2)]
    assert verdict_on(*pods).cause is Cause.FAILURE


# --- order

ENDS = {
    "raised": a_pod(0, failed(a_summary(0, when=at(4)))),
    "follower": a_pod(1, failed(a_follower(1, when=at(5)))),
    "oom": a_pod(2, oom_killed(when=at(6))),
    "silent": a_pod(3, failed("", when=at(1))),
    "drained": a_pod(4, failed(conditions=[disruption_target(when=at(3))])),
    "evicted": a_pod(5, evicted()),
    "deleted": a_pod(6, running(), deleted_at=at(2)),
    "running": a_pod(7, running()),
}


@pytest.mark.parametrize(
    "kinds",
    [
        ("raised", "follower", "oom", "silent"),
        ("follower", "drained", "raised", "running"),
        ("evicted", "drained", "deleted", "raised"),
        ("silent", "follower", "running"),
    ],
)
def test_the_verdict_does_not_depend_on_the_order_of_the_pods(kinds):
    verdicts = [
        verdict_on(*(ENDS[kind] for kind in order), now=at(30)) for order in permutations(kinds)
    ]
    assert isinstance(verdicts[0], Verdict)
    assert all(verdict == verdicts[0] for verdict in verdicts)
