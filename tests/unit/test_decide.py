"""Each rule of `decide`: when it applies, and what the plan then is."""

from dataclasses import replace

import pytest
from builders.containers import (
    ended,
    failed,
    oom_killed,
    running,
    succeeded,
    trainer_status,
    with_sidecar,
)
from builders.jobs import (
    WHAT_TO_DO,
    a_finished_job,
    a_job,
    a_running_job,
    a_starting_job,
    a_status,
    condition,
)
from builders.messages import FAILURE, FOLLOWER, torchrun_summary, torchrun_tail
from builders.plans import (
    budgets_used,
    deleted_pods,
    observation,
    plan_for,
    restarts_by_budget,
    written,
)
from builders.pods import a_pod
from builders.surroundings import (
    disruption_target,
    evicted,
    rejected_by_kubelet,
    shut_down,
    unschedulable,
)
from builders.times import NOW, at

from ddpjob.core.api.history import Backoff, LastFailure
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status, is_transition
from ddpjob.core.decide.rules import RULES, decide
from ddpjob.core.observe.observation import Refusal
from ddpjob.core.plan import MAX_MESSAGE, Delete, Event


def nothing_changes(plan):
    return (plan.new_pods, plan.delete, plan.events) == ((), (), ())


def test_the_rules_have_the_order_of_the_design():
    assert [rule.__name__ for rule in RULES] == [
        "status_is_behind",
        "job_is_taken_up_again",
        "job_is_finished",
        "all_nodes_succeeded",
        "default_queue_takes_the_job",
        "job_may_not_run",
        "active_deadline_is_over",
        "job_is_new",
        "job_is_resumed",
        "older_pods_still_run",
        "nodes_were_changed",
        "queue_has_replaced_a_node",
        "attempt_failed",
        "gang_is_silent",
        "startup_deadline_is_over",
        "older_gang_needs_room",
        "pods_are_not_created",
        "all_pods_exist",
    ]


# The job is being deleted, stale, finished or unreadable


def test_a_job_that_is_being_deleted_is_left_alone():
    pods = a_pod(0, running()), a_pod(1, failed(FAILURE))
    plan = plan_for(a_running_job(deleting=True), *pods)
    assert nothing_changes(plan)
    assert plan.wake_after is None
    assert plan.status.attempt.number == 0


def test_a_job_that_is_being_deleted_is_left_alone_even_if_its_spec_is_invalid():
    assert plan_for(a_job(image="", deleting=True)).status.phase == ""


def test_a_job_is_stale_if_there_is_a_pod_of_an_unknown_attempt():
    plan = plan_for(a_running_job(), a_pod(0, running(), attempt=1))
    assert nothing_changes(plan)
    assert plan.status.attempt.number == 0


def test_a_job_is_stale_if_it_has_pods_but_no_status():
    assert plan_for(a_job(), a_pod(0, running())).new_pods == ()


@pytest.mark.parametrize("kind", [Condition.COMPLETE, Condition.FAILED])
def test_a_finished_job_does_not_change(kind):
    plan = plan_for(a_finished_job(kind))
    assert nothing_changes(plan)
    assert plan.wake_after is None


@pytest.mark.parametrize("kind", [Condition.COMPLETE, Condition.FAILED])
def test_a_finished_job_is_not_restarted_by_another_number_of_nodes(kind):
    plan = plan_for(a_finished_job(kind, nodes=5, generation=2))
    assert plan.new_pods == ()
    assert plan.status.attempt.number == 0


def test_running_pods_of_a_finished_job_are_deleted_and_ended_ones_are_kept():
    plan = plan_for(a_finished_job(), a_pod(0, running()), a_pod(1, succeeded()))
    assert deleted_pods(plan) == ["digits-0-0"]


def test_a_finished_job_observes_a_new_generation():
    status = plan_for(a_finished_job(generation=7)).status
    assert status.observed_generation == 7
    assert condition(status, Condition.COMPLETE)["observedGeneration"] == 7


