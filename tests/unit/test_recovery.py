"""Changes by somebody else: stray pods, and a wiped or replaced status."""

import pytest
from builders.containers import failed, running, succeeded, waiting
from builders.jobs import a_condition, a_finished_job, a_job, a_running_job, a_status, condition
from builders.messages import torchrun_summary
from builders.plans import budgets_used, deleted_pods, observation, plan_for, written
from builders.pods import a_pod, a_stray
from builders.times import NOW, at

from ddpjob.core.api.history import EndedAttempt
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason

BOTH_RUN = (a_pod(0, running()), a_pod(1, running()))
BOTH_SUCCEEDED = (a_pod(0, succeeded()), a_pod(1, succeeded()))

STRAYS = {
    "a copy with another name": a_stray(0, running()),
    "a second pod of one index": a_stray(1, running(), name="digits-0-1-copy"),
    "an index beyond the gang": a_pod(7, running()),
    "an index beyond every gang": a_pod(1000, running(), attempt=1),
    "an attempt that no status can have": a_pod(0, running(), attempt=2**31 - 1),
    "an index that is written in another way": a_stray(0, running(), name="digits-0-00"),
}


# Stray pods


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
def test_a_stray_pod_is_none_of_the_gang(stray):
    obs = observation(a_running_job(), *BOTH_RUN, stray)
    assert obs.strays == (stray["metadata"]["name"],)
    assert [pod.name for pod in obs.pods] == ["digits-0-0", "digits-0-1"]


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("end", [succeeded(), failed(torchrun_summary(0)), None])
def test_a_stray_pod_decides_nothing(stray, end):
    stray = {**stray, "status": end or stray["status"]}
    plan = plan_for(a_running_job(), *BOTH_RUN, stray)
    assert (plan.status.phase, plan.status.attempt.number) == (Phase.RUNNING, 0)
    assert (plan.new_pods, plan.delete) == ((), ())
    assert plan.status.to_dict()["nodesReady"] == "2/2"


def test_a_stray_pod_that_succeeded_does_not_complete_a_job():
    pods = a_pod(0, succeeded()), a_pod(1, running()), a_pod(7, succeeded())
    assert not plan_for(a_running_job(), *pods).status.has(Condition.COMPLETE)


def test_a_stray_pod_does_not_replace_a_lost_one():
    plan = plan_for(a_running_job(), a_pod(0, running()), a_stray(1, running()))
    assert (plan.status.attempt.number, budgets_used(plan)) == (1, (0, 1))


def test_a_stray_pod_does_not_hold_up_a_new_attempt():
    job = a_running_job(attempt=1, latched=False, ran=False)
    assert plan_for(job, a_stray(0, running())).new_pods == (0, 1)


def test_a_stray_pod_is_reported_once():
    job = a_running_job()
    plan = plan_for(job, *BOTH_RUN, a_stray())
    assert plan.status.stray_pods == ("copy",)
    (event,) = plan.events
    assert (event.kind, event.reason) == ("Warning", "StrayPods")
    assert event.message == (
        "ignored pods that the operator did not create for this job: copy; delete them if they are "
        "copies"
    )
    again = plan_for(written(job, plan), *BOTH_RUN, a_stray())
    assert (again.events, again.status) == ((), plan.status)


def test_a_second_stray_pod_is_reported_too():
    job = a_running_job(stray_pods=("copy",))
    plan = plan_for(job, *BOTH_RUN, a_stray(), a_stray(name="another"))
    assert plan.status.stray_pods == ("another", "copy")
    assert len(plan.events) == 1


def test_a_stray_pod_that_is_gone_is_no_longer_listed():
    plan = plan_for(a_running_job(stray_pods=("copy",)), *BOTH_RUN)
    assert (plan.status.stray_pods, plan.events) == ((), ())


