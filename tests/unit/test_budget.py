"""How many restarts a job has, which failures end it at once, and how long it waits."""

import pytest
from builders.containers import ended, failed, oom_killed, running, succeeded, waiting
from builders.jobs import WHAT_TO_DO, a_running_job
from builders.messages import FOLLOWER_ERROR, follower_summary, torchrun_summary, torchrun_tail
from builders.nodes import a_node, nodes_of
from builders.plans import budgets_used, plan_for, restarts_by_budget, written
from builders.pods import a_pod
from builders.surroundings import (
    disruption_target,
    over_own_limit,
    preempted_by_kubelet,
    rejected_by_kubelet,
    unschedulable,
)
from builders.times import NOW, at

from ddpjob.core.api.history import Backoff, EndedAttempt
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.policy import MAX_BUDGET
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.budget import KEPT_TIMES

ONE_FAILED = (a_pod(0, running()), a_pod(1, failed(torchrun_summary(1))))
ONE_DELETED = (a_pod(0, running()), a_pod(1, running(), deleted_at=NOW))


def with_policy(**policy):
    return {"failurePolicy": policy}


def one_failed_with(code, error="ValueError: boom"):
    return a_pod(0, running()), a_pod(1, failed(torchrun_summary(1, code, error)))


# Failures and disruptions, and their budgets


def test_a_failure_and_a_disruption_have_budgets_of_their_own_and_the_status_has_the_sum():
    job = a_running_job(failures=1, disruptions=4)
    after_failure = plan_for(job, *ONE_FAILED).status
    after_disruption = plan_for(job, *ONE_DELETED).status
    assert (after_failure.budget.failures, after_failure.budget.disruptions) == (2, 4)
    assert (after_disruption.budget.failures, after_disruption.budget.disruptions) == (1, 5)
    assert after_failure.to_dict()["restarts"] == after_disruption.to_dict()["restarts"] == 6


def test_a_pod_over_a_limit_of_its_own_uses_the_budget_of_failures():
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, over_own_limit()))
    assert budgets_used(plan) == (1, 0)
    assert plan.status.last_failure.message == (
        "pod digits-0-1 was evicted by its kubelet: Usage of EmptyDir volume exceeds the limit "
        "1Gi.; raise "
        "resources.limits.ephemeral-storage or the volume's sizeLimit, or write less"
    )


def test_a_lost_peer_uses_the_budget_of_disruptions():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, running())
    plan = plan_for(a_running_job(undecided_since=at(-10)), *pods)
    assert budgets_used(plan) == (0, 1)


@pytest.mark.parametrize("nodes", [1, 4])
def test_what_the_user_does_uses_no_budget(nodes):
    plan = plan_for(a_running_job(spec={"nodes": nodes}), a_pod(0, running()), a_pod(1, running()))
    assert budgets_used(plan) == (0, 0)


# The window


def test_restarts_that_are_older_than_the_window_are_forgiven():
    times = (at(-10), at(-30), at(-70))
    job = a_running_job(
        failures=3, failure_times=times, spec=with_policy(maxRestarts=3, windowSeconds=60)
    )
    plan = plan_for(job, *ONE_FAILED)
    assert (plan.status.attempt.number, plan.status.budget.failures) == (1, 4)


def test_restarts_within_the_window_use_the_budget_up():
    times = (at(-10), at(-30), at(-60))
    job = a_running_job(
        failures=9, failure_times=times, spec=with_policy(maxRestarts=3, windowSeconds=60)
    )
    assert plan_for(job, *ONE_FAILED).status.reason == Reason.MAX_RESTARTS


def test_disruptions_have_the_same_window():
    policy = with_policy(maxDisruptions=1, windowSeconds=60)
    old = a_running_job(disruptions=1, disruption_times=(at(-61),), spec=policy)
    new = a_running_job(disruptions=1, disruption_times=(at(-59),), spec=policy)
    assert plan_for(old, *ONE_DELETED).status.attempt.number == 1
    assert plan_for(new, *ONE_DELETED).status.reason == Reason.MAX_DISRUPTIONS