def test_an_unreadable_spec_is_reported_and_running_pods_are_kept():
    # In the middle of an upgrade the CRD is newer than the operator.
    job = a_job(status=a_status(), nodes="two")
    plan = plan_for(job, a_pod(0, running()), a_pod(1, running()))
    assert not plan.status.finished
    assert (plan.status.phase, plan.status.reason) == (Phase.RUNNING, Reason.INVALID_SPEC)
    assert plan.status.message == (
        'spec.nodes: must be an integer from 1 to 1000, got "two". The CRD and the operator have '
        "different versions: upgrade the older one."
    )
    assert nothing_changes(plan)


def test_a_finished_job_with_an_unreadable_spec_does_not_change():
    plan = plan_for(a_finished_job(image=""))
    assert (plan.status.phase, plan.events, plan.delete) == ("Complete", (), ())


# Fields of the spec unknown to this version

UNKNOWN_FIELDS = Event(
    "Warning",
    "UnknownFields",
    "ignored unknown fields: spec.later. The CRD is newer than the operator: upgrade the "
    "operator to use them.",
)


def test_unknown_fields_are_ignored_and_reported_by_one_event():
    job = a_job(later=False)
    plan = plan_for(job)
    assert plan.new_pods == (0, 1)
    assert plan.status.ignored_fields == ("spec.later",)
    assert plan.events == (UNKNOWN_FIELDS,)
    assert plan_for(written(job, plan)).events == ()


def test_unknown_fields_of_a_job_at_rest_are_reported_once():
    # An upgrade of the CRD gives a running job a new field by its default.
    job = a_running_job(spec={"later": False})
    pods = a_pod(0, running()), a_pod(1, running())
    plan = plan_for(job, *pods)
    assert plan.events == (UNKNOWN_FIELDS,)
    assert (plan.new_pods, plan.delete, plan.status.attempt.number) == ((), (), 0)
    assert is_transition(job.status, plan.status)
    again = plan_for(written(job, plan), *pods)
    assert again.events == ()
    assert again.status == plan.status


def test_devices_that_are_not_used_are_reported_when_the_job_begins():
    job = a_job(resources={"limits": {"nvidia.com/gpu": "1"}})
    plan = plan_for(job)
    assert [event.reason for event in plan.events] == ["DevicesNotUsed"]
    again = plan_for(written(job, plan))
    assert again.events == ()


def test_unknown_fields_are_reported_beside_another_event():
    job = a_running_job(spec={"later": False})
    plan = plan_for(job, a_pod(0, running()), a_pod(1, failed(FAILURE)))
    assert [event.reason for event in plan.events] == ["Restarting", "UnknownFields"]
    assert plan.status.ignored_fields == ("spec.later",)


def test_further_unknown_fields_are_listed_without_a_second_event():
    job = a_running_job(spec={"later": False, "ttl": 5}, ignored_fields=("spec.later",))
    plan = plan_for(job, a_pod(0, running()), a_pod(1, running()))
    assert plan.status.ignored_fields == ("spec.later", "spec.ttl")
    assert plan.events == ()


def test_fields_that_are_known_again_are_no_longer_listed():
    job = a_running_job(ignored_fields=("spec.later",))
    plan = plan_for(job, a_pod(0, running()), a_pod(1, running()))
    assert plan.status.ignored_fields == ()
    assert plan.events == ()


@pytest.mark.parametrize("kind", [Condition.COMPLETE, Condition.FAILED])
def test_unknown_fields_of_a_finished_job_are_not_reported(kind):
    plan = plan_for(a_finished_job(kind, later=False))
    assert plan.events == ()
    assert plan.status.ignored_fields == ()


def test_unknown_fields_of_a_job_that_is_being_deleted_are_not_reported():
    plan = plan_for(a_running_job(spec={"later": False}, deleting=True))
    assert plan.events == ()
    assert plan.status.ignored_fields == ()


def test_a_list_of_unknown_fields_that_is_too_long_for_an_event_is_cut():
    plan = plan_for(a_job(**{f"field{number}": 1 for number in range(200)}))
    assert len(plan.events[0].message) == MAX_MESSAGE
    assert len(plan.status.ignored_fields) == 200


# The job is new


def test_a_new_job_creates_all_pods_of_attempt_0_at_once():
    plan = plan_for(a_job(nodes=3))
    assert plan.new_pods == (0, 1, 2)
    assert plan.status.attempt.number == 0
    assert not plan.status.attempt.latched
    assert plan.status.phase == Phase.STARTING
    assert plan.status.message == "creating 3 pods of attempt 0"


