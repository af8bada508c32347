"""Recovery in place: which pods stay for the next attempt, and the consequences for each."""

import json

import pytest
from builders import jobs
from builders.containers import failed, oom_killed, running, starting, succeeded, waiting
from builders.jobs import a_status
from builders.messages import agent_report
from builders.nodes import a_node, nodes_of
from builders.plans import budgets_used, deleted_pods, plan_for, written
from builders.pods import a_pod, an_agents_pod, told
from builders.surroundings import disruption_target, not_ready
from builders.times import NOW, at

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.history import Backoff, LastFailure
from ddpjob.core.api.names import Cause, Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Host
from ddpjob.core.api.times import format_time
from ddpjob.core.decide.in_place import BROKEN_GRACE, SILENT_TIME
from ddpjob.core.plan import Assign
from ddpjob.core.render.assignment import ServiceAddresses, assignment

FAILED = failed(agent_report())
OWN_GRACE = 45


def a_running_job(*, spec=None, **fields):
    return jobs.a_running_job(spec={"recovery": "InPlace", **(spec or {})}, **fields)


def gang(*statuses):
    """Return the pods of attempt 0. They may stay."""
    return [an_agents_pod(index, status) for index, status in enumerate(statuses)]


def assigned(plan):
    return [assign.name for assign in plan.assign]


def graces(plan):
    return {assign.grace for assign in plan.assign}


def a_job_in_place(*, attempt=1, nodes=3, births=(0, 1, 0), **fields):
    """Return a job in an attempt with some pods that stayed. The attempt has not run yet."""
    fields = {"latched": False, "ran": False, "host": Host(0, "10.244.0.7"), **fields}
    return a_running_job(attempt=attempt, nodes=nodes, births=births, **fields)


def pods_in_place(first, second, third, *, told=1):
    """Return the pods of this job. `told`: the attempt known to the pods that stayed."""
    return [
        an_agents_pod(0, first, attempt=told, born=0),
        an_agents_pod(1, second, attempt=1),
        an_agents_pod(2, third, attempt=told, born=0),
    ]


# The annotations of a pod that had been ready for 9 s at its assignment, and of a pod that must not
# start yet.
READY_BEFORE = {names.ANNOTATION_READY_BEFORE: format_time(at(-9))}
HELD = {names.ANNOTATION_ASSIGNMENT: '{"start": false}'}


# The pods that stay


def test_after_a_failure_the_other_pods_stay():
    plan = plan_for(a_running_job(nodes=3), *gang(running(), FAILED, running()))
    assert plan.status.attempt.number == 1
    assert plan.status.attempt.births == (0, 1, 0)
    assert deleted_pods(plan) == []
    assert assigned(plan) == ["digits-0-0", "digits-0-2"]
    assert plan.new_pods == ()
    assert budgets_used(plan) == (1, 0)


def test_the_restart_says_how_many_pods_it_keeps():
    plan = plan_for(a_running_job(nodes=3), *gang(running(), FAILED, running()))
    (event,) = plan.events
    assert event.message == (
        "attempt 1 begins and keeps 2 pods: rank 1 in pod digits-0-1 failed with exit code 1: "
        "ValueError: boom"
    )
    assert plan.status.last_failure.pod == "digits-0-1"


def test_after_the_loss_of_a_pod_the_others_stay():
    first, _, third = gang(running(), running(), running())
    plan = plan_for(a_running_job(nodes=3), first, third)
    assert assigned(plan) == ["digits-0-0", "digits-0-2"]
    assert plan.confirm == ("digits-0-1",)
    assert budgets_used(plan) == (0, 1)


def test_a_pod_that_its_peers_have_lost_does_not_stay_although_it_runs():
    first = failed(agent_report(cause="Follower", exception="Connection closed by peer"))
    job = a_running_job(nodes=3, undecided_since=at(-10))
    plan = plan_for(job, *gang(first, running(), succeeded()))
    failure = plan.status.last_failure
    assert (failure.reason, failure.pod) == (Reason.PEER_LOST, "digits-0-1")
    assert "digits-0-1" in deleted_pods(plan)
    assert assigned(plan) == []


def test_after_the_loss_of_node_0_another_pod_hosts_the_rendezvous():
    _, second, third = gang(running(), running(), running())
    status = plan_for(a_running_job(nodes=3), second, third).status
    assert status.attempt.host == Host(1, "10.244.0.7")
    assert status.resolved.rendezvous == "10.244.0.7:29402"


