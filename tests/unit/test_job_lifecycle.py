"""When a job waits, ends and is cleaned up: suspend, deadlines, time to live, managedBy."""

from dataclasses import replace

import pytest
from builders.containers import failed, running, succeeded, waiting, with_sidecar
from builders.jobs import (
    WHAT_TO_DO,
    a_condition,
    a_finished_job,
    a_job,
    a_running_job,
    a_starting_job,
    a_status,
    changed,
    condition,
)
from builders.messages import torchrun_summary, torchrun_tail
from builders.nodes import a_node, nodes_of
from builders.plans import budgets_used, deleted_pods, plan_for, written
from builders.pods import a_pod
from builders.surroundings import scheduling_gated, unschedulable
from builders.times import NOW, at

from ddpjob.core.api.history import Backoff, LastFailure
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.deletions import BROKEN_GANG_GRACE, NEVER_RAN_GRACE
from ddpjob.core.observe.observation import Refusal

ALL_RUNNING = (a_pod(0, running()), a_pod(1, running()))
ALL_SUCCEEDED = (a_pod(0, succeeded()), a_pod(1, succeeded()))
FAILED = a_pod(1, failed(torchrun_summary(1)))
ENDING = (a_pod(0, running(), deleted_at=NOW), a_pod(1, running(), deleted_at=NOW))


def reasons(plan):
    return [event.reason for event in plan.events]


def suspended(job, *pods, now=NOW):
    """Return the job after the look that suspends it."""
    return written(job, plan_for(job, *pods, now=now))


def resumed(job):
    """Return the same job with spec.suspend=false."""
    return a_job(nodes=job.spec.nodes, generation=3, status=job.status)


# Suspend