def test_the_status_of_a_new_job_has_what_was_resolved():
    status = plan_for(a_job(nodes=3, accelerator="trn1.32xlarge")).status
    assert status.to_dict()["resolved"] == {
        "nprocPerNode": 32,
        "worldSize": 96,
        "accelerator": "trn1.32xlarge",
        "rendezvous": "n0000-a0.digits:29400",
    }
    assert status.start_time == status.attempt.start == NOW


# The latch


def test_before_the_latch_a_missing_pod_is_created():
    assert plan_for(a_starting_job(), a_pod(0, running())).new_pods == (1,)


def test_a_pod_that_is_gone_before_the_latch_costs_no_budget():
    plan = plan_for(a_starting_job(), a_pod(1, running()))
    assert plan.new_pods == (0,)
    assert budgets_used(plan) == (0, 0)


def test_an_attempt_is_latched_when_every_pod_was_seen():
    assert plan_for(a_starting_job(), a_pod(0), a_pod(1)).status.attempt.latched


def test_an_attempt_is_not_latched_when_only_some_pods_were_seen():
    assert not plan_for(a_starting_job(), a_pod(0)).status.attempt.latched


def test_an_attempt_is_latched_also_while_a_verdict_is_undecided():
    pods = a_pod(0, running()), a_pod(1, failed("", when=NOW))
    plan = plan_for(a_starting_job(), *pods, now=at(1))
    assert plan.status.attempt.number == 0
    assert plan.status.attempt.latched


def test_after_the_latch_a_missing_pod_is_a_disruption_and_is_not_created_again():
    plan = plan_for(a_running_job(), a_pod(0, running()))
    assert plan.new_pods == ()
    assert plan.status.attempt.number == 1
    assert budgets_used(plan) == (0, 1)
    assert plan.status.last_failure.pod == "digits-0-1"


def test_a_node_that_succeeded_does_not_need_its_pod_any_more():
    job = a_running_job()
    first = plan_for(job, a_pod(0, running()), a_pod(1, succeeded()))
    plan = plan_for(written(job, first), a_pod(0, running()))
    assert nothing_changes(plan)
    assert plan.confirm == ()
    assert (plan.status.budget.disruptions, plan.status.phase) == (0, Phase.RUNNING)
    assert plan.status.to_dict()["nodesReady"] == "2/2"
    assert plan.status == first.status


def test_a_node_that_succeeded_before_the_latch_is_not_created_again():
    job = a_starting_job(nodes=3)
    first = plan_for(job, a_pod(0, running()), a_pod(1, succeeded()))
    assert plan_for(written(job, first), a_pod(0, running())).new_pods == (2,)


def test_only_missing_pods_must_be_confirmed_to_be_gone():
    missing = plan_for(a_running_job(), a_pod(0, running()))
    broken = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, failed(FAILURE)))
    assert missing.confirm == ("digits-0-1",)
    assert broken.confirm == ()


def test_every_missing_pod_must_be_confirmed_to_be_gone():
    assert plan_for(a_running_job()).confirm == ("digits-0-0", "digits-0-1")


# The API server refuses pods


def a_refusal(reason, message="no", *, final=False, counts_ended_pods=False):
    """Return a refusal with the next try in 7 s."""
    return Refusal(reason, message, at(7), final, counts_ended_pods)


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
def test_a_refusal_is_reported_and_retried_later(reason):
    plan = plan_for(a_starting_job(), refusal=a_refusal(reason, "the API server's message"))
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, reason)
    assert plan.status.message == "the API server's message"
    assert (plan.new_pods, plan.wake_after) == ((), 7.0)


def test_a_refusal_is_reported_on_a_new_job():
    plan = plan_for(a_job(), refusal=a_refusal(Reason.NAME_IN_USE))
    assert (plan.status.attempt.number, plan.status.reason) == (0, Reason.NAME_IN_USE)
    assert plan.new_pods == ()


@pytest.mark.parametrize("now", [7, 8])
def test_the_refused_pods_are_created_again_when_the_wait_is_over(now):
    plan = plan_for(a_starting_job(), a_pod(0), now=at(now), refusal=a_refusal(Reason.QUOTA))
    assert plan.new_pods == (1,)
    assert plan.status.reason == Reason.QUOTA