def test_a_gang_of_new_pods_meets_at_node_0():
    status = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, FAILED)).status
    assert status.attempt.host == Host()
    assert status.attempt.births == ()
    assert "host" not in status.to_dict()


OTHER_AGENT = [{"name": names.AGENT_VOLUME, "configMap": {"name": "ddpjob-agent-other"}}]


def with_volumes(pod, volumes):
    pod["spec"]["volumes"] = volumes
    return pod


# Pods that do not stay after the failure of another pod of their gang.
UNFIT = {
    "its container has not started": an_agents_pod(0, waiting()),
    "it is being deleted": an_agents_pod(0, running(), deleted_at=NOW),
    "it has ended": an_agents_pod(0, failed(agent_report(cause="Follower"))),
    "its node does not answer": an_agents_pod(0, not_ready(running())),
    "it is to be evicted": an_agents_pod(0, {**running(), "conditions": [disruption_target()]}),
    "it has no address": an_agents_pod(0, {**running(), "podIP": ""}),
    "its agent is of another version": with_volumes(an_agents_pod(0, running()), OTHER_AGENT),
    "it has no agent": a_pod(0, running()),
}


@pytest.mark.parametrize("pod", UNFIT.values(), ids=UNFIT)
def test_a_pod_that_cannot_take_part_does_not_stay(pod):
    plan = plan_for(a_running_job(nodes=3), pod, *gang(running(), FAILED, running())[1:])
    assert assigned(plan) == ["digits-0-2"]
    assert plan.status.attempt.births == (1, 1, 0)


@pytest.mark.parametrize("health", ["Unknown", "False"])
def test_a_pod_on_a_node_that_is_not_ready_does_not_stay(health):
    pods = gang(running(), FAILED, running())
    plan = plan_for(a_running_job(nodes=3), *pods, nodes=nodes_of(a_node("node-0", health)))
    assert "digits-0-0" not in assigned(plan)


def test_no_pod_stays_with_recovery_recreate():
    job = a_running_job(nodes=3, spec={"recovery": "Recreate"})
    plan = plan_for(job, *gang(running(), FAILED, running()))
    assert plan.assign == ()
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-2"]