def test_a_suspended_job_gives_its_pods_back_with_their_own_grace_period():
    plan = plan_for(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    assert [delete.grace for delete in plan.delete] == [None, None]
    assert (plan.status.phase, plan.status.reason) == (Phase.SUSPENDED, Reason.SUSPENDED)
    assert (
        plan.status.message
        == "suspending: waiting for pod digits-0-0 on node node-0 and 1 more to end"
    )


def test_a_job_is_suspended_and_no_longer_running():
    status = plan_for(a_running_job(spec={"suspend": True}), *ALL_RUNNING, now=at(5)).status
    assert status.has(Condition.SUSPENDED)
    assert condition(status, Condition.RUNNING)["status"] == "False"


def test_a_gang_that_never_ran_has_no_checkpoint_to_write_when_it_is_suspended():
    job = a_running_job(ran=False, spec={"suspend": True})
    plan = plan_for(job, a_pod(0, running()), a_pod(1, waiting()))
    assert [delete.grace for delete in plan.delete] == [NEVER_RAN_GRACE] * 2


def test_when_the_pods_have_ended_a_suspended_job_says_how_to_resume():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    plan = plan_for(job)
    assert plan.status.message == "suspended; to resume, set spec.suspend to false"
    assert (plan.new_pods, plan.delete, plan.events, plan.wake_after) == ((), (), (), None)


def test_pods_that_are_ending_are_not_deleted_again_while_a_job_is_suspended():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    assert plan_for(job, *ENDING).delete == ()


def test_ended_pods_of_a_suspended_job_are_kept_for_their_logs():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    assert plan_for(job, a_pod(0, failed()), a_pod(1, failed())).delete == ()


def test_one_event_and_one_entry_of_the_history_report_a_suspension():
    job = a_running_job(spec={"suspend": True})
    plan = plan_for(job, *ALL_RUNNING)
    assert reasons(plan) == ["Suspended"]
    again = plan_for(written(job, plan), *ENDING)
    assert again.events == ()
    assert [entry.cause for entry in again.status.attempts] == ["Suspended"]


@pytest.mark.parametrize(
    "pod",
    [
        a_pod(1, failed(torchrun_summary(1))),
        a_pod(1, failed(torchrun_summary(1, -15, ""))),
        a_pod(1, running(), deleted_at=NOW),
    ],
    ids=["failed", "got SIGTERM", "deleted"],
)
def test_pods_that_fail_while_they_are_suspended_cost_nothing(pod):
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    plan = plan_for(job, a_pod(0, running(), deleted_at=NOW), pod, now=at(60))
    assert (plan.status.attempt.number, budgets_used(plan)) == (0, (0, 0))
    assert plan.status.phase == Phase.SUSPENDED


def test_a_pod_that_vanished_costs_nothing_while_a_job_is_suspended():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    plan = plan_for(job, a_pod(0, running(), deleted_at=NOW))
    assert (plan.status.attempt.number, plan.confirm) == (0, ())


def test_a_job_whose_nodes_all_succeed_while_it_is_suspended_is_complete():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    status = plan_for(job, *ALL_SUCCEEDED).status
    assert status.has(Condition.COMPLETE)
    assert not status.has(Condition.SUSPENDED)
    assert [entry.attempt for entry in status.attempts] == [0]


def test_a_job_that_is_created_suspended_has_no_attempt():
    job = a_job(suspend=True, nodes=3)
    plan = plan_for(job)
    assert (plan.new_pods, plan.status.attempt.number) == ((), None)
    assert plan.status.has(Condition.SUSPENDED)
    assert plan.status.to_dict()["nodesReady"] == "0/3"
    assert plan.status.attempts == ()
    assert plan_for(written(job, plan)).status == plan.status


def test_a_finished_job_is_not_suspended():
    plan = plan_for(a_finished_job(suspend=True), *ALL_SUCCEEDED)
    assert (plan.status.phase, plan.events) == (Phase.COMPLETE, ())


def test_the_back_off_goes_on_after_a_suspension():
    job = suspended(a_running_job(backoff=Backoff(4, at(80)), spec={"suspend": True}), *ALL_RUNNING)
    plan = plan_for(resumed(job), *ALL_SUCCEEDED[:0])
    assert plan.status.backoff == Backoff(4, at(80))
    assert plan_for(written(resumed(job), plan), now=at(79)).new_pods == ()
    assert plan_for(written(resumed(job), plan), now=at(80)).new_pods == (0, 1)


def test_a_suspended_attempt_that_had_lasted_ends_the_back_off():
    job = a_running_job(backoff=Backoff(4, at(80)), spec={"suspend": True})
    assert plan_for(job, *ALL_RUNNING, now=at(400)).status.backoff == Backoff()


def test_a_failure_at_the_look_that_also_sees_the_suspension_is_counted():
    job = a_running_job(spec={"suspend": True}, backoff=Backoff(1))
    plan = plan_for(job, a_pod(0, running()), FAILED)
    status = plan.status
    assert (status.phase, status.budget.failures, status.attempt.number) == (Phase.SUSPENDED, 1, 0)
    assert status.last_failure.pod == "digits-0-1"
    assert [entry.cause for entry in status.attempts] == ["Failure"]
    assert status.backoff == Backoff(2, at(10))


def test_a_pod_that_is_gone_at_the_look_that_also_sees_the_suspension_is_confirmed():
    plan = plan_for(a_running_job(spec={"suspend": True}), a_pod(0, running()))
    assert (plan.status.phase, plan.status.budget.disruptions) == (Phase.SUSPENDED, 1)
    assert plan.confirm == ("digits-0-1",)


def test_pods_that_end_after_the_status_was_lost_are_not_counted():
    status = a_status(attempt=0, reason=Reason.STATUS_RECOVERED)
    job = a_job(status=status, suspend=True)
    assert plan_for(job, *ENDING).status.restarts == 0


def test_a_failure_beyond_the_budget_ends_the_job_although_it_is_to_be_suspended():
    job = a_running_job(spec={"suspend": True}, failures=3)
    assert plan_for(job, a_pod(0, running()), FAILED).status.reason == Reason.MAX_RESTARTS


def test_what_ends_while_the_job_is_being_suspended_is_not_counted():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    for pods in [(a_pod(0, running()), FAILED), (a_pod(0, running()),), ()]:
        status = plan_for(job, *pods).status
        assert (status.phase, status.restarts) == (Phase.SUSPENDED, 0)
        assert status.attempts[0].cause == "Suspended"


# Taken up again


def a_failed_job(**spec):
    """Return a job without restarts left, as its last look has written it."""
    job = a_running_job(failures=3, disruptions=2, spec=spec, attempt=5)
    pods = a_pod(0, running(), attempt=5), a_pod(1, failed(torchrun_summary(1)), attempt=5)
    return written(job, plan_for(job, *pods))


def taken_up(job, retries=1):
    return a_job(nodes=job.spec.nodes, retries=retries, generation=4, status=job.status)


def test_a_failed_job_is_taken_up_again_when_its_retries_grow():
    plan = plan_for(taken_up(a_failed_job()), now=at(60))
    status = plan.status
    assert (status.attempt.number, status.phase, status.reason) == (
        6,
        Phase.RESTARTING,
        Reason.RETRIED,
    )
    assert not status.has(Condition.FAILED)
    assert (status.budget.failures, status.budget.disruptions, status.completion_time) == (
        3,
        2,
        None,
    )
    assert status.attempts[0].cause == "Failure"
    assert reasons(plan) == ["Retried"]
    assert plan_for(written(taken_up(a_failed_job()), plan), now=at(60)).new_pods == (0, 1)


def test_a_job_that_is_taken_up_again_has_its_budgets_anew():
    job = written(taken_up(a_failed_job()), plan_for(taken_up(a_failed_job())))
    for restart in range(1, 5):
        status = changed(job.status, running_time=NOW, latched=True)
        job = a_job(nodes=2, retries=1, status=status)
        pods = [a_pod(0, running(), attempt=status.attempt.number)]
        pods.append(a_pod(1, failed(torchrun_summary(1)), attempt=status.attempt.number))
        job = written(job, plan_for(job, *pods))
        assert job.status.has(Condition.FAILED) == (restart == 4)
    assert job.status.budget.failures == 6


def test_a_failed_job_is_taken_up_once_for_each_larger_number():
    job = a_failed_job()
    job = written(taken_up(job), plan_for(taken_up(job)))
    assert plan_for(taken_up(job)).status.reason != Reason.RETRIED
    failed_again = replace(job.status, conditions=a_condition(Condition.FAILED))
    assert plan_for(a_job(retries=1, status=failed_again)).status.attempt.number == 6
    assert plan_for(a_job(retries=2, status=failed_again)).status.attempt.number == 7


@pytest.mark.parametrize("retries", [0, 2])
def test_a_number_that_a_job_had_before_it_failed_does_not_take_it_up(retries):
    job = a_failed_job(retries=retries)
    assert plan_for(taken_up(job, retries)).status.has(Condition.FAILED)


def test_an_invalid_pod_ends_a_job_that_is_taken_up_again_and_never_had_a_pod():
    refusal = Refusal(Reason.INVALID_POD, "must be less", at(0), final=True)
    job = a_job(retries=1, status=a_status(attempt=1, latched=False, ran=False))
    job = replace(job, status=changed(job.status, had_pods=False))
    assert plan_for(job, refusal=refusal).status.has(Condition.FAILED)


@pytest.mark.parametrize("spec", [{"suspend": True}, {"nodes": 4}])
def test_a_job_with_one_pod_of_its_gang_had_pods_also_after_a_suspension_or_a_resize(spec):
    job = a_job(status=a_status(latched=False, ran=False), **spec)
    job = replace(job, status=changed(job.status, had_pods=False))
    assert plan_for(job, a_pod(0, running())).status.attempt.had_pods
    assert not plan_for(job).status.attempt.had_pods


def test_pods_that_trained_after_the_end_may_write_a_checkpoint_before_a_retry():
    status = changed(a_failed_job().status, running_time=None, last_failure=LastFailure())
    pods = [a_pod(index, running(), attempt=5) for index in range(2)]
    plan = plan_for(taken_up(a_job(status=status)), *pods)
    assert [delete.grace for delete in plan.delete] == [None, None]


def test_a_retry_of_a_status_that_was_restored_begins_after_the_newest_pods():
    pods = [a_pod(index, running(), attempt=6) for index in range(2)]
    assert plan_for(taken_up(a_failed_job()), *pods, is_current=True).status.attempt.number == 7


def test_a_larger_budget_does_not_take_a_failed_job_up():
    status = a_failed_job().status
    job = a_job(failurePolicy={"maxRestarts": 100}, status=status)
    assert plan_for(job).status.has(Condition.FAILED)


def test_a_complete_job_is_not_taken_up():
    job = a_finished_job(Condition.COMPLETE)
    plan = plan_for(a_job(retries=1, status=job.status))
    assert plan.status.has(Condition.COMPLETE)


def test_a_job_that_was_too_long_active_has_its_time_anew():
    status = replace(a_failed_job().status, active_seconds=100)
    job = a_job(retries=1, activeDeadlineSeconds=60, status=status)
    plan = plan_for(job)
    assert plan_for(written(job, plan)).status.phase == Phase.STARTING


def test_pods_that_trained_may_write_a_checkpoint_also_if_their_successor_is_suspended():
    # The operator stopped between the restart and the deletions, and the user suspended the job.
    status = a_status(attempt=1, latched=False, ran=False, previous_ran=True)
    plan = plan_for(a_job(status=status, suspend=True), *ALL_RUNNING)
    assert [delete.grace for delete in plan.delete] == [None, None]


def test_pods_that_trained_may_write_a_checkpoint_also_if_a_deadline_ends_their_successor():
    # The operator stopped between the restart and the deletions, and the deadline came.
    status = a_status(attempt=1, latched=False, ran=False, previous_ran=True, active_since=at(-60))
    plan = plan_for(a_job(status=status, activeDeadlineSeconds=60), *ALL_RUNNING)
    assert plan.status.reason == Reason.DEADLINE
    assert [delete.grace for delete in plan.delete] == [None, None]


# Resume


def test_the_active_time_of_a_resumed_job_starts_with_its_first_new_pod():
    ended = a_pod(0, failed())
    status = a_status(attempt=1, latched=False, ran=False, active_since=None)
    job = a_job(status=status, activeDeadlineSeconds=100)
    refused = Refusal(Reason.QUOTA, "exceeded quota", at(5))
    assert plan_for(job, ended, refusal=refused).status.active_since is None
    new = a_pod(0, attempt=1)
    assert plan_for(job, ended, new, refusal=refused).status.active_since == NOW


def test_a_resumed_job_begins_a_new_attempt_that_costs_nothing():
    job = resumed(suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING))
    plan = plan_for(job)
    assert (plan.status.attempt.number, budgets_used(plan)) == (1, (0, 0))
    assert plan.status.backoff == Backoff()
    assert condition(plan.status, Condition.SUSPENDED)["status"] == "False"
    assert reasons(plan) == ["Resumed"]
    assert plan.events[0].message == "attempt 1 begins: the job was resumed"
    assert plan_for(written(job, plan)).new_pods == (0, 1)


