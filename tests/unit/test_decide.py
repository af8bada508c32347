"""What becomes of a job: each rule of `decide`, and each row of the table of causes."""

from dataclasses import replace

import pytest
from builders import (
    NOW,
    a_follower,
    a_job,
    a_pod,
    a_running_job,
    a_starting_job,
    a_status,
    a_summary,
    at,
    condition,
    deleted,
    disruption_target,
    ended,
    evicted,
    failed,
    look,
    oom_killed,
    refused_by_kubelet,
    running,
    seen,
    succeeded,
    then,
    torchrun_tail,
    trainer,
    unschedulable,
    waiting,
    with_sidecar,
)

from ddpjob.core.decide import BROKEN_GANG_GRACE, NEVER_RAN_GRACE, RULES, decide
from ddpjob.core.names import Condition, Phase, Reason
from ddpjob.core.observe import Refusal
from ddpjob.core.plan import Delete
from ddpjob.core.status import Backoff, Status, is_transition, set_condition
from ddpjob.core.times import format_time

OWN = a_summary(rank=1)
FOLLOWER = a_follower(rank=0)


def a_finished_job(kind=Condition.COMPLETE, **fields):
    conditions = set_condition((), kind, True, "Done", "done", NOW)
    return a_job(status=a_status(conditions=conditions, phase=str(kind)), **fields)


def test_the_rules_stand_in_the_order_that_the_design_gives_them():
    assert [rule.__name__ for rule in RULES] == [
        "deleted",
        "job_is_stale",
        "finished",
        "first_attempt",
        "stale_attempts_pods",
        "all_succeeded",
        "resized",
        "attempt_ended",
        "start",
        "steady",
    ]


# --- deleted, stale, finished