CLAIM = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]}
CLAIM["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]


@pytest.mark.parametrize(
    ("spec", "kept"),
    [({}, ()), (CLAIM, ("digits-0-0", "digits-0-2")), ({**CLAIM, "recovery": "Recreate"}, ())],
)
def test_pods_stay_by_default_if_the_script_can_save_checkpoints(spec, kept):
    job = jobs.a_running_job(nodes=3, spec=spec)
    plan = plan_for(job, *gang(running(), FAILED, running()))
    assert tuple(assigned(plan)) == kept


def test_no_pod_stays_that_has_not_trained_in_the_attempt_that_ended():
    plan = plan_for(a_running_job(nodes=3, ran=False), *gang(starting(), FAILED, running()))
    assert plan.assign == ()
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-2"]


def test_no_pod_waits_for_a_back_off():
    job = a_running_job(nodes=3, backoff=Backoff(1))
    plan = plan_for(job, *gang(running(), FAILED, running()))
    assert plan.status.backoff.until == at(10)
    assert plan.assign == ()
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-2"]


def test_no_pod_stays_in_a_job_that_fails():
    job = a_running_job(nodes=3, failures=3)
    plan = plan_for(job, *gang(running(), FAILED, running()))
    assert plan.status.has(Condition.FAILED)
    assert plan.assign == ()
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-2"]


def test_a_smaller_gang_keeps_the_pods_that_it_needs():
    job = a_running_job(nodes=3, spec={"nodes": 2}, generation=2)
    plan = plan_for(job, *gang(running(), running(), running()))
    assert assigned(plan) == ["digits-0-0", "digits-0-1"]
    assert deleted_pods(plan) == ["digits-0-2"]
    assert (plan.status.pods.desired, budgets_used(plan)) == (2, (0, 0))
    # The gang is whole, so it writes a last checkpoint.
    assert graces(plan) == {OWN_GRACE}


def test_a_smaller_gang_starts_once_the_other_pods_have_ended():
    job = a_running_job(nodes=3, spec={"nodes": 2}, generation=2)
    pods = gang(running(), running(), running())
    plan = plan_for(job, *pods)
    assert [assign.start for assign in plan.assign] == [False, False]
    # Both know the attempt now, and wait.
    job = written(job, plan)
    held = [
        an_agents_pod(index, running(), attempt=1, born=0, annotations=HELD) for index in (0, 1)
    ]
    leaving = an_agents_pod(2, running(), deleted_at=NOW)
    plan = plan_for(job, *held, leaving)
    assert (plan.assign, plan.status.reason) == ((), Reason.WAITING_FOR_OLD_PODS)
    plan = plan_for(job, *held)
    assert [(assign.name, assign.start) for assign in plan.assign] == [
        ("digits-0-0", True),
        ("digits-0-1", True),
    ]
    assert not plan.status.has(Condition.RUNNING)


def test_a_larger_gang_keeps_all_its_pods():
    job = a_running_job(nodes=2, spec={"nodes": 3}, generation=2)
    plan = plan_for(job, *gang(running(), running()))
    assert assigned(plan) == ["digits-0-0", "digits-0-1"]
    assert plan.status.attempt.births == (0, 0, 1)


def test_no_pod_stays_in_a_job_that_is_suspended():
    job = a_running_job(spec={"suspend": True})
    plan = plan_for(job, *gang(running(), running()))
    assert (plan.assign, deleted_pods(plan)) == ((), ["digits-0-0", "digits-0-1"])


# Time for a checkpoint


def test_a_gang_that_a_failure_broke_ends_at_once():
    assert graces(plan_for(a_running_job(), *gang(running(), FAILED))) == {BROKEN_GRACE}


def test_a_gang_whose_pod_is_gone_ends_at_once():
    assert graces(plan_for(a_running_job(), *gang(running(), running())[:1])) == {BROKEN_GRACE}


def test_a_gang_whose_pod_is_drained_may_write_a_checkpoint():
    drained = an_agents_pod(1, running(), deleted_at=NOW)
    assert graces(plan_for(a_running_job(), *gang(running()), drained)) == {OWN_GRACE}


# The attempt with pods that stayed


def test_new_pods_are_created_once_the_old_ones_have_ended():
    job = a_job_in_place()
    old = an_agents_pod(1, running(), deleted_at=NOW)
    kept = [pod for pod in pods_in_place(starting(), None, starting()) if "-0-" in name_of(pod)]
    plan = plan_for(job, *kept, old)
    assert (plan.status.reason, plan.new_pods) == (Reason.WAITING_FOR_OLD_PODS, ())
    plan = plan_for(job, *kept, an_agents_pod(1, FAILED))
    assert plan.new_pods == (1,)


def name_of(pod):
    return pod["metadata"]["name"]


def test_an_operator_that_stopped_before_the_assignments_makes_them_up():
    job = a_running_job(nodes=3)
    pods = gang(running(), FAILED, running())
    plan = plan_for(job, *pods)
    again = plan_for(written(job, plan), *pods)
    assert again.assign == plan.assign
    assert again.status.attempt.number == 1
    assert budgets_used(again) == (1, 0)


def test_only_pods_that_do_not_know_the_attempt_get_an_assignment():
    pods = pods_in_place(starting(), waiting(), starting())
    pods[0] = an_agents_pod(0, running(since=at(-9)), attempt=0)
    plan = plan_for(a_job_in_place(), *pods)
    expected = Assign(
        "digits-0-0", "uid-of-digits-0-0", 0, OWN_GRACE, True, format_time(at(-9)), NOW
    )
    assert plan.assign == (expected,)


@pytest.mark.parametrize(
    ("pod", "counts"),
    [
        (an_agents_pod(0, running(since=at(-9)), attempt=0), False),
        (
            an_agents_pod(0, running(since=at(-9)), attempt=1, born=0, annotations=READY_BEFORE),
            False,
        ),
        (
            an_agents_pod(0, running(since=at(3)), attempt=1, born=0, annotations=READY_BEFORE),
            True,
        ),
        (an_agents_pod(0, starting(), attempt=1, born=0), False),
    ],
    ids=["not told", "ready since before", "ready again", "not ready"],
)
def test_a_pod_that_stayed_counts_once_it_is_ready_again(pod, counts):
    others = pods_in_place(None, running(), running())[1:]
    status = plan_for(a_job_in_place(), pod, *others).status
    assert status.has(Condition.RUNNING) is counts
    assert status.pods.ready == 2 + counts


LOST = {
    "gone": [],
    "deleted": [an_agents_pod(0, running(), attempt=1, born=0, deleted_at=NOW)],
    "evicted": [
        an_agents_pod(0, {**starting(), "conditions": [disruption_target()]}, attempt=1, born=0)
    ],
    "killed without a report": [an_agents_pod(0, oom_killed(), attempt=1, born=0)],
}


@pytest.mark.parametrize("first", LOST.values(), ids=LOST)
def test_a_pod_that_stayed_and_is_lost_before_the_attempt_ran_costs_nothing_more(first):
    """It was probably lost together with the counted one, as in a drain."""
    others = pods_in_place(None, waiting(), starting())[1:]
    plan = plan_for(a_job_in_place(), *first, *others)
    assert (plan.status.attempt.number, plan.status.reason) == (2, Reason.NOT_RESUMED)
    assert plan.status.attempt.births == ()
    assert plan.confirm == (() if first else ("digits-0-0",))
    assert budgets_used(plan) == (0, 0)


@pytest.mark.parametrize("first", LOST.values(), ids=LOST)
def test_a_pod_that_stayed_and_is_lost_after_the_attempt_ran_is_counted(first):
    others = pods_in_place(None, running(), running())[1:]
    plan = plan_for(a_job_in_place(latched=True, ran=True), *first, *others)
    assert plan.status.restarts == 1


def test_a_new_pod_that_is_lost_before_the_attempt_ran_is_a_disruption():
    stayed, _, also_stayed = pods_in_place(running(), running(), running())
    plan = plan_for(a_job_in_place(latched=True), stayed, also_stayed)
    failure = plan.status.last_failure
    assert (failure.cause, failure.reason) == ("Disruption", "PodDeleted")
    assert failure.pod == "digits-1-1"


def test_a_success_in_the_attempt_before_is_none_in_this_one():
    old = succeeded(agent_report(attempt=0, cause="Succeeded"))
    plan = plan_for(a_job_in_place(), *pods_in_place(old, running(), running()))
    assert plan.status.attempt.succeeded_nodes == ()
    assert plan.status.reason == Reason.NOT_RESUMED


def test_pods_that_may_still_write_a_checkpoint_keep_their_time():
    job = a_job_in_place(previous_ran=True, spec={"suspend": True})
    plan = plan_for(job, *pods_in_place(starting(), starting(), starting()))
    assert {delete.grace for delete in plan.delete} == {None}
    assert plan.assign == ()


def test_a_sidecar_that_has_ended_does_not_make_its_trainer_unready():
    status = running()
    status["conditions"][0]["status"] = "False"
    plan = plan_for(a_running_job(), *gang(running(), status))
    assert (plan.status.pods.ready, plan.status.attempt.silent_since) == (2, None)


def test_a_pod_that_stayed_and_fails_in_the_attempt_is_a_failure():
    ended = failed(agent_report(attempt=1))
    plan = plan_for(a_job_in_place(), *pods_in_place(ended, running(), running()))
    assert plan.status.attempts[0].cause == "Failure"
    assert plan.status.attempt.births == ()
    assert budgets_used(plan) == (1, 0)


def test_a_pod_that_ended_before_it_took_part_costs_nothing_and_all_are_made_anew():
    ended = failed(agent_report(attempt=0, cause="Follower"))
    job = a_job_in_place(last_failure=LastFailure(0, "Failure", "WorkerFailed"))
    plan = plan_for(job, *pods_in_place(ended, running(), running()))
    assert (plan.status.attempt.number, plan.status.reason) == (2, Reason.NOT_RESUMED)
    assert plan.status.attempt.births == ()
    assert plan.assign == ()
    assert deleted_pods(plan) == ["digits-1-1", "digits-0-2"]
    assert budgets_used(plan) == (0, 0)
    assert plan.status.last_failure == job.status.last_failure


def test_a_second_failure_of_the_attempt_before_is_not_counted_again():
    ended = failed(agent_report(attempt=0, cause="Failure"))
    plan = plan_for(a_job_in_place(), *pods_in_place(ended, running(), running()))
    assert plan.status.attempts[0].cause == "NotResumed"
    assert budgets_used(plan) == (0, 0)


def test_a_new_pod_that_fails_before_its_first_assignment_has_failed():
    ended = failed(agent_report(attempt=-1, exception="no assignment in /ddpjob/pod/assignment"))
    plan = plan_for(a_job_in_place(), *pods_in_place(starting(), ended, starting()))
    assert plan.status.attempts[0].cause == "Failure"


# Running pods that are not ready


def test_pods_that_stayed_and_do_not_become_ready_are_made_anew_without_a_cost():
    job = a_job_in_place(silent_since=NOW)
    pods = pods_in_place(starting(), running(), running())
    early = plan_for(job, *pods, now=at(119))
    assert early.status.attempt.number == 1
    plan = plan_for(job, *pods, now=NOW + SILENT_TIME)
    assert plan.status.attempts[0].cause == Cause.NOT_RESUMED
    assert plan.status.attempt.births == ()
    assert budgets_used(plan) == (0, 0)


def test_a_gang_that_ran_and_is_not_ready_for_too_long_hangs():
    job = a_running_job(nodes=3, silent_since=NOW)
    pods = gang(running(), starting(), running())
    plan = plan_for(job, *pods, now=NOW + SILENT_TIME)
    assert plan.status.last_failure.cause == Cause.HANG
    assert plan.status.last_failure.node == "node-1"
    assert plan.status.last_failure.message == (
        "pod digits-0-1 on node node-1 is not ready although it runs: its processes hang or cannot "
        "be reached"
    )
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1", "digits-0-2"]
    assert budgets_used(plan) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [waiting(), FAILED, not_ready(running()), running()],
    ids=["starts", "failed", "on a lost node", "none"],
)
def test_the_time_of_a_silent_gang_runs_only_if_nothing_else_explains_it(other):
    job = a_running_job(silent_since=at(-5))
    last = starting() if other != running() else running()
    status = plan_for(job, *gang(other, last)).status
    assert status.attempt.silent_since is None