def test_without_a_window_every_restart_counts_for_ever():
    job = a_running_job(failures=3, failure_times=(at(-(10**7)),) * 3)
    assert plan_for(job, *ONE_FAILED).status.reason == Reason.MAX_RESTARTS


@pytest.mark.parametrize("policy", [{"maxRestarts": 0}, {"maxRestarts": 0, "windowSeconds": 60}])
def test_a_budget_of_0_allows_no_restart_with_a_window_or_without(policy):
    assert plan_for(a_running_job(spec=with_policy(**policy)), *ONE_FAILED).status.finished


def test_a_clock_that_was_set_back_does_not_forgive_restarts():
    policy = with_policy(maxRestarts=2, windowSeconds=60)
    job = a_running_job(failures=2, failure_times=(at(900), at(800)), spec=policy)
    assert plan_for(job, *ONE_FAILED).status.reason == Reason.MAX_RESTARTS


@pytest.mark.parametrize(("limit", "kept"), [(3, KEPT_TIMES), (KEPT_TIMES + 5, KEPT_TIMES + 5)])
def test_the_status_keeps_as_many_times_as_a_budget_may_need_newest_first(limit, kept):
    policy = with_policy(maxRestarts=limit, windowSeconds=60)
    times = tuple(at(-70 - second) for second in range(KEPT_TIMES + 10))
    job = a_running_job(failures=500, failure_times=times, spec=policy)
    status = plan_for(job, *ONE_FAILED).status
    assert status.budget.failure_times == (NOW, *times[: kept - 1])


def test_a_limit_that_is_set_later_counts_what_was_before():
    job = a_running_job(spec=with_policy(windowSeconds=86400))
    drained = {**running(), "conditions": [disruption_target()]}
    ended_pods = a_pod(0, running()), a_pod(1, {**ended(143), **drained, "phase": "Failed"})
    job = written(job, plan_for(job, *ended_pods))
    assert job.status.budget.announced_times == (NOW,)


def test_times_are_kept_also_without_a_window_so_that_one_can_be_set_later():
    job = written(a_running_job(), plan_for(a_running_job(), *ONE_FAILED))
    assert job.status.budget.failure_times == (NOW,)


def test_the_largest_budget_fits_into_a_status():
    times = tuple(at(-second) for second in range(MAX_BUDGET))
    policy = with_policy(maxRestarts=MAX_BUDGET, windowSeconds=1)
    job = a_running_job(failures=5000, failure_times=times, spec=policy)
    assert len(plan_for(job, *ONE_FAILED).status.budget.failure_times) == MAX_BUDGET


def test_a_pod_over_its_own_limit_is_a_failure_although_its_container_is_lost():
    # For an evicted pod, the kubelet reports the container in this way.
    lost = over_own_limit(reason="ContainerStatusUnknown")
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, lost))
    assert budgets_used(plan) == (1, 0)
    assert plan.status.last_failure.reason == "Evicted"


# Failures beyond repair by another attempt


def test_the_exit_code_of_an_init_container_is_none_of_a_worker():
    end = {"exitCode": 2, "reason": "Error", "message": "tar: cannot read"}
    init = [{"name": "fetch", "state": {"terminated": end}}]
    pods = a_pod(0, running()), a_pod(1, {"phase": "Failed", "initContainerStatuses": init})
    plan = plan_for(a_running_job(ran=False, undecided_since=NOW), *pods, now=at(10))
    assert (plan.status.attempt.number, budgets_used(plan)) == (1, (1, 0))
    assert plan.status.last_failure.reason == "InitFailed"


@pytest.mark.parametrize("code", [2])
def test_by_default_wrong_use_ends_the_job_at_once(code):
    plan = plan_for(a_running_job(), *one_failed_with(code, ""))
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.NON_RETRYABLE
    assert plan.status.message == (
        "rank 1 in pod digits-0-1 failed with exit code 2; "
        "failurePolicy.nonRetryableExitCodes has this "
        f"code, so the job does not restart; {WHAT_TO_DO}"
    )
    assert budgets_used(plan) == (0, 0)


