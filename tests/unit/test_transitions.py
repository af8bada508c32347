"""How the status of a job, and its pods, change: start, completion, restart, back-off, resize."""

from dataclasses import replace

import pytest
from builders.containers import failed, running, succeeded, waiting
from builders.jobs import WHAT_TO_DO, a_job, a_running_job, a_starting_job, a_status, condition
from builders.messages import FAILURE, FOLLOWER, torchrun_summary
from builders.plans import budgets_used, deleted_pods, plan_for, written
from builders.pods import a_pod
from builders.surroundings import rejected_by_kubelet, unschedulable
from builders.times import NOW, at

from ddpjob.core.api.history import Backoff, LastFailure
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.times import format_time
from ddpjob.core.decide.deletions import BROKEN_GANG_GRACE, NEVER_RAN_GRACE

ALL_RUNNING = (a_pod(0, running()), a_pod(1, running()))
ONE_FAILED = (a_pod(0, running()), a_pod(1, failed(FAILURE)))


# Starting


def test_an_unschedulable_pod_is_reported_while_it_lasts():
    job = a_starting_job()
    pods = a_pod(0, running()), a_pod(1, unschedulable("0/3 nodes are available"))
    plan = plan_for(job, *pods)
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.UNSCHEDULABLE)
    assert plan.status.message == ("1 of 2 pods cannot start; digits-0-1: 0/3 nodes are available")
    later = plan_for(written(job, plan), *ALL_RUNNING)
    assert later.status.reason == Reason.NODES_RUNNING


def test_an_image_that_cannot_be_pulled_is_reported_and_costs_no_budget():
    pods = a_pod(0, running()), a_pod(1, waiting("ImagePullBackOff", "Back-off pulling x"))
    plan = plan_for(a_starting_job(), *pods)
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.IMAGE_PULL)
    assert "Back-off pulling x" in plan.status.message
    assert plan.status.attempt.number == 0


def test_any_other_reason_of_a_waiting_container_is_reported_unchanged():
    pods = a_pod(0), a_pod(1, waiting("CreateContainerConfigError", "secret not found"))
    plan = plan_for(a_starting_job(), *pods)
    assert plan.status.reason == "CreateContainerConfigError"


def test_a_starting_pod_is_named_with_its_kubernetes_node():
    status = plan_for(a_starting_job(), a_pod(0, running()), a_pod(1, waiting())).status
    assert (status.phase, status.reason) == (Phase.STARTING, Reason.STARTING)
    assert status.message == (
        "1 of 2 nodes are ready; pod digits-0-1 is starting on node-1 "
        "(for details: kubectl -n ml describe pod digits-0-1)"
    )


def test_a_pod_without_a_kubernetes_node_is_not_scheduled_yet():
    status = plan_for(a_starting_job(), a_pod(0, running()), a_pod(1)).status
    assert status.message == (
        "1 of 2 nodes are ready; pod digits-0-1 is not scheduled yet "
        "(for details: kubectl -n ml describe pod digits-0-1)"
    )


# Running


def test_a_job_is_running_when_every_node_runs():
    status = plan_for(a_starting_job(), *ALL_RUNNING).status
    assert (status.phase, status.reason) == (Phase.RUNNING, Reason.NODES_RUNNING)
    assert status.message == "attempt 0 runs on 2 nodes"
    assert status.has(Condition.RUNNING)
    assert status.to_dict()["nodesReady"] == "2/2"


def test_a_job_is_not_running_when_only_some_nodes_run():
    status = plan_for(a_starting_job(), a_pod(0, running()), a_pod(1)).status
    assert condition(status, Condition.RUNNING)["status"] == "False"
    assert status.to_dict()["nodesReady"] == "1/2"


def test_one_event_reports_that_a_job_is_running():
    job = a_starting_job()
    first = plan_for(job, *ALL_RUNNING)
    again = plan_for(written(job, first), *ALL_RUNNING)
    assert [event.reason for event in first.events] == ["Running"]
    assert again.events == ()


def test_a_node_that_succeeded_before_the_others_still_counts_as_ready():
    status = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, succeeded())).status
    assert status.phase == Phase.RUNNING
    assert status.to_dict()["nodesReady"] == "2/2"
    assert (status.pods.active, status.pods.ready, status.pods.succeeded) == (1, 1, 1)


def test_a_running_job_asks_for_no_wake_up():
    assert plan_for(a_running_job(), *ALL_RUNNING).wake_after is None


# Completion