def test_the_time_of_a_silent_gang_begins_when_it_is_seen():
    status = plan_for(a_running_job(), *gang(running(), starting())).status
    assert status.attempt.silent_since == NOW
    # The gang has met, and has not ended.
    assert (status.phase, status.message) == (
        Phase.RUNNING,
        "attempt 0 runs on 2 nodes; pod digits-0-1 on node node-1 is not ready",
    )


def test_a_gang_that_has_never_run_has_its_own_time_to_start():
    status = plan_for(a_running_job(ran=False, latched=False), *gang(starting(), starting())).status
    assert status.attempt.silent_since is None
    assert status.message == (
        "0 of 2 nodes are ready; the workers of pod digits-0-0 on node node-0 and 1 more have not "
        "met the others yet"
    )


# Hangs found by an agent


def test_a_hang_is_a_cause_once_the_others_had_time_for_their_stacks_and_all_pods_are_made_anew():
    hang = failed(agent_report(cause="Hang", exception="no heartbeat for 60 s"))
    pods = gang(running(), hang, running())
    assert plan_for(a_running_job(nodes=3), *pods).status.last_failure == LastFailure()
    plan = plan_for(a_running_job(nodes=3, undecided_since=at(-20)), *pods)
    assert plan.status.last_failure.cause == "Hang"
    assert plan.status.last_failure.message == (
        "pod digits-0-1 hangs: no heartbeat for 60 s; the last line"
    )
    assert (plan.status.reason, budgets_used(plan)) == (Reason.HANG, (1, 0))
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-2"]