def test_a_resumed_job_waits_until_its_suspended_pods_have_ended():
    job = resumed(suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING))
    job = written(job, plan_for(job, *ENDING))
    plan = plan_for(job, *ENDING)
    assert (plan.new_pods, plan.status.reason) == ((), Reason.WAITING_FOR_OLD_PODS)


def test_a_resumed_job_has_the_number_of_nodes_that_its_spec_has_then():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    job = a_job(nodes=4, status=job.status)
    plan = plan_for(job)
    assert (plan.status.attempt.number, plan.status.pods.desired) == (1, 4)
    assert reasons(plan) == ["Resumed"]


def test_a_job_that_was_created_suspended_begins_with_attempt_0():
    job = resumed(suspended(a_job(suspend=True)))
    plan = plan_for(job)
    assert (plan.status.attempt.number, plan.new_pods) == (0, (0, 1))
    assert not plan.status.has(Condition.SUSPENDED)


def test_a_job_can_be_resumed_before_the_operator_saw_its_pods_end():
    job = resumed(suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING))
    plan = plan_for(job, *ALL_RUNNING)
    assert plan.status.attempt.number == 1
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]


# The clock of active time


def active(job, *pods, now):
    return written(job, plan_for(job, *pods, now=now))


def test_active_time_begins_with_the_first_pod():
    job = a_starting_job()
    assert plan_for(job).status.active_since is None
    assert plan_for(job, a_pod(0), now=at(3)).status.active_since == at(3)