def test_a_refusal_from_before_the_clock_was_set_back_does_not_delay_the_next_try():
    refusal = replace(a_refusal(Reason.QUOTA), retry_at=at(7200))
    plan = plan_for(a_starting_job(), a_pod(0), refusal=refusal)
    assert plan.new_pods == (1,)


def test_a_refusal_that_is_over_is_no_longer_reported():
    job = a_starting_job()
    job = written(job, plan_for(job, refusal=a_refusal(Reason.QUOTA)))
    assert plan_for(job).status.reason == Reason.CREATING_PODS


def test_the_back_off_of_the_attempt_comes_before_a_refusal():
    status = a_status(attempt=2, latched=False, ran=False, backoff=Backoff(2, at(200)))
    plan = plan_for(a_job(status=status), now=at(10), refusal=a_refusal(Reason.QUOTA))
    assert (plan.new_pods, plan.status.reason) == ((), Reason.BACK_OFF)


@pytest.mark.parametrize(("counts_ended_pods", "deleted"), [(True, (0, 1, 2)), (False, (0,))])
def test_ended_pods_are_deleted_only_if_the_quota_counts_them(counts_ended_pods, deleted):
    status = a_status(attempt=3, latched=False, last_failure=LastFailure(1))
    pods = [a_pod(0, failed(FAILURE), attempt=attempt) for attempt in range(3)]
    refusal = a_refusal(Reason.QUOTA, counts_ended_pods=counts_ended_pods)
    plan = plan_for(a_job(status=status), *pods, now=at(7), refusal=refusal)
    assert plan.new_pods == (0, 1)
    assert deleted_pods(plan) == [f"digits-{attempt}-0" for attempt in deleted]


def test_an_invalid_pod_fails_the_job_with_the_message_of_the_api_server():
    message = 'Pod "digits-0-0" is invalid: spec.containers[0].image: Required value'
    refusal = a_refusal(Reason.INVALID_POD, message, final=True)
    plan = plan_for(a_starting_job(), refusal=refusal)
    assert plan.status.has(Condition.FAILED)
    assert plan.status.reason == Reason.INVALID_POD
    assert plan.status.message == f"{message}; {WHAT_TO_DO}"
    assert plan.new_pods == ()


@pytest.mark.parametrize(
    ("status", "pods"),
    [
        # Its pods ran before, and a node was drained.
        (a_status(attempt=3, latched=False), ()),
        # Another pod of the attempt was accepted.
        (a_status(attempt=0, latched=False), (a_pod(0, running()),)),
    ],
    ids=["ran", "accepted"],
)
def test_an_invalid_pod_of_a_job_that_had_pods_is_tried_again(status, pods):
    message = 'spec.containers[1].name: Invalid value: "Side_Car"'
    refusal = a_refusal(Reason.INVALID_POD, message, final=True)
    plan = plan_for(a_job(status=status), *pods, refusal=refusal)
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.INVALID_POD)
    assert plan.status.message == message
    assert (plan.new_pods, plan.wake_after) == ((), 7)
    later = plan_for(a_job(status=plan.status), *pods, refusal=refusal, now=at(7))
    assert later.new_pods


def test_a_job_had_pods_from_the_first_look_at_one_of_them():
    # Its Kubernetes node goes before the next pod is refused for good.
    first = plan_for(a_job(status=a_status(ran=False, latched=False)), a_pod(0, running()))
    assert first.status.attempt.had_pods
    refusal = a_refusal(Reason.INVALID_POD, "denied", final=True)
    plan = plan_for(a_job(status=first.status), refusal=refusal, now=at(7))
    assert plan.status.phase == Phase.PENDING


def test_a_missing_pod_is_confirmed_whatever_else_has_failed():
    # A pod with changed labels is not in the cache. Its trainer still runs.
    plan = plan_for(a_running_job(), a_pod(0, failed(FAILURE)))
    assert (plan.status.attempt.number, plan.confirm) == (1, ("digits-0-1",))
    both = a_pod(0, failed(FAILURE)), a_pod(1, running())
    assert plan_for(a_running_job(), *both).confirm == ()


def test_a_failed_attempt_comes_before_a_refusal():
    pod = a_pod(0, failed(FAILURE))
    plan = plan_for(a_starting_job(), pod, refusal=a_refusal(Reason.QUOTA))
    assert plan.status.attempt.number == 1