def test_a_job_is_complete_when_every_trainer_exited_with_0():
    plan = plan_for(a_running_job(), a_pod(0, succeeded()), a_pod(1, succeeded()), now=at(90))
    assert plan.status.phase == Phase.COMPLETE
    assert plan.status.has(Condition.COMPLETE)
    assert not plan.status.has(Condition.RUNNING)
    assert plan.status.completion_time == at(90)
    assert plan.status.message == "2 nodes succeeded after 90 s and 0 restarts"
    assert [(event.kind, event.reason) for event in plan.events] == [("Normal", "Complete")]


def test_the_result_is_the_termination_message_of_rank_0():
    first = a_pod(0, succeeded('{"accuracy": 0.91, "note": "fine"}'))
    second = a_pod(1, succeeded('{"accuracy": 0}'))
    result = plan_for(a_running_job(), first, second).status.result
    assert dict(result) == {"accuracy": "0.91", "note": "fine"}


def test_the_result_and_the_success_of_a_node_are_kept_when_its_pod_is_gone():
    job = a_running_job()
    plan = plan_for(job, a_pod(0, succeeded('{"accuracy": 0.91}')), a_pod(1, running()))
    status = plan_for(written(job, plan), a_pod(1, succeeded())).status
    assert status.has(Condition.COMPLETE)
    assert dict(status.result) == {"accuracy": "0.91"}
    assert (status.pods.succeeded, status.attempt.succeeded_nodes) == (2, ())


@pytest.mark.parametrize("message", ["", "the tail of a log", "[1, 2]", "{broken", "[" * 4000])
def test_a_termination_message_that_is_no_object_gives_no_result(message):
    plan = plan_for(a_running_job(), a_pod(0, succeeded(message)), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)
    assert dict(plan.status.result) == {}


# Restart


def test_a_restart_replaces_the_whole_gang():
    pods = a_pod(0, running()), a_pod(1, failed(FAILURE)), a_pod(2, running())
    plan = plan_for(a_running_job(nodes=3), *pods)
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-2"]
    assert plan.new_pods == ()
    assert (plan.status.phase, plan.status.reason) == (Phase.RESTARTING, Reason.FAILURE)
    assert plan.status.resolved.rendezvous == "n0000-a1.digits:29402"


def test_a_restart_is_reported_by_one_event_and_by_last_failure():
    plan = plan_for(a_running_job(), *ONE_FAILED)
    (event,) = plan.events
    assert (event.kind, event.reason) == ("Warning", "Restarting")
    assert event.message == (
        "attempt 1 begins: rank 1 in pod digits-0-1 failed with exit code 1: ValueError: boom"
    )
    assert plan.status.to_dict()["lastFailure"] == {
        "attempt": 0,
        "cause": "Failure",
        "node": "node-1",
        "pod": "digits-0-1",
        "rank": 1,
        "exitCode": 1,
        "reason": "WorkerFailed",
        "message": "rank 1 in pod digits-0-1 failed with exit code 1: ValueError: boom",
        "time": format_time(NOW),
    }


def test_a_restart_sets_the_condition_running_to_false():
    status = plan_for(a_running_job(), *ONE_FAILED, now=at(60)).status
    assert condition(status, Condition.RUNNING)["status"] == "False"
    assert condition(status, Condition.RUNNING)["lastTransitionTime"] == format_time(at(60))


def test_after_a_restart_the_operator_decides_again_at_once():
    assert plan_for(a_running_job(), *ONE_FAILED).wake_after == 0


def test_a_new_attempt_needs_every_node_again():
    job = a_running_job(succeeded_nodes=(1,), result={"accuracy": "0.9"})
    plan = plan_for(job, a_pod(0, failed(FAILURE)))
    assert (plan.status.attempt.number, plan.status.restarts) == (1, 1)
    assert (plan.status.attempt.succeeded_nodes, plan.status.result) == ((), {})
    assert plan_for(written(job, plan)).new_pods == (0, 1)


# Budgets


def test_a_job_fails_when_its_restarts_are_used_up():
    plan = plan_for(a_running_job(failures=3), *ONE_FAILED)
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.MAX_RESTARTS
    assert plan.status.message == (
        "rank 1 in pod digits-0-1 failed with exit code 1: ValueError: boom; "
        f"maxRestarts=3 is used up; {WHAT_TO_DO}"
    )
    assert (plan.status.attempt.number, plan.status.restarts) == (0, 3)
    assert [(event.kind, event.reason) for event in plan.events] == [("Warning", "Failed")]
    assert deleted_pods(plan) == ["digits-0-0"]