def test_active_time_is_summed_over_suspensions():
    job = active(a_running_job(active_since=NOW, spec={"suspend": True}), *ALL_RUNNING, now=at(40))
    assert (job.status.active_seconds, job.status.active_since) == (40, None)
    job = active(resumed(job), *ALL_RUNNING, now=at(1000))
    assert (job.status.active_seconds, job.status.active_since) == (40, at(1000))


def test_active_time_does_not_run_while_a_job_is_suspended():
    job = active(a_running_job(active_since=NOW, spec={"suspend": True}), *ALL_RUNNING, now=at(40))
    assert active(job, *ENDING, now=at(70)).status.active_seconds == 40


def test_a_finished_job_has_the_sum_of_its_active_time():
    job = a_running_job(active_since=at(-60), active_seconds=40)
    status = plan_for(job, *ALL_SUCCEEDED).status
    assert (status.active_seconds, status.active_since) == (100, None)


def test_a_clock_that_was_set_back_does_not_make_active_time_negative():
    job = a_running_job(active_since=at(500), active_seconds=7)
    assert plan_for(job, *ALL_RUNNING).status.active_since == NOW
    assert plan_for(job, *ALL_SUCCEEDED).status.active_seconds == 7


# The deadline of active time

DEADLINE = {"activeDeadlineSeconds": 100}