def test_hangs_use_up_max_restarts():
    hang = failed(agent_report(cause="Hang", exception="no heartbeat for 60 s"))
    plan = plan_for(a_running_job(failures=3, undecided_since=at(-20)), *gang(running(), hang))
    assert plan.status.reason == Reason.MAX_RESTARTS


def test_a_pod_that_was_killed_has_no_report_and_is_judged_by_its_end():
    plan = plan_for(a_running_job(), *gang(running(), oom_killed()))
    assert plan.status.last_failure.reason == "OOMKilled"
    assert assigned(plan) == ["digits-0-0"]


# The status


def test_a_status_keeps_the_attempts_of_its_pods():
    status = a_status(attempt=4, nodes=3, births=(4, 1))
    assert [status.attempt.born(index) for index in range(3)] == [4, 1, 4]


def test_a_label_that_is_older_than_the_pod_makes_it_a_stray():
    pod = an_agents_pod(0, running(), attempt=0, born=3)
    plan = plan_for(a_running_job(attempt=3), pod, an_agents_pod(1, running(), attempt=3))
    assert plan.status.stray_pods == ("digits-3-0",)


def test_the_config_map_of_the_agent_has_a_name_of_its_content():
    assert config_map_name().startswith("ddpjob-agent-")


# The grace period of the pods