def test_a_failed_job_with_checkpoints_says_that_it_resumes():
    spec = {"checkpoint": {"claimName": "runs"}}
    plan = plan_for(a_running_job(failures=3, spec=spec), *ONE_FAILED)
    assert "(ddpjob retry digits): the job resumes from its last checkpoint." in plan.status.message


def test_what_to_do_follows_a_message_that_ends_with_a_full_stop():
    job = a_running_job(spec={"startupDeadlineSeconds": 1}, ran=False, starting_since=at(-9))
    plan = plan_for(job, a_pod(0, running()), a_pod(1, unschedulable("0/3 nodes fit.")))
    assert f"0/3 nodes fit; {WHAT_TO_DO}" in plan.status.message


def test_a_long_message_does_not_cut_off_what_to_do():
    pods = (
        a_pod(0, running()),
        a_pod(1, failed(torchrun_summary(1, error="ValueError: " + 900 * "x"))),
    )
    plan = plan_for(a_running_job(failures=3), *pods)
    assert len(plan.status.message) <= 1024
    assert plan.status.message.endswith(WHAT_TO_DO)


def test_a_job_fails_when_its_disruptions_are_used_up():
    plan = plan_for(a_running_job(disruptions=20), a_pod(0, running()))
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.MAX_DISRUPTIONS
    assert plan.status.message == (
        "pod digits-0-1 is gone: it was deleted, or its Kubernetes node was removed; "
        f"maxDisruptions=20 is used up; {WHAT_TO_DO}"
    )
    assert plan.confirm == ("digits-0-1",)


def test_a_used_up_budget_does_not_limit_the_other_one():
    plan = plan_for(a_running_job(failures=3), a_pod(0, running()))
    assert plan.status.attempt.number == 1
    plan = plan_for(a_running_job(disruptions=20), *ONE_FAILED)
    assert plan.status.attempt.number == 1


def test_with_max_restarts_0_the_first_failure_fails_the_job():
    job = a_running_job(spec={"failurePolicy": {"maxRestarts": 0}})
    assert plan_for(job, *ONE_FAILED).status.has(Condition.FAILED)


def test_a_budget_that_was_raised_meanwhile_is_used():
    job = a_running_job(failures=3, spec={"failurePolicy": {"maxRestarts": 4}})
    assert plan_for(job, *ONE_FAILED).status.restarts == 4


def test_a_failed_job_has_the_reason_in_its_status_and_its_condition():
    status = plan_for(a_running_job(failures=3), *ONE_FAILED, now=at(5)).status
    assert condition(status, Condition.FAILED)["reason"] == "MaxRestartsExceeded"
    assert condition(status, Condition.RUNNING)["status"] == "False"
    assert status.completion_time == at(5)
    assert status.last_failure.rank == 1


def test_a_failed_job_has_neither_a_result_nor_succeeded_nodes():
    job = a_running_job(
        succeeded_nodes=(0,),
        result={"accuracy": "0.9"},
        spec={"failurePolicy": {"maxRestarts": 0}},
    )
    pods = a_pod(0, succeeded('{"accuracy": 0.9}')), a_pod(1, failed(FAILURE))
    status = plan_for(job, *pods).status
    assert status.has(Condition.FAILED)
    assert (status.attempt.succeeded_nodes, status.result, status.pods.succeeded) == ((), {}, 1)


# Back-off


def test_the_back_off_grows_with_each_attempt_in_a_row_that_fails_early():
    job = a_running_job(spec={"failurePolicy": {"maxRestarts": 100}})
    now = NOW
    delays = []
    for attempt in range(9):
        pods = []
        for index in range(2):
            status = failed(torchrun_summary(index), when=now)
            pods.append(a_pod(index, status, attempt=attempt))
        job = written(job, plan_for(job, *pods, now=now))
        delays.append((job.status.backoff.until - now).total_seconds())
        # The next attempt fails as soon as it may begin.
        now = job.status.backoff.until
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_an_attempt_that_did_not_fail_early_resets_the_back_off():
    job = a_running_job(backoff=Backoff(4, at(0)))
    assert plan_for(job, *ONE_FAILED, now=at(300)).status.backoff == Backoff()