# All nodes succeeded


def test_a_sidecar_that_never_ends_does_not_keep_a_job_from_completing():
    status = with_sidecar(succeeded())
    plan = plan_for(a_running_job(), a_pod(0, status), a_pod(1, status))
    assert plan.status.has(Condition.COMPLETE)
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]


def test_pods_whose_phase_lags_behind_are_not_deleted_when_the_job_completes():
    # A kubelet reports the end of the container before the pod's phase.
    status = succeeded(phase="Running")
    plan = plan_for(a_running_job(), a_pod(0, status), a_pod(1, status))
    assert plan.status.has(Condition.COMPLETE)
    assert plan.delete == ()


def test_a_sidecar_that_fails_does_not_fail_a_trainer_that_succeeded():
    pods = [a_pod(index, succeeded(phase="Failed")) for index in range(2)]
    assert plan_for(a_running_job(), *pods).status.has(Condition.COMPLETE)


def test_a_job_completes_if_all_pods_succeeded_before_they_were_seen_running():
    plan = plan_for(a_starting_job(), a_pod(0, succeeded()), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)
    assert plan.status.attempt.latched


def test_a_trainer_succeeded_even_if_its_pod_is_being_deleted():
    pods = a_pod(0, succeeded(), deleted_at=NOW), a_pod(1, succeeded())
    assert plan_for(a_running_job(), *pods).status.has(Condition.COMPLETE)


def test_a_job_completes_even_if_its_number_of_nodes_was_changed():
    job = a_running_job(spec={"nodes": 3})
    plan = plan_for(job, a_pod(0, succeeded()), a_pod(1, succeeded()))
    assert plan.status.has(Condition.COMPLETE)


# The attempt failed: one row for each row of the table of causes in the documentation

PREEMPTED = disruption_target("PreemptionByScheduler", "preempted by x")
WAYS_TO_END = {
    "a worker raised": (a_pod(1, failed(FAILURE)), "Failure", "failures"),
    "a worker exited non-zero": (a_pod(1, failed(torchrun_tail("exit"))), "Failure", "failures"),
    "a worker was killed": (a_pod(1, failed(torchrun_tail("kill"))), "Failure", "failures"),
    "a container ran out of memory": (a_pod(1, oom_killed()), "Failure", "failures"),
    "a pod was deleted": (a_pod(1, running(), deleted_at=NOW), "Disruption", "disruptions"),
    "a pod was evicted by its kubelet": (a_pod(1, evicted()), "Disruption", "disruptions"),
    "a pod was drained": (
        a_pod(1, failed(conditions=[disruption_target()])),
        "Disruption",
        "announced",
    ),
    "a pod was preempted": (
        a_pod(1, failed(FAILURE, conditions=[PREEMPTED])),
        "Disruption",
        "announced",
    ),
    "a node shut down": (a_pod(1, shut_down()), "Disruption", "announced"),
    "a kubelet rejected a pod": (a_pod(1, rejected_by_kubelet()), "Disruption", "disruptions"),
    "a node had no room for a pod": (
        a_pod(1, rejected_by_kubelet("OutOfcpu")),
        "Disruption",
        "disruptions",
    ),
}


@pytest.mark.parametrize(("pod", "cause", "budget"), WAYS_TO_END.values(), ids=WAYS_TO_END)
def test_an_attempt_ends_when(pod, cause, budget):
    plan = plan_for(a_running_job(), a_pod(0, failed(FOLLOWER)), pod)
    assert plan.status.last_failure.cause == cause
    assert plan.status.last_failure.pod == "digits-0-1"
    assert restarts_by_budget(plan) == {budget: 1}
    assert plan.status.attempt.number == 1


def test_an_undecided_verdict_waits_for_better_evidence():
    pods = a_pod(0, failed(FOLLOWER, when=at(0))), a_pod(1, running())
    plan = plan_for(a_running_job(undecided_since=at(3)), *pods, now=at(4))
    assert plan.status.attempt.number == 0
    assert (plan.status.phase, plan.status.pods.failed) == (Phase.RUNNING, 1)
    assert plan.wake_after == 9
    assert plan.events == ()