@pytest.mark.parametrize("code", [1, 3, 17, -9, 130])
def test_by_default_other_codes_restart(code):
    assert plan_for(a_running_job(), *one_failed_with(code)).status.attempt.number == 1


@pytest.mark.parametrize("code", [-9, 137], ids=["as torchrun writes it", "as a shell writes it"])
def test_a_signal_in_the_list_ends_the_job_in_both_forms(code):
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[137]))
    assert plan_for(job, *one_failed_with(code, "")).status.reason == Reason.NON_RETRYABLE


def test_an_empty_list_makes_every_code_retryable():
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[]))
    assert plan_for(job, *one_failed_with(2, "")).status.attempt.number == 1


def test_a_container_that_ran_out_of_memory_has_the_exit_code_of_its_kill():
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[137]))
    plan = plan_for(job, a_pod(0, running()), a_pod(1, oom_killed()))
    assert plan.status.reason == Reason.NON_RETRYABLE


def test_the_code_of_a_process_without_a_summary_counts_too():
    job = a_running_job()
    pods = a_pod(0, succeeded()), a_pod(1, ended(2, "usage: train.py [-h]"))
    assert plan_for(job, *pods).status.reason == Reason.NON_RETRYABLE


def test_the_exit_code_of_a_follower_is_not_that_of_the_job():
    # A short fault of the network: every process has lost its connection.
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[1]))
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, failed(follower_summary(1)))
    plan = plan_for(job, *pods)
    assert (plan.status.attempt.number, budgets_used(plan)) == (1, (1, 0))


def test_the_worker_that_failed_counts_though_another_one_of_its_node_was_a_follower():
    # Rank 0 wrote that it had lost rank 1, on the same node, before torchrun ended it.
    tail = f"[rank0]: {FOLLOWER_ERROR}\n{torchrun_summary(1, 3)}"
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[3]))
    plan = plan_for(job, a_pod(0, running()), a_pod(1, failed(tail)))
    assert plan.status.reason == Reason.NON_RETRYABLE
    twice = a_running_job()
    assert plan_for(twice, a_pod(1, failed(tail))).status.failed_nodes[0].name == "node-1"


def test_a_disrupted_pod_may_end_with_any_code():
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[2, 143]))
    pods = a_pod(0, running()), a_pod(1, ended(143), deleted_at=NOW)
    assert plan_for(job, *pods).status.attempt.number == 1


@pytest.mark.parametrize("tail", ["no-script", "no-module"])
def test_a_script_that_python_does_not_find_ends_the_job_at_once(tail):
    job = a_running_job(spec=with_policy(nonRetryableExitCodes=[]))
    pods = a_pod(0, running()), a_pod(1, failed(torchrun_tail(tail)))
    plan = plan_for(job, *pods)
    assert plan.status.reason == Reason.SCRIPT_NOT_FOUND
    end = f"; Python did not find it; check spec.args and the image; {WHAT_TO_DO}"
    assert plan.status.message.endswith(end)


def test_a_module_that_the_script_does_not_find_is_an_ordinary_failure():
    # It may be on a volume not mounted on one node.
    pods = a_pod(0, running()), a_pod(1, failed(torchrun_tail("module")))
    assert plan_for(a_running_job(), *pods).status.attempt.number == 1


@pytest.mark.parametrize("line", ["python: epoch 3 is done", "/usr/bin/python3: loss is 0.3"])
def test_a_line_of_the_script_that_looks_like_pythons_own_does_not_end_the_job(line):
    killed = torchrun_summary(1, -9, "").replace("[rank1]: \n", f"{line}\n")
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, failed(killed)))
    assert plan.status.attempt.number == 1


# The back-off


def failed_after(seconds, job, pods=ONE_FAILED):
    """Return the plan for a job after its attempt trained for so long."""
    return plan_for(job, *pods, now=at(seconds))


def test_the_back_off_counts_from_when_the_attempt_trained():
    assert failed_after(299, a_running_job(backoff=Backoff(2))).status.backoff == Backoff(
        3, at(319)
    )


