"""The verdict on an ended attempt, from messages written by torchrun."""

from itertools import permutations

import pytest
from builders.containers import ended, failed, oom_killed, running, succeeded, waiting
from builders.jobs import a_running_job
from builders.messages import (
    agent_report,
    follower_summary,
    slow_rank_summary,
    torchrun_summary,
    torchrun_tail,
)
from builders.nodes import a_node, nodes_of
from builders.plans import observation
from builders.pods import a_pod, read_pods
from builders.surroundings import (
    disruption_target,
    evicted,
    over_own_limit,
    rejected_by_kubelet,
    unschedulable,
)
from builders.times import NOW, at

from ddpjob.core.api.names import Cause
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.causes import Undecided, judge
from ddpjob.core.decide.verdict import Verdict

GONE = "pod digits-0-1 is gone: it was deleted, or its Kubernetes node was removed"


def verdict_on(*pods, now=NOW, nodes=None, latched=False, nodes_by_name=None):
    """Judge an attempt with its first failure seen at NOW.

    Before the latch, a missing pod was not created yet. After it, it is lost.
    """
    nodes = nodes or 1 + max((pod.index for pod in read_pods(*pods)), default=0)
    job = a_running_job(nodes=nodes, latched=latched, undecided_since=NOW)
    return judge(observation(job, *pods, nodes=nodes_by_name), now)


def test_while_every_pod_runs_or_has_succeeded_there_is_no_verdict():
    assert verdict_on(a_pod(0, running()), a_pod(1, succeeded())) is None
    assert verdict_on() is None


# Certain failures


def test_a_rank_that_ended_early_within_a_failed_pod_is_the_cause():
    ending = "ended with exit code 0 while rank 3 was still training: do all ranks make"
    report = agent_report(cause="EndedEarly", rank=2, exit_code=0, exception=f"rank 2 {ending}")
    verdict = verdict_on(a_pod(0, running()), a_pod(1, failed(report)))
    assert (verdict.cause, verdict.reason) == (Cause.FAILURE, Reason.ENDED_EARLY)
    assert (verdict.index, verdict.rank, verdict.exit_code) == (1, 2, 0)
    assert verdict.message == f"rank 2 in pod digits-0-1 {ending}"
    assert not verdict.blames_node