def test_an_undecided_verdict_is_given_after_the_settle_time():
    pods = a_pod(0, failed(FOLLOWER)), a_pod(1, running())
    plan = plan_for(a_running_job(undecided_since=NOW), *pods, now=at(10))
    assert (plan.status.attempt.number, plan.status.last_failure.reason) == (1, "PeerLost")
    assert budgets_used(plan) == (0, 1)


def test_a_rendezvous_that_not_every_pod_reached_costs_no_budget():
    pods = a_pod(0, failed(torchrun_tail("rendezvous-timeout"))), a_pod(1, unschedulable())
    job = a_running_job(ran=False, undecided_since=at(3990))
    plan = plan_for(job, *pods, now=at(4000))
    assert plan.status.last_failure.cause == "Rendezvous"
    assert plan.status.reason == Reason.RENDEZVOUS_TIMEOUT
    assert plan.status.attempt.number == 1
    assert budgets_used(plan) == (0, 0)


def test_a_rendezvous_that_waited_for_a_pod_refused_by_quota_costs_no_budget():
    refusal = Refusal(Reason.QUOTA, "exceeded quota", at(4060))
    pod = a_pod(0, failed(torchrun_tail("rendezvous-timeout")))
    plan = plan_for(a_starting_job(), pod, now=at(4000), refusal=refusal)
    assert plan.status.last_failure.cause == "Rendezvous"
    assert plan.status.attempt.number == 1
    assert budgets_used(plan) == (0, 0)


def test_a_pod_that_ended_without_its_trainer_is_a_disruption():
    lost = {"phase": "Failed", **trainer_status({"running": {}})}
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, lost))
    assert budgets_used(plan) == (0, 1)


def test_the_exit_code_of_sigterm_waits_for_the_cause_of_the_deletion():
    interrupted = a_pod(1, ended(143, torchrun_summary(code=-15)))
    plan = plan_for(a_running_job(), a_pod(0, running()), interrupted, now=at(1))
    assert plan.status.attempt.number == 0


# Pods of older attempts


def test_a_new_attempt_waits_for_the_older_pods_and_names_one_with_its_node():
    pods = [a_pod(index, running(), deleted_at=NOW) for index in range(2)]
    plan = plan_for(a_starting_job(attempt=1), *pods)
    status = plan.status
    assert plan.new_pods == ()
    assert (status.phase, status.reason) == (Phase.RESTARTING, Reason.WAITING_FOR_OLD_PODS)
    assert status.message == ("attempt 1 waits for pod digits-0-0 on node node-0 and 1 more to end")
    assert plan.delete == ()


@pytest.mark.parametrize(("nodes", "more"), [(1, ""), (4, " and 3 more")])
def test_the_message_counts_the_older_pods_that_remain(nodes, more):
    pods = [a_pod(index, running(), deleted_at=NOW) for index in range(nodes)]
    status = plan_for(a_starting_job(attempt=1), *pods).status
    assert f"pod digits-0-0 on node node-0{more} to end" in status.message


def test_older_pods_that_still_run_are_deleted():
    # The operator stopped between the write of the status and the deletions.
    plan = plan_for(a_starting_job(attempt=1), a_pod(0, running()), a_pod(1, failed(FAILURE)))
    assert deleted_pods(plan) == ["digits-0-0"]


def test_a_new_attempt_waits_for_an_older_pod_whose_sidecar_still_runs():
    plan = plan_for(a_starting_job(attempt=1), a_pod(0, with_sidecar(failed(FAILURE))))
    assert plan.new_pods == ()
    assert deleted_pods(plan) == ["digits-0-0"]


def test_ended_pods_of_the_previous_attempt_are_kept_for_their_logs_and_older_ones_are_deleted():
    pods = a_pod(0, failed(FAILURE), attempt=0), a_pod(1, failed(FAILURE), attempt=1)
    plan = plan_for(a_starting_job(attempt=2), *pods)
    assert plan.new_pods == (0, 1)
    assert plan.delete == (Delete("digits-0-0", "uid-of-digits-0-0", None),)


def test_pods_of_the_last_failure_are_kept_even_if_the_job_was_resized_since():
    last_failure = LastFailure(0, "Failure", pod="digits-0-0")
    status = a_status(attempt=2, latched=False, ran=False, last_failure=last_failure)
    pods = a_pod(0, failed(FAILURE), attempt=0), a_pod(1, failed(), attempt=1)
    plan = plan_for(a_job(status=status), *pods)
    assert (plan.new_pods, plan.delete) == ((0, 1), ())