def test_an_attempt_that_trained_for_5_minutes_begins_the_back_off_anew():
    assert failed_after(300, a_running_job(backoff=Backoff(6))).status.backoff == Backoff()


def test_an_attempt_that_only_waited_for_long_does_not_begin_the_back_off_anew():
    # It was created an hour ago, waited for room, and failed as soon as it ran.
    job = a_running_job(start=at(-3600), running_time=at(-4), backoff=Backoff(2))
    assert failed_after(0, job).status.backoff == Backoff(3, at(20))


def test_an_attempt_that_never_trained_counts_as_early():
    job = a_running_job(ran=False, start=at(-3600), backoff=Backoff(1))
    assert failed_after(0, job).status.backoff == Backoff(2, at(10))


def test_a_clock_that_was_set_back_does_not_begin_the_back_off_anew():
    job = a_running_job(running_time=at(3600), backoff=Backoff(2))
    assert failed_after(0, job).status.backoff.count == 3


def test_a_disrupted_attempt_neither_waits_nor_counts():
    job = a_running_job(backoff=Backoff(3, at(-60)))
    plan = plan_for(job, *ONE_DELETED, now=at(1))
    assert plan.status.backoff == Backoff(3)
    assert plan_for(written(job, plan), now=at(1)).new_pods == (0, 1)


def test_a_disrupted_attempt_that_trained_for_long_begins_the_back_off_anew():
    assert plan_for(
        a_running_job(backoff=Backoff(3)), *ONE_DELETED, now=at(300)
    ).status.backoff == (Backoff())


def test_a_failure_after_a_disruption_goes_on_with_the_back_off():
    job = a_running_job(backoff=Backoff(2))
    job = written(job, plan_for(job, *ONE_DELETED, now=at(1)))
    pods = [a_pod(index, failed(torchrun_summary(index)), attempt=1) for index in range(2)]
    assert plan_for(job, *pods, now=at(2)).status.backoff == Backoff(3, at(22))


def test_a_rendezvous_that_timed_out_waits_before_it_is_tried_again():
    pods = a_pod(0, failed(torchrun_tail("rendezvous-timeout"))), a_pod(1, unschedulable())
    job = a_running_job(ran=False, undecided_since=at(-10), backoff=Backoff(1))
    plan = plan_for(job, *pods)
    assert (budgets_used(plan), plan.status.backoff) == ((0, 0), Backoff(2, at(10)))


KUBELET_ENDS = [
    rejected_by_kubelet(),
    # The node is under pressure, so no container is created.
    rejected_by_kubelet("Evicted"),
    preempted_by_kubelet(),
]


@pytest.mark.parametrize("rejected", KUBELET_ENDS, ids=lambda status: status["reason"])
def test_attempts_that_a_kubelet_rejects_use_no_budget_and_wait_longer_each_time(rejected):
    spec = with_policy(maxDisruptions=0, maxRestarts=0)
    waits = []
    backoff = Backoff()
    for attempt in range(4):
        job = a_running_job(spec=spec, attempt=attempt, ran=False, backoff=backoff)
        pods = a_pod(0, rejected, attempt=attempt), a_pod(1, waiting(), attempt=attempt)
        plan = plan_for(job, *pods)
        assert (plan.status.attempt.number, budgets_used(plan)) == (attempt + 1, (0, 0))
        backoff = plan.status.backoff
        waits.append((backoff.until - NOW).total_seconds() if backoff.until else 0)
    assert waits == [0, 10, 20, 40]


def test_an_attempt_that_ran_ends_the_series_of_rejected_ones():
    job = a_running_job(backoff=Backoff(3))
    plan = plan_for(job, *ONE_DELETED, now=at(300))
    assert (plan.status.backoff, budgets_used(plan)) == (Backoff(), (0, 1))