def test_nothing_is_done_for_a_job_that_is_being_deleted():
    plan = look(a_running_job(spec={"deleting": True}), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert (plan.create, plan.delete, plan.events, plan.wake_after) == ((), (), (), None)
    assert plan.status.attempt == 0


def test_nothing_is_done_for_a_deleted_job_that_cannot_be_read():
    assert look(a_job(image="", deleting=True)).status.phase == ""


def test_pods_of_an_unknown_attempt_mean_that_the_job_is_stale():
    plan = look(a_running_job(), a_pod(0, running(), attempt=1))
    assert (plan.create, plan.delete, plan.events) == ((), (), ())
    assert plan.status.attempt == 0


def test_pods_of_a_job_without_status_mean_that_the_job_is_stale():
    assert look(a_job(), a_pod(0, running())).create == ()


@pytest.mark.parametrize("kind", [Condition.COMPLETE, Condition.FAILED])
def test_finished_is_final(kind):
    plan = look(a_finished_job(kind))
    assert (plan.create, plan.delete, plan.events, plan.wake_after) == ((), (), (), None)


@pytest.mark.parametrize("kind", [Condition.COMPLETE, Condition.FAILED])
def test_a_finished_job_is_not_restarted_by_another_number_of_nodes(kind):
    plan = look(a_finished_job(kind, nodes=5, generation=2))
    assert plan.create == ()
    assert plan.status.attempt == 0


def test_what_still_runs_of_a_finished_job_is_deleted_and_what_has_ended_stays():
    plan = look(a_finished_job(), a_pod(0, running()), a_pod(1, succeeded()))
    assert deleted(plan) == ["digits-0-0"]


def test_a_finished_job_keeps_up_with_its_generation():
    status = look(a_finished_job(generation=7)).status
    assert status.observed_generation == 7
    assert condition(status, "Complete")["observedGeneration"] == 7


def test_a_spec_that_cannot_be_read_is_said_and_nothing_is_touched():
    """The CRD is newer than the operator, in the middle of an upgrade: a running job runs on."""
    job = a_job(status=a_status(), suspend=False)
    plan = look(job, a_pod(0, running()), a_pod(1, running()))
    assert not plan.status.finished
    assert plan.status.reason == Reason.INVALID_SPEC
    assert "suspend" in plan.status.message
    assert (plan.create, plan.delete, plan.events) == ((), (), ())


def test_a_finished_job_that_cannot_be_read_any_more_stays_as_it_is():
    plan = look(a_finished_job(image=""))
    assert (plan.status.phase, plan.events, plan.delete) == ("Complete", (), ())


# --- the first attempt, start


def test_a_new_job_creates_all_pods_of_attempt_0_at_once():
    plan = look(a_job(nodes=3))
    assert plan.create == (0, 1, 2)
    assert plan.status.attempt == 0
    assert plan.status.attempt_started is None
    assert plan.status.phase == Phase.STARTING


def test_a_new_job_says_what_was_resolved():
    status = look(a_job(nodes=3, accelerator="trn1.32xlarge")).status
    assert dict(status.resolved) == {
        "nprocPerNode": 32,
        "worldSize": 96,
        "accelerator": "trn1.32xlarge",
        "rendezvous": "a0-n0.digits:29400",
    }
    assert status.start_time == status.attempt_time == NOW


def test_before_the_latch_a_missing_pod_is_created():
    assert look(a_starting_job(), a_pod(0, running())).create == (1,)


def test_a_pod_that_went_before_the_latch_costs_nothing():
    plan = look(a_starting_job(), a_pod(1, running()))
    assert plan.create == (0,)
    assert (plan.status.restarts, plan.status.disruptions) == (0, 0)


def test_seeing_every_pod_latches_the_attempt():
    status = look(a_starting_job(), a_pod(0), a_pod(1)).status
    assert status.attempt_started == 0


def test_seeing_only_some_pods_does_not_latch():
    assert look(a_starting_job(), a_pod(0)).status.attempt_started is None


def test_every_pod_seen_latches_also_while_an_end_is_undecided():
    plan = look(a_starting_job(), a_pod(0, running()), a_pod(1, failed("", when=NOW)), now=at(1))
    assert plan.status.attempt == 0
    assert plan.status.attempt_started == 0


def test_after_the_latch_a_missing_pod_is_a_disruption_and_never_refilled():
    plan = look(a_running_job(), a_pod(0, running()))
    assert plan.create == ()
    assert (plan.status.attempt, plan.status.disruptions, plan.status.restarts) == (1, 1, 0)
    assert plan.status.last_failure["pod"] == "digits-0-1"


def test_a_node_that_is_done_needs_its_pod_no_more():
    job = a_running_job()
    once = look(job, a_pod(0, running()), a_pod(1, succeeded()))
    plan = look(then(job, once), a_pod(0, running()))
    assert (plan.create, plan.delete, plan.confirm, plan.events) == ((), (), (), ())
    assert (plan.status.disruptions, plan.status.phase) == (0, Phase.RUNNING)
    assert plan.status.to_dict()["nodesReady"] == "2/2"
    assert plan.status == once.status


def test_a_node_that_is_done_is_not_made_again_before_the_latch():
    job = a_starting_job(nodes=3)
    once = look(job, a_pod(0, running()), a_pod(1, succeeded()))
    assert look(then(job, once), a_pod(0, running())).create == (2,)


def test_a_new_attempt_needs_every_node_again():
    job = a_running_job(succeeded_nodes=(1,), result={"accuracy": "0.9"})
    plan = look(job, a_pod(0, failed(OWN)))
    assert (plan.status.attempt, plan.status.restarts) == (1, 1)
    assert (plan.status.succeeded_nodes, plan.status.result) == ((), {})
    assert look(then(job, plan)).create == (0, 1)


def test_a_failed_job_has_neither_a_result_nor_nodes_that_are_done():
    job = a_running_job(
        succeeded_nodes=(0,), result={"accuracy": "0.9"}, spec={"failurePolicy": {"maxRestarts": 0}}
    )
    status = look(job, a_pod(0, succeeded('{"accuracy": 0.9}')), a_pod(1, failed(OWN))).status
    assert status.has(Condition.FAILED)
    assert (status.succeeded_nodes, status.result, status.pods.succeeded) == ((), {}, 1)


def test_only_a_vanished_pod_has_to_be_confirmed():
    vanished = look(a_running_job(), a_pod(0, running()))
    dead = look(a_running_job(), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert vanished.confirm == ("digits-0-1",)
    assert dead.confirm == ()


def test_every_vanished_pod_has_to_be_confirmed():
    assert look(a_running_job()).confirm == ("digits-0-0", "digits-0-1")


# --- what keeps pods from being created


def refused(reason, message="no", wait=7.0, final=False):
    return Refusal(reason, message, at(wait), final)


@pytest.mark.parametrize(
    "reason",
    [
        Reason.QUOTA,
        Reason.POD_SECURITY,
        Reason.NAME_IN_USE,
        Reason.NAMESPACE_ENDING,
        Reason.FORBIDDEN,
    ],
)
def test_a_refusal_is_told_and_tried_again_later(reason):
    plan = look(a_starting_job(), refusal=refused(reason, "the sentence of the API server"))
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, reason)
    assert plan.status.message == "the sentence of the API server"
    assert (plan.create, plan.wake_after) == ((), 7.0)


def test_a_refusal_is_told_on_a_job_that_is_quite_new():
    plan = look(a_job(), refusal=refused(Reason.NAME_IN_USE))
    assert (plan.status.attempt, plan.status.reason, plan.create) == (0, Reason.NAME_IN_USE, ())


def test_after_a_refusal_creating_is_tried_again_when_it_is_time():
    plan = look(a_starting_job(), a_pod(0), now=at(7), refusal=refused(Reason.QUOTA))
    assert plan.create == (1,)
    assert plan.status.reason == Reason.QUOTA


def test_a_refusal_that_is_over_is_not_told_any_more():
    told = then(a_starting_job(), look(a_starting_job(), refusal=refused(Reason.QUOTA)))
    assert look(told).status.reason == Reason.CREATING_PODS


def test_the_back_off_counts_also_after_a_refusal():
    waiting_job = a_job(
        status=a_status(attempt=2, latched=False, ran=False, backoff=Backoff(2, at(200)))
    )
    plan = look(waiting_job, now=at(10), refusal=refused(Reason.QUOTA))
    assert (plan.create, plan.status.reason) == ((), Reason.BACK_OFF)


@pytest.mark.parametrize(
    ("counts", "gone"), [("count/pods", (0, 1, 2)), ("pods", (0,)), ("requests.cpu", (0,))]
)
def test_only_a_quota_that_counts_ended_pods_takes_the_logs_of_the_last_attempts(counts, gone):
    job = a_job(status=a_status(attempt=3, latched=False, last_failure={"attempt": 1}))
    ended = [a_pod(0, failed(OWN), attempt=attempt) for attempt in range(3)]
    words = f"exceeded quota: gangs, requested: {counts}=1, used: {counts}=2, limited: {counts}=2"
    plan = look(job, *ended, now=at(7), refusal=refused(Reason.QUOTA, words))
    assert plan.create == (0, 1)
    assert [delete.name for delete in plan.delete] == [f"digits-{attempt}-0" for attempt in gone]


def test_an_invalid_pod_fails_the_job_with_the_api_servers_sentence():
    sentence = 'Pod "digits-0-0" is invalid: spec.containers[0].image: Required value'
    plan = look(a_starting_job(), refusal=refused(Reason.INVALID_POD, sentence, final=True))
    assert plan.status.has(Condition.FAILED)
    assert (plan.status.reason, plan.status.message) == (Reason.INVALID_POD, sentence)
    assert plan.create == ()


def test_a_refusal_does_not_hide_that_the_gang_has_died():
    job = a_starting_job()
    plan = look(job, a_pod(0, failed(OWN)), refusal=refused(Reason.QUOTA))
    assert plan.status.attempt == 1


# --- what keeps pods from starting


def test_an_unschedulable_pod_is_told_while_it_lasts():
    plan = look(
        a_starting_job(), a_pod(0, running()), a_pod(1, unschedulable("0/3 nodes are available"))
    )
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.UNSCHEDULABLE)
    assert "digits-0-1: 0/3 nodes are available" in plan.status.message
    later = look(then(a_starting_job(), plan), a_pod(0, running()), a_pod(1, running()))
    assert later.status.reason == Reason.NODES_RUNNING