@pytest.mark.parametrize("case", ["raise", "exit", "kill"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_rank_that_failed_first_is_the_cause_and_never_the_follower(case, order):
    follower = a_pod(0, failed(torchrun_tail(f"{case}-follower")))
    cause = a_pod(1, failed(torchrun_tail(case)))
    pods = [(follower, cause)[position] for position in order]
    verdict = verdict_on(*pods, now=at(20000))
    assert (verdict.cause, verdict.index, verdict.rank) == (Cause.FAILURE, 1, 1)


@pytest.mark.parametrize("case", ["raise", "exit", "kill"])
def test_a_follower_that_is_seen_first_leaves_the_verdict_undecided(case):
    pods = a_pod(0, failed(torchrun_tail(f"{case}-follower"))), a_pod(1, running())
    assert isinstance(verdict_on(*pods, now=at(-600)), Undecided)


@pytest.mark.parametrize("reason", ["Error", "StartError"])
def test_the_kubelets_reason_of_a_follower_is_not_certain(reason):
    pods = a_pod(0, ended(1, follower_summary(0), reason=reason)), a_pod(1, running())
    assert isinstance(verdict_on(*pods), Undecided)


@pytest.mark.parametrize("case", ["raise", "kill", "exit"])
def test_a_failure_with_a_summary_is_certain_at_once(case):
    verdict = verdict_on(a_pod(0, running()), a_pod(1, failed(torchrun_tail(case))))
    assert (verdict.index, verdict.reason) == (1, "WorkerFailed")


def test_the_message_names_the_rank_the_node_the_exit_code_and_the_exception():
    verdict = verdict_on(a_pod(1, failed(torchrun_tail("raise"))))
    assert verdict.message == (
        "rank 1 in pod digits-0-1 failed with exit code 1: "
        "ValueError: boom: the data file is broken"
    )


@pytest.mark.parametrize(("code", "has_hint"), [(-9, True), (137, True), (-15, False), (1, False)])
def test_the_message_of_a_killed_rank_names_the_usual_cause(code, has_hint):
    summary = torchrun_summary(0, code, error="x")
    verdict = verdict_on(a_pod(0, failed(summary)))
    assert ("raise resources.limits.memory" in verdict.message) is has_hint


@pytest.mark.parametrize(
    ("exception", "has_hint"),
    [
        ("PermissionError: [Errno 13] Permission denied: '/checkpoints/digits'", True),
        ("PermissionError: [Errno 13] Permission denied: '/checkpoints'", True),
        ("RuntimeError: File /checkpoints/digits/last.pt cannot be opened.", True),
        ("ddp_trainer.errors.UserError: cannot write /checkpoints/digits: Permission denied", True),
        ("PermissionError: [Errno 13] Permission denied: '/checkpoints-of-others/x'", False),
        ("PermissionError: [Errno 13] Permission denied: '/data/checkpoints/x'", False),
        ("PermissionError: [Errno 13] Permission denied: '/data'", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/checkpoints/x'", False),
    ],
)
def test_the_message_of_a_rank_that_may_not_write_checkpoints_names_the_claim(exception, has_hint):
    job = a_running_job(nodes=1, spec={"checkpoint": {"claimName": "shared"}})
    pod = a_pod(0, failed(torchrun_summary(0, 1, error=exception)))
    verdict = judge(observation(job, pod), NOW)
    assert exception in verdict.message
    assert ("may not write to claim shared" in verdict.message) is has_hint
    without = judge(observation(a_running_job(nodes=1), pod), NOW)
    assert without.message.endswith(exception)


def test_a_summary_with_an_impossible_time_is_a_cause_too():
    text = torchrun_summary(rank=1).replace("2026-11-21_", "2026-99-99_")
    assert verdict_on(a_pod(1, failed(text))).rank == 1


def test_of_several_certain_failures_the_earliest_by_torchruns_time_is_the_cause():
    early = torchrun_summary(rank=1, when=at(0.2))
    late = torchrun_summary(rank=0, when=at(0.7))
    # The kubelets report them in the other order.
    pods = a_pod(0, failed(late, when=at(0))), a_pod(1, failed(early, when=at(5)))
    assert verdict_on(*pods).index == 1


def test_of_a_disruption_and_a_failure_in_the_same_second_the_disruption_is_the_cause():
    evicted_pod = failed(conditions=[disruption_target(when=at(8))])
    pods = a_pod(0, oom_killed(when=at(8))), a_pod(1, evicted_pod)
    assert (verdict_on(*pods).cause, verdict_on(*pods).index) == (Cause.DISRUPTION, 1)


def test_a_container_that_ran_out_of_memory_is_a_certain_failure():
    verdict = verdict_on(a_pod(0, failed(follower_summary())), a_pod(1, oom_killed()))
    assert (verdict.index, verdict.reason, verdict.exit_code) == (1, "OOMKilled", 137)
    assert verdict.message == (
        "pod digits-0-1 ran out of memory (OOMKilled); raise resources.limits.memory or use less "
        "memory"
    )


@pytest.mark.parametrize("offset", [-8, 0, 5.75, 9])
def test_torchruns_local_time_is_converted_by_the_end_of_the_pod(offset):
    # torchrun wrote its summary 2 s before the pod ended, in a time zone of `offset` hours.
    local_time = at(offset * 3600 - 2)
    raised = a_pod(0, failed(torchrun_summary(0, when=local_time), when=NOW))
    assert verdict_on(raised, a_pod(1, oom_killed(when=at(-1)))).index == 0
    assert verdict_on(raised, a_pod(1, oom_killed(when=at(-3)))).index == 1


# Disruptions


@pytest.mark.parametrize(
    "disrupted",
    [
        a_pod(2, running(), deleted_at=at(8)),
        a_pod(2, failed(conditions=[disruption_target(when=at(8))])),
        a_pod(2, evicted()),
        a_pod(2, rejected_by_kubelet()),
    ],
    ids=["deleted", "drained", "evicted", "rejected"],
)
def test_a_disruption_comes_before_every_follower(disrupted):
    followers = []
    for index in range(2):
        followers.append(a_pod(index, failed(follower_summary(rank=index), when=at(0))))
    verdict = verdict_on(*followers, disrupted)
    assert (verdict.cause, verdict.index) == (Cause.DISRUPTION, 2)


def test_a_lost_pod_comes_before_every_follower():
    verdict = verdict_on(a_pod(0, failed(follower_summary())), nodes=2, latched=True)
    assert (verdict.cause, verdict.index, verdict.pod) == (Cause.DISRUPTION, 1, None)
    assert (verdict.reason, verdict.message) == ("PodDeleted", GONE)


@pytest.mark.parametrize(
    "status", [ended(137, reason="ContainerStatusUnknown"), ended(255, reason="Unknown")]
)
def test_a_container_that_the_kubelet_or_containerd_lost_is_a_disruption(status):
    verdict = verdict_on(a_pod(0, status), a_pod(1, running()))
    assert (verdict.cause, verdict.reason) == (Cause.DISRUPTION, "NodeRestarted")


def test_exit_255_of_the_script_itself_is_a_failure():
    assert verdict_on(a_pod(0, ended(255))).cause is Cause.FAILURE


def test_a_pod_over_a_limit_of_its_own_is_a_certain_failure():
    verdict = verdict_on(a_pod(0, over_own_limit()), a_pod(1, running()))
    assert (verdict.cause, verdict.reason) == (Cause.FAILURE, "Evicted")
    assert "exceeds the limit 1Gi.; raise" in verdict.message


def test_a_failure_before_a_deletion_is_the_cause():
    failure = a_pod(0, failed(torchrun_summary(0, when=at(1))))
    assert verdict_on(failure, a_pod(1, running(), deleted_at=at(5))).cause is Cause.FAILURE


def test_a_failure_after_a_deletion_is_not_the_cause():
    failure = a_pod(0, failed(torchrun_summary(0, when=at(9))))
    deleted = a_pod(1, running(), deleted_at=at(5), grace=45)
    assert verdict_on(failure, deleted).cause is Cause.DISRUPTION


def test_deletions_are_ordered_by_the_time_of_the_request_and_not_by_their_deadline():
    pods = (
        a_pod(0, running(), deleted_at=at(9), grace=5),
        a_pod(1, running(), deleted_at=at(8), grace=300),
    )
    assert verdict_on(*pods).index == 1


def test_a_certain_failure_comes_before_a_pod_that_is_gone():
    # The operator was away. When pod 1 went is not known.
    verdict = verdict_on(a_pod(0, failed(torchrun_summary(0))), nodes=2, latched=True)
    assert (verdict.cause, verdict.index) == (Cause.FAILURE, 0)
    follower = verdict_on(a_pod(0, failed(follower_summary(0))), nodes=2, latched=True)
    assert (follower.cause, follower.reason) == (Cause.DISRUPTION, "PodDeleted")


def test_a_disruption_has_the_reason_and_the_message_of_its_condition():
    target = disruption_target("TaintManager", "taint x on node-0")
    verdict = verdict_on(a_pod(0, failed(conditions=[target])))
    message = "pod digits-0-0 on node node-0 was disrupted: taint x on node-0"
    assert (verdict.reason, verdict.message) == ("TaintManager", message)


def test_a_worker_that_got_sigterm_waits_for_the_cause_of_the_deletion():
    interrupted = torchrun_summary(1, -15, "")
    pods = a_pod(0, running()), a_pod(1, failed(interrupted))
    assert isinstance(verdict_on(*pods, now=at(1)), Undecided)
    drained = a_pod(1, failed(interrupted, conditions=[disruption_target()]))
    assert verdict_on(a_pod(0, running()), drained).cause is Cause.DISRUPTION


# Uncertain failures


@pytest.mark.parametrize("kubelet", [-3600, 0, 3600, None], ids="{}".format)
def test_without_a_summary_the_verdict_waits_for_10_seconds_of_the_operators_own_clock(kubelet):
    first = failed("bad interpreter", when=at(kubelet or 0))
    if kubelet is None:
        del first["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    pods = a_pod(0, first), a_pod(1, running())
    assert isinstance(verdict_on(*pods, now=at(9)), Undecided)
    assert verdict_on(*pods, now=at(10)).index == 0


def test_an_unknown_end_comes_after_the_known_ones():
    unknown = failed("one")
    del unknown["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    assert verdict_on(a_pod(0, unknown), a_pod(1, failed("two", when=at(500)))).index == 1


def test_when_every_pod_has_ended_the_verdict_does_not_wait():
    pods = a_pod(0, failed("bad interpreter", when=at(0))), a_pod(1, succeeded())
    verdict = verdict_on(*pods, now=at(1))
    assert verdict.message == "pod digits-0-0 failed with exit code 1: bad interpreter"


def test_if_all_failed_nodes_are_followers_the_first_one_is_named():
    pods = []
    for index in range(3):
        end = at(3 - index)
        pods.append(a_pod(index, failed(follower_summary(index, when=end), when=end)))
    assert verdict_on(*pods).index == 2


def test_a_container_that_could_not_be_started_is_a_failure_with_the_kubelets_reason():
    status = ended(128, "exec: torchrun: not found", reason="StartError")
    verdict = verdict_on(a_pod(0, status))
    assert (verdict.reason, verdict.exit_code) == ("StartError", 128)
    assert verdict.message == "pod digits-0-0 failed with exit code 128: exec: torchrun: not found"


def test_a_summary_whose_head_was_cut_off_still_gives_the_exception():
    verdict = verdict_on(a_pod(0, failed(torchrun_tail("record-long")[1200:])))
    expected = "pod digits-0-0 failed with exit code 1: ValueError: boom: the data file is broken"
    assert verdict.message == expected


def test_a_node_of_eight_processes_is_not_the_cause_while_its_exception_is_unknown():
    # The summary of eight processes fills the whole termination message.
    ambiguous = a_pod(0, failed(torchrun_tail("eight-processes-follower")))
    assert isinstance(verdict_on(ambiguous, a_pod(1, running()), now=NOW), Undecided)
    certain = a_pod(1, failed(torchrun_summary(rank=9, when=at(20000))))
    assert verdict_on(ambiguous, certain).index == 1


def test_a_node_of_eight_processes_is_the_cause_if_all_others_are_followers():
    ambiguous = a_pod(0, failed(torchrun_tail("eight-processes-follower")))
    verdict = verdict_on(ambiguous, a_pod(1, failed(follower_summary(rank=8))))
    assert (verdict.index, verdict.rank, verdict.exit_code) == (0, 3, 1)


def test_an_agent_that_got_sigterm_comes_before_its_follower_when_all_have_ended():
    follower = a_pod(0, failed(torchrun_tail("terminated-follower")))
    verdict = verdict_on(follower, a_pod(1, failed(torchrun_tail("terminated"))))
    assert verdict.index == 1
    assert "signal: 15" in verdict.message


# A silent peer


def test_if_every_failed_pod_lost_its_peer_the_silent_one_is_the_cause():
    followers = [a_pod(index, failed(follower_summary(index))) for index in range(2)]
    verdict = verdict_on(*followers, a_pod(2, running()), now=at(10))
    assert (verdict.cause, verdict.reason) == (Cause.DISRUPTION, "PeerLost")
    assert (verdict.index, verdict.pod.node_name) == (2, "node-2")
    assert "pod digits-0-2 on node node-2" in verdict.message


def test_a_rank_that_names_the_slow_one_is_not_the_cause_while_the_slow_one_has_not_ended():
    waited = a_pod(1, failed(slow_rank_summary(1)))
    verdict = verdict_on(a_pod(0, running()), waited, now=at(10))
    assert (verdict.cause, verdict.reason) == (Cause.DISRUPTION, "PeerLost")
    assert (verdict.index, verdict.pod.node_name) == (0, "node-0")


def test_of_followers_that_have_all_ended_the_one_that_names_the_slow_rank_is_reported():
    broken = a_pod(0, failed(follower_summary(0, when=NOW)))
    waited = a_pod(1, failed(slow_rank_summary(1, when=at(1))))
    verdict = verdict_on(broken, waited, now=at(2))
    assert (verdict.cause, verdict.index) == (Cause.FAILURE, 1)
    assert "SlowRankError: rank 0 on node 0 (a0-n0) is slow or stuck" in verdict.message


def test_a_silent_pod_is_no_excuse_for_a_failure_of_its_own():
    pods = a_pod(0, failed("bad interpreter")), a_pod(1, running())
    assert verdict_on(*pods, now=at(10)).cause is Cause.FAILURE


def test_a_failure_without_a_text_is_excused_only_if_the_silent_node_is_unreachable():
    ambiguous = a_pod(0, failed(torchrun_tail("eight-processes-follower")))
    pods = ambiguous, a_pod(1, running())
    assert verdict_on(*pods, now=at(10)).cause is Cause.FAILURE
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "Unknown"))
    assert verdict_on(*pods, now=at(10), nodes_by_name=nodes).cause is Cause.DISRUPTION


def test_an_unreachable_silent_node_is_named_before_another_silent_one():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, running()), a_pod(2, running())
    nodes = nodes_of(*(a_node(f"node-{n}", "Unknown" if n == 2 else "True") for n in range(3)))
    assert verdict_on(*pods, now=at(10), nodes_by_name=nodes).index == 2


def test_a_silent_pod_does_not_excuse_the_one_of_several_that_failed_by_itself():
    followers = [a_pod(index, failed(follower_summary(index))) for index in range(2)]
    own = a_pod(2, failed("bad interpreter"))
    verdict = verdict_on(*followers, own, a_pod(3, running()), now=at(10))
    assert (verdict.cause, verdict.index) == (Cause.FAILURE, 2)


def test_a_silent_pod_that_never_started_has_no_node():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1)
    verdict = verdict_on(*pods, now=at(10))
    assert (verdict.cause, verdict.index) == (Cause.DISRUPTION, 1)
    assert "to pod digits-0-1, which" in verdict.message


def test_several_silent_pods_are_named_in_part():
    silent = [a_pod(index, running()) for index in range(1, 13)]
    verdict = verdict_on(a_pod(0, failed(follower_summary(0))), *silent, now=at(10))
    assert verdict.index == 1
    assert "digits-0-5 on node node-5 and 7 more, which has not ended" in verdict.message
    verdict = verdict_on(a_pod(0, failed(follower_summary(0))), *silent[:5], now=at(10))
    assert "digits-0-5 on node node-5, which has not ended" in verdict.message


def test_a_node_that_succeeded_is_not_silent():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, succeeded())
    assert verdict_on(*pods).cause is Cause.FAILURE