def with_grace(seconds, *statuses, **fields):
    """Return the pods of a gang with this grace period."""
    return [
        an_agents_pod(index, status, terminationGracePeriodSeconds=seconds, **fields)
        for index, status in enumerate(statuses)
    ]


def test_a_whole_gang_has_the_grace_period_of_its_pods_to_end_in_place():
    staying, _ = with_grace(600, running(), running())
    drained = an_agents_pod(1, running(), deleted_at=NOW, terminationGracePeriodSeconds=600)
    assert graces(plan_for(a_running_job(), staying, drained)) == {600}


def test_a_gang_that_may_write_for_long_is_silent_for_long():
    job = a_running_job(nodes=2, silent_since=NOW)
    pods = with_grace(600, running(), starting())
    assert plan_for(job, *pods, now=at(674)).status.attempt.number == 0
    assert plan_for(job, *pods, now=at(675)).status.attempt.number == 1


@pytest.mark.parametrize("seconds", [10**15, -1])
def test_no_grace_period_is_too_long_to_decide(seconds):
    job = a_running_job(nodes=2, silent_since=NOW)
    pods = with_grace(seconds, running(), starting())
    assert plan_for(job, *pods, now=at(60)).status.attempt.number == 0


def test_a_pod_that_must_not_start_yet_waits_for_the_grace_period_of_the_others():
    def waits(grace, start):
        assign = Assign("digits-0-0", "uid", 0, grace, start, "", NOW)
        return json.loads(assignment(a_running_job(), 0, ServiceAddresses(), assign))["wait"]

    assert [waits(1.0, False), waits(45.0, False), waits(600.0, False)] == [120, 120, 675]
    assert waits(600.0, True) == 8


# An assignment lost by the kubelet


def kept(state, annotations, **fields):
    """Return the assignments for a pod kept with these annotations, beside a new one."""
    pod = an_agents_pod(0, state, attempt=1, born=0, annotations=annotations)
    fields = {"latched": False, "ran": False, **fields}
    job = a_running_job(attempt=1, births=(0, 1), **fields)
    return plan_for(job, pod, an_agents_pod(1, starting(), attempt=1)).assign


@pytest.mark.parametrize(("seconds", "copies"), [(-5, 0), (-19, 0), (-20, 1), (-90, 1)])
def test_an_assignment_that_a_pod_does_not_follow_is_written_again(seconds, copies):
    (again,) = kept(starting(), told(seconds, copies))
    assert again == Assign(
        *("digits-0-0", "uid-of-digits-0-0", 0, 7.0, True, None, at(seconds)),
        copies=copies + 1,
    )


@pytest.mark.parametrize(
    ("state", "annotations"),
    [
        (starting(), told(-4)),
        (starting(), told(-19, 1)),
        (starting(), told(-900, 2)),
        (starting(), told(-900, -1)),
        # It follows, or it has ended.
        (running(since=at(-1)), told(-9)),
        (succeeded(), told(-9)),
        # What a user may write.
        (starting(), {names.ANNOTATION_ASSIGNMENT: '{"time": "soon"}'}),
        (starting(), {names.ANNOTATION_ASSIGNMENT: '{"time": 7, "grace": NaN}'}),
    ],
)
def test_other_assignments_are_written_once(state, annotations):
    assert kept(state, annotations) == ()


@pytest.mark.parametrize("grace", [10**400, -1, float("nan"), float("inf"), "1", None, [2]])
def test_an_assignment_of_any_shape_is_read(grace):
    (again,) = kept(starting(), told(-9, grace=grace))
    assert again.grace == 0.0


def test_a_gang_that_has_met_has_followed():
    assert kept(starting(), told(-900), running_time=at(-60)) == ()


@pytest.mark.parametrize("met", [None, at(-60)])
def test_the_order_to_write_stacks_is_written_again(met):
    (again,) = kept(running(since=at(-60)), told(-5, dump=True), running_time=met)
    assert again.dump