def test_an_image_that_cannot_be_pulled_is_told_and_costs_nothing():
    plan = look(
        a_starting_job(),
        a_pod(0, running()),
        a_pod(1, waiting("ImagePullBackOff", "Back-off pulling x")),
    )
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.IMAGE_PULL)
    assert "Back-off pulling x" in plan.status.message
    assert plan.status.attempt == 0


def test_any_other_reason_to_wait_is_told_in_its_own_word():
    plan = look(
        a_starting_job(),
        a_pod(0),
        a_pod(1, waiting("CreateContainerConfigError", "secret not found")),
    )
    assert plan.status.reason == "CreateContainerConfigError"


def test_a_starting_pod_is_named_with_its_node():
    status = look(a_starting_job(), a_pod(0, running()), a_pod(1, waiting())).status
    assert (status.phase, status.reason) == (Phase.STARTING, Reason.STARTING)
    assert (
        status.message
        == "1 of 2 nodes run; digits-0-1 on node node-1 is being set up (kubectl describe it for more)"
    )


# --- running


def test_a_job_is_running_when_every_node_is():
    status = look(a_starting_job(), a_pod(0, running()), a_pod(1, running())).status
    assert (status.phase, status.reason) == (Phase.RUNNING, Reason.NODES_RUNNING)
    assert status.has(Condition.RUNNING)
    assert status.to_dict()["nodesReady"] == "2/2"


def test_a_job_of_which_a_part_runs_is_not_running():
    status = look(a_starting_job(), a_pod(0, running()), a_pod(1)).status
    assert condition(status, "Running")["status"] == "False"
    assert status.to_dict()["nodesReady"] == "1/2"


def test_running_is_told_by_one_event():
    job, pods = a_starting_job(), (a_pod(0, running()), a_pod(1, running()))
    first = look(job, *pods)
    again = look(then(job, first), *pods)
    assert [event.reason for event in first.events] == ["Running"]
    assert again.events == ()


def test_a_node_that_is_done_before_the_others_still_counts_as_up():
    status = look(a_running_job(), a_pod(0, running()), a_pod(1, succeeded())).status
    assert status.phase == Phase.RUNNING
    assert status.to_dict()["nodesReady"] == "2/2"
    assert (status.pods.active, status.pods.ready, status.pods.succeeded) == (1, 1, 1)