def test_a_job_that_was_active_for_too_long_fails():
    job = a_running_job(active_since=NOW, spec=DEADLINE)
    plan = plan_for(job, *ALL_RUNNING, now=at(100))
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.DEADLINE
    limit = "activeDeadlineSeconds=100"
    assert plan.status.message == (
        f"the job was active for {limit}, in all its attempts; {WHAT_TO_DO}"
    )
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    assert plan.status.attempts[0].cause == "Stopped"


def test_pods_that_trained_get_their_own_grace_period_at_the_deadline():
    job = a_running_job(active_since=NOW, spec=DEADLINE)
    plan = plan_for(job, *ALL_RUNNING, now=at(100))
    assert [delete.grace for delete in plan.delete] == [None, None]


def test_a_job_wakes_up_at_its_deadline_and_not_before_it_ends():
    job = a_running_job(active_since=NOW, active_seconds=30, spec=DEADLINE)
    plan = plan_for(job, *ALL_RUNNING, now=at(60))
    assert (plan.status.phase, plan.wake_after) == (Phase.RUNNING, 10)
    assert plan_for(job, *ALL_RUNNING, now=at(70)).status.reason == Reason.DEADLINE


def test_a_job_that_succeeded_before_anybody_looked_is_not_late():
    job = a_running_job(active_since=NOW, spec=DEADLINE)
    assert plan_for(job, *ALL_SUCCEEDED, now=at(500)).status.has(Condition.COMPLETE)


def test_the_deadline_does_not_run_while_a_job_is_suspended():
    job = a_running_job(active_since=NOW, spec={"suspend": True, **DEADLINE})
    plan = plan_for(job, *ALL_RUNNING, now=at(500))
    assert plan.status.phase == Phase.SUSPENDED
    assert plan_for(written(job, plan), now=at(900)).wake_after is None


def test_a_resumed_job_without_time_left_ends_at_the_next_look():
    status = a_status(ran=False, active_seconds=100)
    job = a_job(status=status, activeDeadlineSeconds=100)
    plan = plan_for(job, *ALL_RUNNING)
    assert plan.wake_after == 0
    assert plan_for(written(job, plan), *ALL_RUNNING).status.reason == Reason.DEADLINE


def test_the_deadline_comes_before_a_restart():
    job = a_running_job(active_since=NOW, spec=DEADLINE)
    pods = a_pod(0, running()), a_pod(1, failed(torchrun_summary(1)))
    assert plan_for(job, *pods, now=at(100)).status.reason == Reason.DEADLINE


def test_the_deadline_ends_a_job_that_waits_for_an_older_pod():
    status = a_status(attempt=1, latched=False, ran=False, active_since=NOW)
    plan = plan_for(a_job(status=status, **DEADLINE), a_pod(0, running()), now=at(100))
    assert plan.status.reason == Reason.DEADLINE


# The deadline of the start

STARTUP = {"startupDeadlineSeconds": 100}


def a_late_job(**fields):
    """Return a job waiting for its nodes since NOW, for at most 100 s."""
    status = a_status(ran=False, starting_since=NOW, **fields)
    return a_job(status=status, **STARTUP)


def test_a_new_operator_finds_out_why_pods_are_missing_before_it_ends_the_job():
    job = a_late_job(latched=False)
    first = plan_for(job, a_pod(0, running()), now=at(100))
    assert (first.status.finished, first.new_pods) == (False, (1,))
    quota = Refusal(Reason.QUOTA, "exceeded quota", at(110))
    plan = plan_for(job, a_pod(0, running()), refusal=quota, now=at(101))
    assert plan.status.reason == Reason.QUOTA
    assert "startupDeadlineSeconds=100: exceeded quota" in plan.status.message