def test_no_pod_is_created_before_the_back_off_is_over():
    status = a_status(attempt=2, latched=False, ran=False, backoff=Backoff(2, at(10)))
    job = a_job(status=status)
    plan = plan_for(job, now=at(4))
    assert (plan.new_pods, plan.wake_after) == ((), 6)
    assert (plan.status.phase, plan.status.reason) == (Phase.RESTARTING, Reason.BACK_OFF)
    assert plan.status.message == (
        "backing off for 10 s before attempt 2: the last 2 failed attempts trained for less than 5 "
        "minutes"
    )
    assert plan_for(job, now=at(10)).new_pods == (0, 1)


@pytest.mark.parametrize("now", [10, 11])
def test_the_pods_are_created_when_the_back_off_is_over(now):
    status = a_status(attempt=2, latched=False, ran=False, backoff=Backoff(2, at(10)))
    assert plan_for(a_job(status=status), now=at(now)).new_pods == (0, 1)


def test_the_first_early_failure_costs_no_wait():
    job = a_running_job()
    pods = a_pod(0, failed(FOLLOWER)), a_pod(1, failed(FAILURE))
    job = written(job, plan_for(job, *pods))
    assert plan_for(job, *pods).new_pods == (0, 1)


# Another number of nodes


def test_another_number_of_nodes_begins_an_attempt_that_costs_no_budget():
    plan = plan_for(a_running_job(spec={"nodes": 4}, generation=2), *ALL_RUNNING)
    assert plan.status.attempt.number == 1
    assert budgets_used(plan) == (0, 0)
    assert plan.status.pods.desired == 4
    assert plan.status.resolved.world_size == 4
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    (event,) = plan.events
    assert (event.kind, event.reason) == ("Normal", "Resized")
    assert event.message == "attempt 1 begins: nodes changed from 2 to 4"
    assert plan.status.message == "nodes changed from 2 to 4"


@pytest.mark.parametrize("nodes", [1, 3])
def test_more_and_fewer_nodes_begin_an_attempt_of_that_size(nodes):
    plan = plan_for(a_running_job(spec={"nodes": nodes}), *ALL_RUNNING)
    assert (plan.status.attempt.number, plan.status.pods.desired) == (1, nodes)


def test_the_back_off_goes_on_with_another_number_of_nodes():
    job = a_running_job(spec={"nodes": 4}, backoff=Backoff(3, NOW))
    plan = plan_for(job, *ALL_RUNNING)
    assert plan.status.backoff == Backoff(3, NOW)
    assert plan_for(written(a_job(nodes=4), plan)).new_pods == (0, 1, 2, 3)


def test_a_failure_at_the_look_that_also_sees_another_number_of_nodes_is_counted():
    job = a_running_job(spec={"nodes": 4})
    status = plan_for(job, *ONE_FAILED).status
    assert (status.budget.failures, status.pods.desired) == (1, 4)
    assert (status.reason, status.last_failure.pod) == (Reason.FAILURE, "digits-0-1")


def test_a_failure_that_is_not_certain_yet_does_not_delay_another_number_of_nodes():
    job = a_running_job(spec={"nodes": 4})
    status = plan_for(job, a_pod(0, failed(FOLLOWER)), a_pod(1, running())).status
    assert (status.reason, status.budget.failures, status.pods.desired) == (Reason.RESIZED, 0, 4)


def test_the_number_of_nodes_can_change_before_any_pod_was_created():
    changed = a_job(nodes=3)
    plan = plan_for(written(changed, plan_for(a_job(nodes=2))))
    assert plan.status.pods.desired == 3
    assert plan_for(written(changed, plan)).new_pods == (0, 1, 2)


# Deletions and their grace periods


def test_a_pod_is_deleted_by_its_uid():
    plan = plan_for(a_running_job(), *ONE_FAILED)
    assert plan.delete[0].uid == "uid-of-digits-0-0"


def test_a_gang_that_a_failure_broke_gets_a_short_grace_period():
    plan = plan_for(a_running_job(), *ONE_FAILED)
    assert plan.delete[0].grace == BROKEN_GANG_GRACE


def test_a_gang_that_lost_a_pod_gets_its_own_grace_period_to_write_a_checkpoint():
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, running(), deleted_at=NOW))
    assert plan.delete[0].grace is None


def test_a_gang_that_never_ran_gets_the_shortest_grace_period():
    pods = a_pod(0, running()), a_pod(1, rejected_by_kubelet())
    plan = plan_for(a_running_job(ran=False), *pods)
    assert plan.delete[0].grace == NEVER_RAN_GRACE