def test_a_steady_job_waits_for_something_to_happen():
    assert look(a_running_job(), a_pod(0, running()), a_pod(1, running())).wake_after is None


# --- the end: complete


def test_a_job_is_complete_when_every_trainer_has_ended_with_0():
    plan = look(a_running_job(), a_pod(0, succeeded()), a_pod(1, succeeded()), now=at(90))
    assert plan.status.phase == Phase.COMPLETE
    assert plan.status.has(Condition.COMPLETE)
    assert not plan.status.has(Condition.RUNNING)
    assert plan.status.completion_time == at(90)
    assert plan.status.message == "all 2 nodes succeeded after 90 s, 0 restarts"
    assert [(event.kind, event.reason) for event in plan.events] == [("Normal", "Complete")]


def test_the_result_is_what_rank_0_left():
    pods = (
        a_pod(0, succeeded('{"accuracy": 0.91, "note": "fine"}')),
        a_pod(1, succeeded('{"accuracy": 0}')),
    )
    assert dict(look(a_running_job(), *pods).status.result) == {"accuracy": "0.91", "note": "fine"}


def test_the_result_and_the_end_outlive_the_pods():
    job = a_running_job()
    job = then(job, look(job, a_pod(0, succeeded('{"accuracy": 0.91}')), a_pod(1, running())))
    status = look(job, a_pod(1, succeeded())).status
    assert status.has(Condition.COMPLETE)
    assert (dict(status.result), status.pods.succeeded, status.succeeded_nodes) == (
        {"accuracy": "0.91"},
        2,
        (),
    )


@pytest.mark.parametrize("message", ["", "the tail of a log", "[1, 2]", "{broken", "[" * 4000])
def test_a_last_word_that_is_no_result_is_none(message):
    plan = look(a_running_job(), a_pod(0, succeeded(message)), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)
    assert dict(plan.status.result) == {}


def test_a_sidecar_that_never_ends_does_not_keep_a_job_from_completing():
    done = with_sidecar(succeeded())
    plan = look(a_running_job(), a_pod(0, done), a_pod(1, done))
    assert plan.status.has(Condition.COMPLETE)
    assert deleted(plan) == ["digits-0-0", "digits-0-1"]


def test_the_pods_of_a_finished_job_stay_for_their_logs_though_the_kubelet_has_yet_to_report_their_phase():
    done = succeeded(phase="Running")
    plan = look(a_running_job(), a_pod(0, done), a_pod(1, done))
    assert plan.status.has(Condition.COMPLETE)
    assert plan.delete == ()


def test_a_sidecar_that_fails_does_not_fail_a_trainer_that_succeeded():
    pods = [a_pod(i, succeeded(phase="Failed")) for i in range(2)]
    assert look(a_running_job(), *pods).status.has(Condition.COMPLETE)


def test_pods_that_all_end_well_before_they_were_seen_running_are_complete():
    plan = look(a_starting_job(), a_pod(0, succeeded()), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)
    assert plan.status.attempt_started == 0


def test_a_trainer_that_ended_well_is_done_even_if_its_pod_is_being_deleted():
    plan = look(a_running_job(), a_pod(0, succeeded(), deleted_at=NOW), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)


def test_all_nodes_succeeding_outweighs_a_change_of_their_number():
    plan = look(a_running_job(spec={"nodes": 3}), a_pod(0, succeeded()), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)


# --- the end: restart or failure (one test for each row of the table of causes)


def counters(plan):
    return plan.status.restarts, plan.status.disruptions


WAYS_TO_END = {
    "a worker raised": (a_pod(1, failed(OWN)), "Failure", (1, 0)),
    "a worker exited non-zero": (a_pod(1, failed(torchrun_tail("exit"))), "Failure", (1, 0)),
    "a worker was killed": (a_pod(1, failed(torchrun_tail("kill"))), "Failure", (1, 0)),
    "a container ran out of memory": (a_pod(1, oom_killed()), "Failure", (1, 0)),
    "a pod was deleted": (a_pod(1, running(), deleted_at=NOW), "Disruption", (0, 1)),
    "a pod was evicted by its kubelet": (a_pod(1, evicted()), "Disruption", (0, 1)),
    "a pod was drained": (a_pod(1, failed(conditions=[disruption_target()])), "Disruption", (0, 1)),
    "a pod was preempted": (
        a_pod(
            1,
            failed(OWN, conditions=[disruption_target("PreemptionByScheduler", "preempted by x")]),
        ),
        "Disruption",
        (0, 1),
    ),
    "a kubelet refused a pod": (a_pod(1, refused_by_kubelet()), "Disruption", (0, 1)),
    "a kubelet had no room for a pod": (
        a_pod(1, refused_by_kubelet("OutOfcpu")),
        "Disruption",
        (0, 1),
    ),
}