def test_a_gang_that_does_not_start_says_how_many_nodes_run():
    pods = a_pod(0, succeeded()), a_pod(1, waiting())
    plan = plan_for(a_late_job(), *pods, now=at(100))
    assert "startupDeadlineSeconds=100: 0 of 2 nodes are ready; pod digits-0-1" in (
        plan.status.message
    )


def test_a_gang_that_does_not_start_fails_with_what_blocks_it():
    pods = a_pod(0, running()), a_pod(1, waiting("ImagePullBackOff", "no such image"))
    plan = plan_for(a_late_job(), *pods, now=at(100))
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.IMAGE_PULL
    assert plan.status.message == (
        "not all nodes were running within startupDeadlineSeconds=100: 1 of 2 pods cannot start; "
        f"digits-0-1: no such image; {WHAT_TO_DO}"
    )
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]


def test_a_gang_that_is_only_slow_fails_with_how_far_it_is():
    plan = plan_for(a_late_job(), a_pod(0, running()), a_pod(1, waiting()), now=at(100))
    assert plan.status.reason == Reason.STARTUP_DEADLINE
    assert "1 of 2 nodes are ready; pod digits-0-1 is starting on node-1" in plan.status.message


def test_pods_that_a_quota_refuses_count_as_a_gang_that_does_not_start():
    refusal = Refusal(Reason.QUOTA, "exceeded quota", at(130))
    job = a_late_job(latched=False)
    plan = plan_for(job, a_pod(0, running()), now=at(100), refusal=refusal)
    assert plan.status.reason == Reason.QUOTA
    assert "exceeded quota" in plan.status.message


def test_a_rendezvous_that_times_out_does_not_give_the_time_to_start_again():
    late = a_pod(1, waiting("ImagePullBackOff", "no such image"))
    first = a_pod(0, failed(torchrun_tail("rendezvous-timeout")))
    job = a_late_job(undecided_since=at(50))
    plan = plan_for(job, first, late, now=at(60))
    assert (plan.status.attempt.number, plan.status.reason) == (1, Reason.RENDEZVOUS_TIMEOUT)
    assert plan.status.attempt.starting_seconds == 60
    job = written(job, plan_for(written(job, plan), now=at(60)))
    pods = (
        a_pod(0, running(), attempt=1),
        a_pod(1, waiting("ImagePullBackOff", "no such image"), attempt=1),
    )
    early = plan_for(job, *pods, now=at(99))
    assert (early.status.phase, early.wake_after) == (Phase.PENDING, 1)
    assert plan_for(job, *pods, now=at(100)).status.reason == Reason.IMAGE_PULL


def test_the_time_to_start_begins_anew_after_a_run_and_after_a_failure():
    failure = a_pod(0, failed(torchrun_summary(0))), a_pod(1, waiting())
    assert plan_for(a_late_job(starting_seconds=50), *failure).status.attempt.starting_seconds == 0
    run = plan_for(a_late_job(starting_seconds=50), *ALL_RUNNING)
    assert (run.status.phase, run.status.attempt.starting_seconds) == (Phase.RUNNING, 0)


def test_a_gang_wakes_up_at_its_startup_deadline():
    pods = a_pod(0, running()), a_pod(1, waiting())
    assert plan_for(a_late_job(), *pods, now=at(99)).wake_after == 1


def test_a_gang_that_runs_at_last_is_not_late():
    assert plan_for(a_late_job(), *ALL_RUNNING, now=at(500)).status.phase == Phase.RUNNING


def test_a_gang_that_ran_has_no_startup_deadline():
    job = a_running_job(spec=STARTUP)
    plan = plan_for(job, *ALL_RUNNING, now=at(5000))
    assert (plan.status.attempt.starting_since, plan.wake_after) == (None, None)


def test_each_attempt_has_the_whole_startup_time():
    job = a_late_job()
    job = written(job, plan_for(job, a_pod(0, running()), now=at(90)))
    assert job.status.attempt.number == 1
    job = written(job, plan_for(job, now=at(91)))
    assert job.status.attempt.starting_since == at(91)


def test_time_under_a_scheduling_gate_does_not_count():
    job = a_late_job()
    gated = a_pod(0, scheduling_gated()), a_pod(1, scheduling_gated())
    plan = plan_for(job, *gated, now=at(50))
    assert (plan.status.attempt.starting_since, plan.wake_after) == (None, None)
    assert plan.status.reason == Reason.GATED
    opened = plan_for(written(job, plan), a_pod(0), a_pod(1), now=at(5000))
    assert opened.status.attempt.starting_since == at(5000)