def test_a_gang_that_never_ran_gets_the_shortest_grace_period_also_in_the_next_plan():
    status = replace(a_status(latched=False, ran=False), conditions=())
    job = a_job(nodes=3, status=status)
    pod = a_pod(0, waiting("ContainerCreating"))
    job = written(job, plan_for(job, pod))
    assert job.status.attempt.number == 1
    assert [delete.grace for delete in plan_for(job, pod).delete] == [NEVER_RAN_GRACE]


def test_a_failure_of_an_older_attempt_does_not_shorten_the_grace_period_of_a_resized_gang():
    last_failure = LastFailure(0, "Failure")
    job = a_running_job(attempt=1, spec={"nodes": 4}, last_failure=last_failure)
    plan = plan_for(job, *(a_pod(index, running(), attempt=1) for index in range(2)))
    assert [delete.grace for delete in plan.delete] == [None, None]


@pytest.mark.parametrize(
    ("job", "pods", "grace"),
    [
        (a_running_job(spec={"nodes": 4}), ALL_RUNNING, None),
        (a_running_job(), (a_pod(0, running()), a_pod(1, running(), deleted_at=NOW)), None),
        (a_running_job(), ONE_FAILED, BROKEN_GANG_GRACE),
        (
            a_running_job(ran=False),
            (a_pod(0, running()), a_pod(1, rejected_by_kubelet())),
            NEVER_RAN_GRACE,
        ),
    ],
    ids=["resized", "disrupted", "broken", "never ran"],
)
def test_an_operator_that_stopped_before_the_deletions_deletes_with_the_same_grace(
    job, pods, grace
):
    first = plan_for(job, *pods, now=at(30))
    again = plan_for(written(job, first), *pods, now=at(31))
    assert first.delete[0].grace == grace
    assert again.delete == first.delete


@pytest.mark.parametrize(("ran", "grace"), [(True, None), (False, NEVER_RAN_GRACE)])
def test_the_grace_period_of_older_pods_depends_on_whether_their_attempt_ran(ran, grace):
    status = a_status(attempt=1, latched=False, ran=False, previous_ran=ran)
    plan = plan_for(a_job(status=status), a_pod(0, running()))
    assert [delete.grace for delete in plan.delete] == [grace]


def test_older_pods_of_a_failed_attempt_get_a_short_grace_period_though_it_ran():
    last_failure = LastFailure(0, "Failure")
    status = a_status(
        attempt=1,
        latched=False,
        ran=False,
        previous_ran=True,
        last_failure=last_failure,
    )
    plan = plan_for(a_job(status=status), a_pod(0, running()))
    assert [delete.grace for delete in plan.delete] == [BROKEN_GANG_GRACE]


@pytest.mark.parametrize("ran", [True, False])
def test_a_new_attempt_records_whether_the_previous_one_ran(ran):
    job = a_running_job(spec={"nodes": 4}, ran=ran)
    pods = a_pod(0, running()), a_pod(1, waiting("ContainerCreating"))
    assert plan_for(job, *pods).status.attempt.previous_ran is ran


@pytest.mark.parametrize("change", [{"nodes": 4}, {"suspend": True}, {}])
def test_a_gang_that_began_to_run_while_no_operator_was_there_may_write_a_checkpoint(change):
    pods = a_pod(0, running(), deleted_at=NOW), a_pod(1, running())
    plan = plan_for(a_running_job(spec=change, ran=False), *pods)
    assert [(delete.name, delete.grace) for delete in plan.delete] == [("digits-0-1", None)]


def test_pods_that_still_train_keep_their_grace_period_over_a_suspension():
    # Deletions are refused: attempt 0 trains on while attempt 1 never began.
    old = a_pod(0, running())
    status = a_status(attempt=1, latched=False, ran=False, previous_ran=True)
    suspended = a_job(status=status, suspend=True)
    suspended = written(suspended, plan_for(suspended, old))
    resumed = a_job(status=suspended.status)
    resumed = written(resumed, plan_for(resumed, old))
    plan = plan_for(resumed, old)
    assert (plan.status.attempt.number, [delete.grace for delete in plan.delete]) == (2, [None])


def test_the_record_of_the_previous_attempt_lasts_for_one_attempt():
    # Attempt 0 ran, attempt 1 did not.
    job = a_running_job(attempt=1, ran=False, previous_ran=True, spec={"nodes": 4})
    plan = plan_for(job, *(a_pod(index, waiting(), attempt=1) for index in range(2)))
    assert plan.status.attempt.number == 2
    assert plan.status.attempt.previous_ran is False