@pytest.mark.parametrize(("pod", "cause", "counted"), WAYS_TO_END.values(), ids=WAYS_TO_END)
def test_an_attempt_ends_when(pod, cause, counted):
    plan = look(a_running_job(), a_pod(0, failed(FOLLOWER)), pod)
    assert plan.status.last_failure["cause"] == cause
    assert plan.status.last_failure["pod"] == "digits-0-1"
    assert counters(plan) == counted
    assert plan.status.attempt == 1


def test_a_restart_takes_the_whole_gang():
    plan = look(
        a_running_job(nodes=3), a_pod(0, running()), a_pod(1, failed(OWN)), a_pod(2, running())
    )
    assert deleted(plan) == ["digits-0-0", "digits-0-2"]
    assert plan.create == ()
    assert (plan.status.phase, plan.status.reason) == (Phase.RESTARTING, Reason.FAILURE)
    assert plan.status.resolved["rendezvous"] == "a1-n0.digits:29400"


def test_a_restart_is_told_by_one_event_and_its_root_cause():
    plan = look(a_running_job(), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert [(event.kind, event.reason) for event in plan.events] == [("Warning", "Restarting")]
    assert plan.status.last_failure == {
        "attempt": 0,
        "cause": "Failure",
        "node": "node-1",
        "pod": "digits-0-1",
        "rank": 1,
        "exitCode": 1,
        "reason": "WorkerFailed",
        "message": "rank 1 on node 1 ended with exit code 1: ValueError: boom",
        "time": format_time(NOW),
    }


def test_a_restart_ends_the_condition_running():
    status = look(a_running_job(), a_pod(0, running()), a_pod(1, failed(OWN)), now=at(60)).status
    assert condition(status, "Running")["status"] == "False"
    assert condition(status, "Running")["lastTransitionTime"] == format_time(at(60))


def test_a_restart_wants_another_look_at_once():
    assert look(a_running_job(), a_pod(0, running()), a_pod(1, failed(OWN))).wake_after == 0


def test_an_uncertain_end_waits_for_something_better_to_be_known():
    job = a_running_job()
    plan = look(job, a_pod(0, failed(FOLLOWER, when=at(0))), a_pod(1, running()), now=at(4))
    assert plan.status.attempt == 0
    assert (plan.status.phase, plan.status.pods.failed) == (Phase.RUNNING, 1)
    assert plan.wake_after == 6
    assert plan.events == ()


def test_after_a_while_an_uncertain_end_is_judged_as_it_is():
    plan = look(a_running_job(), a_pod(0, failed(FOLLOWER)), a_pod(1, running()), now=at(10))
    assert plan.status.restarts == 1


def test_the_budget_of_failures_ends_the_job():
    job = a_running_job(restarts=3)
    plan = look(job, a_pod(0, running()), a_pod(1, failed(OWN)))
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.MAX_RESTARTS
    assert plan.status.message == (
        "rank 1 on node 1 ended with exit code 1: ValueError: boom; no restart is left of maxRestarts=3"
    )
    assert (plan.status.attempt, plan.status.restarts) == (0, 3)
    assert [(event.kind, event.reason) for event in plan.events] == [("Warning", "Failed")]
    assert deleted(plan) == ["digits-0-0"]


def test_the_budget_of_disruptions_ends_the_job():
    plan = look(a_running_job(disruptions=20), a_pod(0, running()))
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.MAX_DISRUPTIONS
    assert plan.confirm == ("digits-0-1",)


def test_each_budget_counts_only_its_own():
    plan = look(a_running_job(restarts=3), a_pod(0, running()))
    assert plan.status.attempt == 1
    plan = look(a_running_job(disruptions=20), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert plan.status.attempt == 1


def test_a_budget_of_0_restarts_nothing():
    job = a_running_job(spec={"failurePolicy": {"maxRestarts": 0}})
    assert look(job, a_pod(0, running()), a_pod(1, failed(OWN))).status.has(Condition.FAILED)


def test_a_budget_that_was_raised_meanwhile_counts():
    job = a_running_job(restarts=3, spec={"failurePolicy": {"maxRestarts": 4}})
    assert look(job, a_pod(0, running()), a_pod(1, failed(OWN))).status.restarts == 4


def test_a_failed_job_says_why_in_status_and_condition():
    status = look(
        a_running_job(restarts=3), a_pod(0, running()), a_pod(1, failed(OWN)), now=at(5)
    ).status
    assert condition(status, "Failed")["reason"] == "MaxRestartsExceeded"
    assert condition(status, "Running")["status"] == "False"
    assert status.completion_time == at(5)
    assert status.last_failure["rank"] == 1


def test_a_rendezvous_that_not_every_pod_reached_costs_nothing():
    late = a_pod(1, unschedulable())
    plan = look(
        a_running_job(ran=False),
        a_pod(0, failed(torchrun_tail("rendezvous-timeout"))),
        late,
        now=at(4000),
    )
    assert plan.status.last_failure["cause"] == "Rendezvous"
    assert plan.status.reason == Reason.RENDEZVOUS_TIMEOUT
    assert (plan.status.attempt, *counters(plan)) == (1, 0, 0)


def test_a_rendezvous_that_waited_for_a_pod_refused_by_quota_costs_nothing():
    refusal = Refusal(Reason.QUOTA, "exceeded quota", at(4060))
    alone = a_pod(0, failed(torchrun_tail("rendezvous-timeout")))
    plan = look(a_starting_job(), alone, now=at(4000), refusal=refusal)
    assert plan.status.last_failure["cause"] == "Rendezvous"
    assert (plan.status.attempt, *counters(plan)) == (1, 0, 0)


# --- back-off


def test_attempts_in_a_row_that_die_young_wait_longer_and_longer():
    job, now, delays = a_running_job(spec={"failurePolicy": {"maxRestarts": 100}}), NOW, []
    for attempt in range(9):
        dead = [a_pod(i, failed(a_summary(i), when=now), attempt=attempt) for i in range(2)]
        job = then(job, look(job, *dead, now=now))
        delays.append((job.status.backoff.until - now).total_seconds())
        now = job.status.backoff.until  # the next attempt dies as soon as it may begin
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_an_attempt_that_lived_long_starts_the_count_anew():
    job = a_running_job(backoff=Backoff(4, at(0)))
    plan = look(job, a_pod(0, running()), a_pod(1, failed(OWN)), now=at(300))
    assert plan.status.backoff == Backoff()


def test_nothing_is_created_before_the_back_off_is_over():
    waiting_job = a_job(
        status=a_status(attempt=2, latched=False, ran=False, backoff=Backoff(2, at(10)))
    )
    plan = look(waiting_job, now=at(4))
    assert (plan.create, plan.wake_after) == ((), 6)
    assert (plan.status.phase, plan.status.reason) == (Phase.RESTARTING, Reason.BACK_OFF)
    assert plan.status.message == "attempt 2 starts at 2026-11-21T12:00:10Z: 2 died young"
    assert look(waiting_job, now=at(10)).create == (0, 1)


def test_the_first_young_death_waits_for_nothing():
    job = a_running_job()
    job = then(job, look(job, a_pod(0, failed(FOLLOWER)), a_pod(1, failed(OWN))))
    assert look(job, a_pod(0, failed(FOLLOWER)), a_pod(1, failed(OWN))).create == (0, 1)


# --- another number of nodes


def test_another_number_of_nodes_is_a_new_attempt_that_costs_nothing():
    plan = look(
        a_running_job(spec={"nodes": 4, "generation": 2}), a_pod(0, running()), a_pod(1, running())
    )
    assert (plan.status.attempt, *counters(plan)) == (1, 0, 0)
    assert plan.status.pods.desired == 4
    assert plan.status.resolved["worldSize"] == 4
    assert deleted(plan) == ["digits-0-0", "digits-0-1"]
    assert [(event.kind, event.reason) for event in plan.events] == [("Normal", "Resized")]


def test_another_number_of_nodes_does_not_wait():
    plan = look(
        a_running_job(spec={"nodes": 4}, backoff=Backoff(3, NOW)),
        a_pod(0, running()),
        a_pod(1, running()),
    )
    assert plan.status.backoff == Backoff()
    assert look(then(a_job(nodes=4), plan)).create == (0, 1, 2, 3)


def test_another_number_of_nodes_before_any_pod_was_made_is_simply_that_number():
    job = a_job(nodes=2)
    plan = look(then(a_job(nodes=3), look(job)))
    assert plan.status.pods.desired == 3
    assert look(then(a_job(nodes=3), plan)).create == (0, 1, 2)


# --- the pods of older attempts


def test_a_new_attempt_waits_for_the_last_pod_of_the_old_one_by_name_and_node():
    job = a_starting_job(attempt=1)
    plan = look(job, a_pod(0, running(), deleted_at=NOW), a_pod(1, running(), deleted_at=NOW))
    assert plan.create == ()
    assert (plan.status.phase, plan.status.reason) == (
        Phase.RESTARTING,
        Reason.WAITING_FOR_OLD_PODS,
    )
    assert (
        plan.status.message
        == "attempt 1 starts when pod digits-0-0 on node node-0 and 1 more has ended"
    )
    assert plan.delete == ()


def test_old_pods_that_nobody_deleted_yet_are_deleted():
    """The operator died between the status and the deletes."""
    plan = look(a_starting_job(attempt=1), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert deleted(plan) == ["digits-0-0"]


def test_an_old_pod_whose_sidecar_still_runs_is_waited_for():
    plan = look(a_starting_job(attempt=1), a_pod(0, with_sidecar(failed(OWN))))
    assert plan.create == ()
    assert deleted(plan) == ["digits-0-0"]


def test_the_ended_pods_of_the_last_attempt_stay_for_their_logs_and_older_ones_go():
    old = a_pod(0, failed(OWN), attempt=0), a_pod(1, failed(OWN), attempt=1)
    plan = look(a_starting_job(attempt=2), *old)
    assert plan.create == (0, 1)
    assert plan.delete == (Delete("digits-0-0", "uid-of-digits-0-0", None),)


def test_the_pods_that_last_failure_tells_of_stay_though_the_job_was_resized_since():
    told = {"attempt": 0, "cause": "Failure", "pod": "digits-0-0"}
    job = a_job(status=a_status(attempt=2, latched=False, ran=False, last_failure=told))
    plan = look(job, a_pod(0, failed(OWN), attempt=0), a_pod(1, failed(), attempt=1))
    assert (plan.create, plan.delete) == ((0, 1), ())


def test_deletes_carry_the_uid():
    plan = look(a_running_job(), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert plan.delete[0].uid == "uid-of-digits-0-0"


def test_a_gang_that_was_broken_by_a_failure_gets_little_time():
    plan = look(a_running_job(), a_pod(0, running()), a_pod(1, failed(OWN)))
    assert plan.delete[0].grace == BROKEN_GANG_GRACE


def test_a_gang_that_never_ran_gets_little_time_also_when_it_is_told_again():
    new = replace(a_status(nodes=2, latched=False, ran=False), conditions=())
    job = a_job(nodes=3, status=new)
    job = then(job, look(job, a_pod(0, waiting("ContainerCreating"))))
    assert job.status.attempt == 1
    assert [
        delete.grace for delete in look(job, a_pod(0, waiting("ContainerCreating"))).delete
    ] == [NEVER_RAN_GRACE]


def test_a_gang_that_lost_a_pod_gets_its_own_time_to_checkpoint():
    plan = look(a_running_job(), a_pod(0, running()), a_pod(1, running(), deleted_at=NOW))
    assert plan.delete[0].grace is None


def test_a_gang_that_never_ran_gets_hardly_any_time():
    plan = look(a_running_job(ran=False), a_pod(0, running()), a_pod(1, refused_by_kubelet()))
    assert plan.delete[0].grace == NEVER_RAN_GRACE


def test_a_failure_of_an_older_attempt_does_not_shorten_the_time_of_a_resized_gang():
    job = a_running_job(
        attempt=1, spec={"nodes": 4}, last_failure={"attempt": 0, "cause": "Failure"}
    )
    plan = look(job, a_pod(0, running(), attempt=1), a_pod(1, running(), attempt=1))
    assert [delete.grace for delete in plan.delete] == [None, None]


@pytest.mark.parametrize(
    ("job", "pods", "grace"),
    [
        (a_running_job(spec={"nodes": 4}), [a_pod(0, running()), a_pod(1, running())], None),
        (a_running_job(), [a_pod(0, running()), a_pod(1, running(), deleted_at=NOW)], None),
        (a_running_job(), [a_pod(0, running()), a_pod(1, failed(OWN))], BROKEN_GANG_GRACE),
        (
            a_running_job(ran=False),
            [a_pod(0, running()), a_pod(1, refused_by_kubelet())],
            NEVER_RAN_GRACE,
        ),
    ],
    ids=["resized", "disrupted", "broken", "never ran"],
)
def test_an_operator_that_died_before_the_deletes_gives_the_pods_as_much_time_as_it_had_meant(
    job, pods, grace
):
    meant = look(job, *pods, now=at(30))
    again = look(then(job, meant), *pods, now=at(31))
    assert meant.delete[0].grace == grace
    assert again.delete == meant.delete


# --- on every write


EVERY_KIND_OF_PLAN = {
    "new": (a_job(generation=5), ()),
    "running": (a_running_job(spec={"generation": 5}), (a_pod(0, running()), a_pod(1, running()))),
    "restart": (
        a_running_job(spec={"generation": 5}),
        (a_pod(0, running()), a_pod(1, failed(OWN))),
    ),
    "complete": (
        a_running_job(spec={"generation": 5}),
        (a_pod(0, succeeded()), a_pod(1, succeeded())),
    ),
    "unreadable": (a_job(image="", generation=5), ()),
    "finished": (a_finished_job(generation=5), ()),
}


@pytest.mark.parametrize(("job", "pods"), EVERY_KIND_OF_PLAN.values(), ids=EVERY_KIND_OF_PLAN)
def test_the_observed_generation_is_on_the_status_and_on_each_condition(job, pods):
    status = look(job, *pods).status
    assert status.observed_generation == 5
    assert all(c["observedGeneration"] == 5 for c in status.conditions)


@pytest.mark.parametrize(("job", "pods"), EVERY_KIND_OF_PLAN.values(), ids=EVERY_KIND_OF_PLAN)
def test_a_second_look_at_the_same_thing_tells_no_event_twice(job, pods):
    assert look(then(job, look(job, *pods)), *pods).events == ()


@pytest.mark.parametrize(("job", "pods"), EVERY_KIND_OF_PLAN.values(), ids=EVERY_KIND_OF_PLAN)
def test_a_job_always_says_why(job, pods):
    status = look(job, *pods).status
    assert status.reason
    assert status.message or job.status.finished


def test_very_long_words_are_cut():
    plan = look(a_starting_job(), refusal=Refusal(Reason.INVALID_POD, "x" * 5000, NOW, final=True))
    assert len(plan.status.message) == 1024
    assert len(condition(plan.status, "Failed")["message"]) == 1024
    assert all(len(event.message) == 1024 for event in plan.events)


# --- what has to be written at once


def test_counts_and_words_are_progress():
    old = look(a_starting_job(), a_pod(0, waiting()), a_pod(1, waiting())).status
    new = look(a_starting_job(), a_pod(0, running()), a_pod(1, waiting())).status
    assert old != new
    assert not is_transition(old, new)


def test_a_node_that_is_done_and_its_result_are_progress():
    old = look(a_running_job(), a_pod(0, running()), a_pod(1, running())).status
    new = look(a_running_job(), a_pod(0, succeeded('{"a": 1}')), a_pod(1, running())).status
    assert (new.succeeded_nodes, dict(new.result)) == ((0,), {"a": "1"})
    assert not is_transition(old, new)


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        (a_job(), []),
        (a_starting_job(), [a_pod(0), a_pod(1)]),
        (a_starting_job(), [a_pod(0, running()), a_pod(1, running())]),
        (a_starting_job(), [a_pod(0), a_pod(1, unschedulable())]),
        (a_running_job(), [a_pod(0, running())]),
        (a_running_job(spec={"nodes": 3}), [a_pod(0, running()), a_pod(1, running())]),
        (a_running_job(), [a_pod(0, succeeded()), a_pod(1, succeeded())]),
    ],
    ids=["begins", "latches", "runs", "is blocked", "restarts", "is resized", "completes"],
)
def test_it_is_a_transition_when_a_job(job, pods):
    assert is_transition(job.status, look(job, *pods).status)


def test_nothing_new_is_no_transition():
    job = a_running_job()
    assert not is_transition(job.status, job.status)


# --- odd worlds


@pytest.mark.parametrize(
    "status",
    [
        {"attempt": 0},
        {"attempt": 3, "attemptStarted": 7},
        {"attemptStarted": 0},
        {"attempt": 0, "nodes": {"desired": 0}},
        {"attempt": 1, "conditions": [{"type": "Running"}]},
        {
            "attempt": 0,
            "conditions": [{"type": "Running", "status": "False"}],
            "nodes": {"desired": 2},
        },
        {"backoff": {"count": "x", "until": "yesterday"}},
        {"conditions": 5, "nodes": [], "resolved": "x", "lastFailure": 1, "result": ["x"]},
        {"attempt": 0, "nodes": {"desired": 2}, "succeededNodes": [0, "1", None, 7]},
    ],
)
def test_no_status_makes_it_raise(status):
    job = a_job()
    job = type(job)(**{**vars(job), "status": Status.from_dict(status)})
    for pods in ([], [a_pod(0, running())], [a_pod(0, failed(OWN)), a_pod(1)]):
        decide(seen(job, *pods), NOW)


def test_two_pods_of_one_index_do_not_complete_a_job_of_two_nodes():
    twin = a_pod(0, succeeded())
    twin["metadata"] = {**twin["metadata"], "uid": "another", "name": "twin"}
    plan = look(a_starting_job(), a_pod(0, succeeded()), twin)
    assert not plan.status.has(Condition.COMPLETE)
    assert plan.create == (1,)


def test_a_pod_that_ended_without_its_trainer_is_a_disruption():
    lost = {"phase": "Failed", **trainer({"running": {}})}
    plan = look(a_running_job(), a_pod(0, running()), a_pod(1, lost))
    assert counters(plan) == (0, 1)


def test_a_phase_that_nobody_knows_counts_as_not_started():
    status = look(
        a_starting_job(), a_pod(0, {"phase": "Unknown"}), a_pod(1, {"phase": "Strange"})
    ).status
    assert status.phase == Phase.STARTING


def test_an_exit_code_that_means_sigterm_waits_for_the_sign_of_who_took_the_pod():
    interrupted = a_pod(1, ended(143, a_summary(code=-15)))
    assert look(a_running_job(), a_pod(0, running()), interrupted, now=at(1)).status.attempt == 0