def test_a_gang_that_was_gated_while_no_operator_ran_is_not_late():
    # The operator created the pods, stopped, and another one begins an hour later.
    gated = a_pod(0, scheduling_gated()), a_pod(1, scheduling_gated())
    plan = plan_for(a_late_job(latched=False), *gated, now=at(3600))
    assert not plan.status.finished
    assert plan.status.reason == Reason.GATED


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        (a_job(status=a_status(attempt=1, latched=False, ran=False), **STARTUP), ALL_RUNNING),
        (
            a_job(
                status=a_status(attempt=1, latched=False, ran=False, backoff=Backoff(2, at(80))),
                **STARTUP,
            ),
            (),
        ),
    ],
    ids=["older pods", "back-off"],
)
def test_time_before_the_pods_may_be_created_does_not_count(job, pods):
    assert plan_for(job, *pods, now=at(50)).status.attempt.starting_since is None


# The time to live


def finished_at(job, moment):
    return written(job, plan_for(job, *ALL_SUCCEEDED, now=moment))


def test_a_finished_job_is_deleted_after_its_time_to_live():
    job = finished_at(a_running_job(spec={"ttlSecondsAfterFinished": 60}), at(10))
    early = plan_for(job, *ALL_SUCCEEDED, now=at(30))
    assert (early.delete_job, early.wake_after) == (False, 40)
    assert plan_for(job, *ALL_SUCCEEDED, now=at(70)).delete_job


def test_a_time_to_live_wakes_the_operator_from_the_look_at_which_the_job_ends():
    job = a_running_job(spec={"ttlSecondsAfterFinished": 60})
    assert plan_for(job, *ALL_SUCCEEDED).wake_after == 60


def test_a_time_to_live_of_0_is_over_at_once():
    job = a_running_job(spec={"ttlSecondsAfterFinished": 0})
    plan = plan_for(job, *ALL_SUCCEEDED)
    # No event of the cluster follows: the operator's own write is not news to it.
    assert plan.wake_after == 0
    assert plan_for(written(job, plan), *ALL_SUCCEEDED).delete_job


def test_a_failed_job_is_deleted_after_its_time_to_live_too():
    policy = {"maxRestarts": 0}
    job = a_running_job(spec={"ttlSecondsAfterFinished": 60, "failurePolicy": policy})
    pods = a_pod(0, failed(torchrun_summary(0))), a_pod(1, failed(torchrun_summary(1)))
    job = written(job, plan_for(job, *pods))
    assert plan_for(job, *pods, now=at(60)).delete_job


@pytest.mark.parametrize("seconds", [None, 60])
def test_a_job_is_not_deleted_before_it_has_finished(seconds):
    job = a_running_job(spec={"ttlSecondsAfterFinished": seconds})
    plan = plan_for(job, *ALL_RUNNING, now=at(10**6))
    assert (plan.delete_job, plan.wake_after) == (False, None)


def test_without_a_time_to_live_a_finished_job_stays():
    job = finished_at(a_running_job(), NOW)
    plan = plan_for(job, *ALL_SUCCEEDED, now=at(10**8))
    assert (plan.delete_job, plan.wake_after) == (False, None)


def test_a_job_that_is_being_deleted_is_not_deleted_again():
    job = a_finished_job(ttlSecondsAfterFinished=0, deleting=True)
    assert not plan_for(job, now=at(60)).delete_job


# The clean-up of pods

ONE_RUNS = (a_pod(0, running()), a_pod(1, succeeded()))


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ("None", []),
        ("Running", ["digits-0-0"]),
        ("All", ["digits-0-0", "digits-0-1"]),
    ],
)
def test_the_policy_names_the_pods_of_a_finished_job_that_go(policy, deleted):
    assert deleted_pods(plan_for(a_finished_job(cleanPodPolicy=policy), *ONE_RUNS)) == deleted


@pytest.mark.parametrize(
    ("policy", "deleted"), [("None", []), ("Running", ["digits-0-0"]), ("All", ["digits-0-0"])]
)
def test_the_policy_is_kept_also_by_the_look_at_which_a_job_ends(policy, deleted):
    job = a_running_job(spec={"cleanPodPolicy": policy})
    sidecar = a_pod(0, with_sidecar(succeeded()))
    assert deleted_pods(plan_for(job, sidecar, a_pod(1, succeeded(), deleted_at=NOW))) == deleted