def test_many_stray_pods_are_listed_in_part():
    strays = [a_stray(name=f"copy-{number:02}") for number in range(50)]
    plan = plan_for(a_running_job(), *BOTH_RUN, *strays)
    assert len(plan.status.stray_pods) == 10
    assert plan.status.stray_pods == tuple(sorted(plan.status.stray_pods))


def test_a_stray_pod_of_a_finished_job_is_neither_deleted_nor_counted():
    job = a_finished_job(cleanPodPolicy="All")
    plan = plan_for(job, *BOTH_SUCCEEDED, a_stray(0, running()))
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    assert plan.status.pods.active == 0


def test_a_pod_beyond_the_gang_is_an_older_pod_once_a_larger_attempt_begins():
    # It has the name of a pod of the operator, and it holds a node.
    job = a_running_job(attempt=1, latched=False, ran=False)
    plan = plan_for(job, a_pod(7, running(), attempt=0))
    assert (plan.new_pods, deleted_pods(plan)) == ((), ["digits-0-7"])


# A status behind its pods

ATTEMPT_3 = (a_pod(0, running(), attempt=3), a_pod(1, running(), attempt=3))


def test_before_the_api_server_has_confirmed_it_a_status_that_is_behind_is_left_alone():
    for job in (a_job(), a_running_job(attempt=2, generation=7)):
        plan = plan_for(job, *ATTEMPT_3)
        assert plan.status == job.status
        assert (plan.new_pods, plan.delete, plan.events, plan.wake_after) == ((), (), (), None)


def recovered(job, *pods):
    return plan_for(job, *pods, is_current=True)


def test_a_job_whose_status_was_wiped_goes_on_with_its_newest_attempt():
    plan = recovered(a_job(), *ATTEMPT_3)
    assert (plan.status.attempt.number, plan.status.attempt.latched) == (3, True)
    assert (plan.new_pods, plan.delete, plan.wake_after) == ((), (), 0)
    assert plan.status.reason == Reason.STATUS_RECOVERED
    assert plan.status.start_time == NOW
    assert plan.status.resolved.rendezvous == "n0000-a3.digits:29406"


def test_a_recovery_is_reported_by_one_event_and_happens_once():
    plan = recovered(a_job(), *ATTEMPT_3)
    (event,) = plan.events
    assert (event.kind, event.reason) == ("Warning", "StatusRecovered")
    assert event.message == (
        "the status was deleted or replaced by an older one; the job continues with attempt 3, the "
        "newest that has pods"
    )
    again = recovered(written(a_job(), plan), *ATTEMPT_3)
    assert (again.status.phase, again.status.attempt.number) == (Phase.RUNNING, 3)
    assert [event.reason for event in again.events] == ["Running"]


def test_a_recovery_costs_no_budget_and_keeps_what_an_old_status_has():
    job = a_running_job(attempt=1, failures=2, disruptions=1, attempts=(EndedAttempt(0),))
    plan = recovered(job, *ATTEMPT_3)
    assert plan.status.attempt.number == 3
    assert budgets_used(plan) == (2, 1)
    assert plan.status.attempts == (EndedAttempt(0),)


def test_a_pod_that_is_missing_after_a_recovery_was_lost():
    job = written(a_job(), recovered(a_job(), ATTEMPT_3[0]))
    plan = plan_for(job, ATTEMPT_3[0])
    assert (plan.status.attempt.number, budgets_used(plan)) == (4, (0, 1))
    assert plan.confirm == ("digits-3-1",)


def test_a_recovered_gang_has_at_least_the_nodes_of_its_pods():
    pods = [a_pod(index, running(), attempt=3) for index in range(4)]
    plan = recovered(a_job(nodes=2), *pods)
    assert plan.status.pods.desired == 4


def test_a_recovered_gang_may_complete():
    pods = [a_pod(index, succeeded(), attempt=3) for index in range(2)]
    job = written(a_job(), recovered(a_job(), *pods))
    assert plan_for(job, *pods).status.has(Condition.COMPLETE)