def test_a_script_that_goes_missing_later_is_tried_again_without_a_budget():
    # A claim was not mounted, for example.
    pods = a_pod(0, running()), a_pod(1, failed(torchrun_tail("no-script")))
    spec = with_policy(maxRestarts=0)
    job = a_running_job(spec=spec, seconds={"training": 3600}, backoff=Backoff(2))
    plan = plan_for(job, *pods)
    assert (plan.status.phase, budgets_used(plan)) == (Phase.RESTARTING, (0, 0))
    assert plan.status.last_failure.reason == Reason.SCRIPT_NOT_FOUND
    other = a_pod(0, running()), a_pod(1, failed(torchrun_tail("raise")))
    assert plan_for(job, *other).status.last_failure.reason == "WorkerFailed"
    assert plan.status.backoff == Backoff(3, at(20))
    # If its pods were only rejected before, the job has not shown that the script exists.
    job = a_running_job(attempts=(EndedAttempt(0, "Disruption"),))
    assert plan_for(job, *pods).status.reason == Reason.SCRIPT_NOT_FOUND


@pytest.mark.parametrize("reason", ["StartError", "ContainerCannotRun"])
def test_a_container_that_cannot_start_is_the_fault_of_the_job_only_before_it_trained(reason):
    pods = a_pod(0, running()), a_pod(1, ended(128, "driver not loaded", reason=reason))
    fields = {"spec": with_policy(maxRestarts=1), "ran": False, "undecided_since": at(-10)}
    plan = plan_for(a_running_job(seconds={"training": 3600}, **fields), *pods)
    assert (plan.status.last_failure.cause, budgets_used(plan)) == ("Disruption", (0, 0))
    assert "could not start pod digits-0-1: driver not loaded" in plan.status.last_failure.message
    plan = plan_for(a_running_job(**fields), *pods)
    assert (plan.status.last_failure.cause, budgets_used(plan)) == ("Failure", (1, 0))


def test_a_peer_that_is_lost_before_all_nodes_ran_uses_the_budget():
    # A rank may end with 0 after some steps, before the operator has seen all ready. This looks the
    # same.
    pods = a_pod(0, running()), a_pod(1, failed(follower_summary(1)))
    job = a_running_job(ran=False, undecided_since=NOW)
    plan = plan_for(job, *pods, now=at(60))
    assert budgets_used(plan) == (0, 1)


def test_the_startup_deadline_goes_on_over_attempts_that_use_no_budget():
    spec = with_policy(maxDisruptions=0)
    job = a_running_job(spec=spec, ran=False, starting_since=NOW)
    pods = a_pod(0, rejected_by_kubelet()), a_pod(1, waiting())
    plan = plan_for(job, *pods, now=at(30))
    assert (budgets_used(plan), plan.status.attempt.starting_seconds) == ((0, 0), 30)


# Taints of Kubernetes' own

BY_TAINT = {**running(), "conditions": [disruption_target("DeletionByTaintManager")]}


@pytest.mark.parametrize(
    ("nodes", "budget"),
    [
        (nodes_of(a_node("node-1", "True", "upgrade")), "announced"),
        (nodes_of(a_node("node-1", "Unknown")), "disruptions"),
        (nodes_of(a_node("node-1", "False")), "disruptions"),
        (nodes_of(), "disruptions"),
        (None, "disruptions"),
    ],
    ids=["a taint", "unreachable", "not ready", "gone", "nodes cannot be read"],
)
def test_a_pod_that_the_taint_of_a_lost_node_drove_away_was_not_announced(nodes, budget):
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, BY_TAINT), nodes=nodes)
    assert restarts_by_budget(plan) == {budget: 1}


def test_a_limit_of_announced_disruptions_ends_the_job():
    job = a_running_job(announced=2, spec=with_policy(maxAnnouncedDisruptions=2, maxDisruptions=9))
    drained = a_pod(1, {**running(), "conditions": [disruption_target()]})
    status = plan_for(job, a_pod(0, running()), drained).status
    assert (status.reason, status.budget.announced) == (Reason.MAX_DISRUPTIONS, 2)
    assert "maxAnnouncedDisruptions=2 is used up" in status.message


def test_an_upgrade_of_many_nodes_ends_no_job():
    job = a_running_job(announced=500)
    drained = a_pod(1, {**running(), "conditions": [disruption_target()]})
    assert plan_for(job, a_pod(0, running()), drained).status.attempt.number == 1