def test_the_policy_all_deletes_ended_pods_of_older_attempts_too():
    job = a_running_job(attempt=1, spec={"cleanPodPolicy": "All"})
    pods = [a_pod(index, succeeded(), attempt=1) for index in range(2)]
    plan = plan_for(job, a_pod(0, failed()), *pods)
    assert deleted_pods(plan) == ["digits-0-0", "digits-1-0", "digits-1-1"]


def test_a_broken_gang_is_cleaned_up_with_a_short_grace_period():
    job = a_running_job(spec={"failurePolicy": {"maxRestarts": 0}})
    plan = plan_for(job, a_pod(0, running()), a_pod(1, failed(torchrun_summary(1))))
    assert [delete.grace for delete in plan.delete] == [BROKEN_GANG_GRACE]


def test_a_disrupted_gang_may_write_a_checkpoint_also_if_that_ends_the_job():
    # The user applies the job again with a larger budget, and it goes on from there.
    job = a_running_job(spec={"failurePolicy": {"maxDisruptions": 0}})
    plan = plan_for(job, a_pod(0, running()), a_pod(1, running(), deleted_at=NOW))
    assert plan.status.reason == Reason.MAX_DISRUPTIONS
    assert [delete.grace for delete in plan.delete] == [None]


# Another controller


@pytest.mark.parametrize("pods", [(), ALL_RUNNING, (a_pod(0, failed()),)], ids=len)
@pytest.mark.parametrize("manager", ["kueue.x-k8s.io/multikueue", "acme.example/queue"])
def test_a_job_that_another_controller_manages_is_left_alone(manager, pods):
    job = a_job(managedBy=manager, generation=4)
    plan = plan_for(job, *pods)
    assert plan.status == job.status
    assert (plan.new_pods, plan.delete, plan.events, plan.wake_after) == ((), (), (), None)


def test_a_status_that_another_controller_wrote_is_left_alone():
    job = a_running_job(generation=9, spec={"managedBy": "kueue.x-k8s.io/multikueue"})
    assert plan_for(job).status == job.status


def test_the_operator_can_be_named_as_the_manager():
    assert plan_for(a_job(managedBy="ddpjob.dev/operator")).new_pods == (0, 1)


# Dead nodes


def test_a_suspended_job_forces_its_pods_off_a_dead_node():
    job = suspended(a_running_job(spec={"suspend": True}), *ALL_RUNNING)
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "Unknown"))
    first = plan_for(job, *ENDING, nodes=nodes, now=at(10))
    assert first.wake_after == 30
    again = plan_for(written(job, first), *ENDING, nodes=nodes, now=at(40))
    assert [(delete.name, delete.grace) for delete in again.delete] == [("digits-0-1", 0)]


def test_an_unschedulable_gang_can_be_suspended():
    job = a_running_job(ran=False, spec={"suspend": True})
    plan = plan_for(job, a_pod(0, unschedulable()), a_pod(1, unschedulable()))
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]


def test_a_job_of_another_controller_is_left_alone_also_if_its_spec_cannot_be_read():
    job = a_job(managedBy="kueue.x-k8s.io/multikueue", accelerator="later")
    assert plan_for(job).status == job.status


def test_pods_of_any_attempt_are_active():
    pods = [a_pod(index, running(), deleted_at=NOW) for index in range(2)]
    suspending = plan_for(a_job(status=a_status(attempt=1, ran=False), suspend=True), *pods)
    assert suspending.status.pods.active == 2
    failed_status = a_status(attempt=1, conditions=a_condition(Condition.FAILED))
    ended = plan_for(a_job(status=failed_status), *pods)
    assert ended.status.pods.active == 2


def test_a_suspended_job_wakes_up_when_its_pod_is_overdue():
    job = a_running_job(spec={"suspend": True})
    nodes = nodes_of(a_node("node-0"), a_node("node-1"))
    plan = plan_for(job, a_pod(0, running(), deleted_at=NOW, grace=45), nodes=nodes)
    assert plan.wake_after == 75


def test_a_job_that_was_created_suspended_has_a_selector_for_an_autoscaler():
    assert plan_for(a_job(suspend=True)).status.selector == "ddpjob.dev/job-uid=" + a_job().uid