def test_older_pods_are_still_waited_for_after_a_recovery():
    older = a_pod(0, running(), attempt=2)
    job = written(a_job(), recovered(a_job(), older, *ATTEMPT_3))
    assert plan_for(job, older, *ATTEMPT_3).status.reason == Reason.WAITING_FOR_OLD_PODS


def test_pods_of_a_recovered_attempt_get_their_own_grace_period():
    # Whether they have trained is not known.
    older = a_pod(0, running(), attempt=2)
    job = written(a_job(), recovered(a_job(), older, *ATTEMPT_3))
    assert [delete.grace for delete in plan_for(job, older, *ATTEMPT_3).delete] == [None]


def test_a_job_that_is_suspended_when_its_status_is_wiped_is_suspended_again():
    job = a_job(suspend=True)
    job = written(job, recovered(job, *ATTEMPT_3))
    plan = plan_for(job, *ATTEMPT_3)
    assert plan.status.phase == Phase.SUSPENDED
    assert deleted_pods(plan) == ["digits-3-0", "digits-3-1"]


def test_the_startup_and_the_active_time_begin_anew_after_a_wipe():
    pods = a_pod(0, running(), attempt=3), a_pod(1, waiting(), attempt=3)
    plan = plan_for(a_job(), *pods, is_current=True, now=at(50))
    assert plan.status.active_since == plan.status.attempt.starting_since == at(50)


def test_pods_that_survive_a_wipe_get_time_for_a_checkpoint():
    first = a_pod(0, running(), attempt=3)
    job = written(a_job(), plan_for(a_job(), first, is_current=True))
    plan = plan_for(job, first)
    assert [(delete.name, delete.grace) for delete in plan.delete] == [("digits-3-0", None)]
    # The next look at the ending pod does not shorten its time either.
    again = plan_for(written(job, plan), first)
    assert [delete.grace for delete in again.delete] == [None]


def test_a_status_from_a_suspension_does_not_end_the_attempt_that_runs():
    suspended = a_job(status=a_status(attempt=1, conditions=a_condition(Condition.SUSPENDED)))
    job = written(suspended, plan_for(suspended, *ATTEMPT_3, is_current=True))
    plan = plan_for(job, *ATTEMPT_3)
    assert (plan.status.attempt.number, plan.status.phase, plan.delete) == (3, Phase.RUNNING, ())


@pytest.mark.parametrize("kind", [Condition.COMPLETE, Condition.FAILED])
def test_a_finished_job_stays_finished_whatever_pods_it_has(kind):
    plan = plan_for(a_finished_job(kind), *ATTEMPT_3, is_current=True)
    assert plan.status.has(kind)
    assert (plan.new_pods, plan.events, plan.status.attempt.number) == ((), (), 0)
    assert deleted_pods(plan) == ["digits-3-0", "digits-3-1"]


def test_an_ended_pod_of_a_wiped_attempt_is_judged():
    pods = a_pod(0, running(), attempt=3), a_pod(1, failed(torchrun_summary(1)), attempt=3)
    job = written(a_job(), recovered(a_job(), *pods))
    plan = plan_for(job, *pods)
    assert (plan.status.attempt.number, budgets_used(plan)) == (4, (1, 0))


def test_the_running_condition_is_right_again_after_a_recovery():
    old = a_status(attempt=1)
    job = a_job(status=old)
    pods = ATTEMPT_3[0], a_pod(1, None, attempt=3)
    job = written(job, recovered(job, *pods))
    status = plan_for(job, *pods).status
    assert condition(status, Condition.RUNNING)["status"] == "False"
    assert status.phase == Phase.STARTING


def test_an_undecided_failure_whose_pod_is_gone_is_forgotten():
    job = a_running_job(latched=False, undecided_since=NOW)
    assert plan_for(job, a_pod(0, running()), now=at(20)).status.attempt.undecided_since is None