# Every plan

EVERY_KIND_OF_PLAN = {
    "new": (a_job(generation=5), ()),
    "running": (a_running_job(generation=5), (a_pod(0, running()), a_pod(1, running()))),
    "restart": (a_running_job(generation=5), (a_pod(0, running()), a_pod(1, failed(FAILURE)))),
    "complete": (a_running_job(generation=5), (a_pod(0, succeeded()), a_pod(1, succeeded()))),
    "unreadable": (a_job(image="", generation=5), ()),
    "finished": (a_finished_job(generation=5), ()),
    "unknown fields": (a_job(later=True, generation=5), ()),
}


@pytest.mark.parametrize(("job", "pods"), EVERY_KIND_OF_PLAN.values(), ids=EVERY_KIND_OF_PLAN)
def test_the_status_and_each_condition_have_the_observed_generation(job, pods):
    status = plan_for(job, *pods).status
    assert status.observed_generation == 5
    assert all(condition.observed_generation == 5 for condition in status.conditions)


@pytest.mark.parametrize(("job", "pods"), EVERY_KIND_OF_PLAN.values(), ids=EVERY_KIND_OF_PLAN)
def test_an_event_is_not_posted_again_for_the_same_observation(job, pods):
    assert plan_for(written(job, plan_for(job, *pods)), *pods).events == ()


@pytest.mark.parametrize(("job", "pods"), EVERY_KIND_OF_PLAN.values(), ids=EVERY_KIND_OF_PLAN)
def test_a_status_always_has_a_reason(job, pods):
    status = plan_for(job, *pods).status
    assert status.reason
    assert status.message or job.status.finished


def test_a_very_long_message_is_cut():
    refusal = Refusal(Reason.INVALID_POD, "x" * 5000, NOW, final=True)
    plan = plan_for(a_starting_job(), refusal=refusal)
    assert len(plan.status.message) == 1024
    assert len(condition(plan.status, Condition.FAILED)["message"]) == 1024
    assert all(len(event.message) == 1024 for event in plan.events)


# Unusual statuses and pods


@pytest.mark.parametrize(
    "status",
    [
        {"attempt": 0},
        {"attempt": {"number": 0}},
        {"attempt": {"number": 3}, "operator": {"attempt": {"births": [7, 7]}}},
        {"operator": {"attempt": {"latched": True}}},
        {"attempt": {"number": 0}, "nodes": {"desired": 0}},
        {"attempt": {"number": 1}, "conditions": [{"type": "Running"}]},
        {
            "attempt": {"number": 0},
            "conditions": [{"type": "Running", "status": "False"}],
            "nodes": {"desired": 2},
        },
        {"backoff": {"count": "x", "until": "yesterday"}},
        {"conditions": 5, "nodes": [], "resolved": "x", "lastFailure": 1, "result": ["x"]},
        {
            "attempt": {"number": 0},
            "nodes": {"desired": 2},
            "operator": {"attempt": {"succeededNodes": [0, "1", None, 7]}},
        },
        {"ignoredFields": "x", "operator": {"attempt": {"previousRan": "x"}}},
        {"operator": "x"},
    ],
)
def test_no_status_makes_decide_raise(status):
    job = replace(a_job(), status=Status.from_dict(status))
    for pods in ([], [a_pod(0, running())], [a_pod(0, failed(FAILURE)), a_pod(1)]):
        decide(observation(job, *pods), NOW)


def test_two_pods_of_one_index_do_not_complete_a_job_of_two_nodes():
    duplicate = a_pod(0, succeeded())
    duplicate["metadata"] |= {"uid": "another", "name": "duplicate"}
    plan = plan_for(a_starting_job(), a_pod(0, succeeded()), duplicate)
    assert not plan.status.has(Condition.COMPLETE)
    assert plan.new_pods == (1,)


def test_an_unknown_pod_phase_counts_as_not_started():
    pods = a_pod(0, {"phase": "Unknown"}), a_pod(1, {"phase": "Strange"})
    assert plan_for(a_starting_job(), *pods).status.phase == Phase.STARTING