def test_an_end_at_an_impossible_time_does_not_move_the_time_of_its_summary():
    # A kubelet reports 1970 if its runtime does not know the end. No time zone is so far away.
    unknown = failed(torchrun_summary(0, when=at(5)))
    unknown["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = "1970-01-01T00:00:00Z"
    known = failed(torchrun_summary(1, when=at(1)), when=at(2))
    assert verdict_on(a_pod(0, unknown), a_pod(1, known)).index == 1


# The rendezvous


@pytest.mark.parametrize("tail", ["rendezvous-timeout", "rendezvous-no-host"])
@pytest.mark.parametrize(
    "late", [a_pod(1, unschedulable()), a_pod(1, waiting())], ids=["unschedulable", "pulling"]
)
def test_a_rendezvous_that_timed_out_before_a_pod_had_started_is_no_failure(tail, late):
    verdict = verdict_on(a_pod(0, failed(torchrun_tail(tail))), late, now=at(10))
    assert verdict.cause is Cause.RENDEZVOUS
    assert verdict.message == "the rendezvous timed out; not started by then: digits-0-1"


def test_a_rendezvous_that_timed_out_before_a_pod_was_created_is_no_failure():
    pod = a_pod(0, failed(torchrun_tail("rendezvous-timeout")))
    verdict = verdict_on(pod, nodes=2)
    assert verdict.cause is Cause.RENDEZVOUS
    assert verdict.message == "the rendezvous timed out; not started by then: digits-0-1"


def test_a_rendezvous_that_failed_after_every_pod_had_started_is_a_failure():
    pods = [a_pod(index, failed(torchrun_tail("rendezvous-timeout"))) for index in range(2)]
    assert verdict_on(*pods).cause is Cause.FAILURE


# The order of the pods

ENDS = {
    "raised": a_pod(0, failed(torchrun_summary(0, when=at(4)))),
    "follower": a_pod(1, failed(follower_summary(1, when=at(5)))),
    "oom": a_pod(2, oom_killed(when=at(6))),
    "no message": a_pod(3, failed("", when=at(1))),
    "drained": a_pod(4, failed(conditions=[disruption_target(when=at(3))])),
    "evicted": a_pod(5, evicted()),
    "deleted": a_pod(6, running(), deleted_at=at(2)),
    "running": a_pod(7, running()),
}


@pytest.mark.parametrize(
    "kinds",
    [
        ("raised", "follower", "oom", "no message"),
        ("follower", "drained", "raised", "running"),
        ("evicted", "drained", "deleted", "raised"),
        ("no message", "follower", "running"),
    ],
)
def test_the_verdict_does_not_depend_on_the_order_of_the_pods(kinds):
    verdicts = []
    for order in permutations(kinds):
        verdicts.append(verdict_on(*(ENDS[kind] for kind in order), now=at(30)))
    assert isinstance(verdicts[0], Verdict)
    assert all(verdict == verdicts[0] for verdict in verdicts)
