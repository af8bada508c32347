"""Pods on silent Kubernetes nodes: when they are deleted by force, and when never."""

from dataclasses import replace
from datetime import timedelta

import pytest
from builders.containers import failed, running, succeeded, waiting, with_sidecar
from builders.jobs import a_condition, a_job, a_running_job, a_starting_job, a_status
from builders.messages import follower_summary, torchrun_summary
from builders.nodes import a_node, nodes_of
from builders.plans import (
    budgets_used,
    deleted_pods,
    observation,
    plan_for,
    restarts_by_budget,
    written,
)
from builders.pods import a_pod, read_pods
from builders.surroundings import not_ready
from builders.times import NOW, at

from ddpjob.core.api.history import UnreachableNode
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.dead_nodes import OUT_OF_SERVICE
from ddpjob.core.decide.deletions import BROKEN_GANG_GRACE
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import ClusterPolicy, Nodes

NEVER = ClusterPolicy(dead_node_time=None)
SPOT_TAINT = "aws-node-termination-handler/spot-itn"
SPOT = ClusterPolicy(disruption_taints=(SPOT_TAINT,))
CORDON = "node.kubernetes.io/unschedulable"

BOTH_RUN = (a_pod(0, running()), a_pod(1, running()))
SECOND_ENDS = (a_pod(0, running()), a_pod(1, running(), deleted_at=NOW))

UNREACHABLE = nodes_of(a_node("node-0"), a_node("node-1", "Unknown"))
GONE = nodes_of(a_node("node-0"))
NOT_READY = nodes_of(a_node("node-0"), a_node("node-1", "False"))
SERVICED = nodes_of(a_node("node-0"), a_node("node-1", "Unknown", OUT_OF_SERVICE))
READY = nodes_of(a_node("node-0"), a_node("node-1"))


def cluster_with_unready(unready, total):
    """Return the nodes of a cluster. The first `unready` ones are unreachable."""
    bodies = [
        a_node(f"node-{number}", "Unknown" if number < unready else "True")
        for number in range(total)
    ]
    return Nodes(map(read_node, bodies))


def watched(job, *pods, nodes, since=NOW):
    """Return the job after the first look at the state of its nodes."""
    return written(job, plan_for(job, *pods, now=since, nodes=nodes))


def forced(plan):
    return [delete.name for delete in plan.delete if delete.forced]


# The gang runs, and one of its nodes dies


@pytest.mark.parametrize("limit", [0, 1])
def test_the_node_that_ends_an_attempt_is_confirmed_first(limit):
    spec = {"cleanPodPolicy": "None", "failurePolicy": {"maxDisruptions": limit}}
    job = watched(a_running_job(spec=spec), *BOTH_RUN, nodes=UNREACHABLE)
    plan = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, now=at(30))
    assert plan.status.finished is (limit == 0)
    assert plan.confirm_nodes == ("node-1",)


@pytest.mark.parametrize("nodes", [UNREACHABLE, GONE], ids=["unreachable", "gone"])
def test_a_node_that_is_lost_ends_the_attempt_after_30_seconds(nodes):
    job = watched(a_running_job(), *BOTH_RUN, nodes=nodes)
    waiting_plan = plan_for(job, *BOTH_RUN, nodes=nodes, now=at(29))
    assert (waiting_plan.status.attempt.number, waiting_plan.wake_after) == (0, 1)
    plan = plan_for(job, *BOTH_RUN, nodes=nodes, now=at(30))
    assert plan.status.attempt.number == 1
    assert budgets_used(plan) == (0, 1)
    assert plan.status.last_failure.reason == "NodeUnreachable"
    assert plan.status.last_failure.pod == "digits-0-1"
    # The peers of a lost node cannot write a checkpoint.
    assert [(delete.name, delete.grace) for delete in plan.delete] == [
        ("digits-0-0", BROKEN_GANG_GRACE),
        ("digits-0-1", 0),
    ]


def test_the_status_says_since_when_a_node_is_unreachable():
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE, since=at(3))
    assert job.status.unreachable_nodes == (UnreachableNode("node-1", at(3), "uid-of-node-1"),)
    again = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, now=at(9))
    assert again.status.unreachable_nodes == job.status.unreachable_nodes


def test_the_look_that_first_sees_an_unreachable_node_says_what_follows():
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE)
    assert job.status.message == (
        "attempt 0 runs on 2 nodes; pod digits-0-1 is on node-1; the node is unreachable since "
        "2026-11-21T12:00:00Z; after 30 s the pod is deleted by force"
    )
    # Nothing is written again until the node is dead.
    assert plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, now=at(9)).status == job.status


def test_the_look_that_first_sees_an_unreachable_node_asks_to_be_woken():
    assert plan_for(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE).wake_after == 30


def test_a_node_that_comes_back_in_time_changes_nothing():
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE)
    plan = plan_for(job, *BOTH_RUN, nodes=READY, now=at(60))
    assert (plan.status.unreachable_nodes, plan.status.attempt.number) == ((), 0)
    assert (plan.delete, plan.wake_after) == ((), None)


def test_a_node_that_is_unreachable_again_has_its_whole_time_again():
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE)
    job = watched(job, *BOTH_RUN, nodes=READY, since=at(20))
    job = watched(job, *BOTH_RUN, nodes=UNREACHABLE, since=at(40))
    assert plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, now=at(69)).status.attempt.number == 0


def test_a_clock_that_was_set_back_delays_the_end_of_a_node_and_does_not_prevent_it():
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE, since=at(7200))
    plan = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, now=NOW)
    assert plan.status.unreachable_nodes == (UnreachableNode("node-1", NOW, "uid-of-node-1"),)
    assert plan.wake_after == 30


def test_a_node_that_is_out_of_service_ends_the_attempt_at_once():
    plan = plan_for(a_running_job(), *BOTH_RUN, nodes=SERVICED)
    assert plan.status.attempt.number == 1
    assert forced(plan) == ["digits-0-1"]


@pytest.mark.parametrize("nodes", [READY, NOT_READY], ids=["ready", "not ready"])
def test_a_node_whose_kubelet_reports_does_not_end_an_attempt(nodes):
    job = watched(a_running_job(), *BOTH_RUN, nodes=nodes)
    plan = plan_for(job, *BOTH_RUN, nodes=nodes, now=at(10**6))
    assert (plan.status.attempt.number, plan.delete) == (0, ())


def test_the_next_attempt_begins_when_the_pods_of_a_dead_node_are_gone():
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE)
    job = written(job, plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, now=at(30)))
    assert plan_for(job, nodes=UNREACHABLE, now=at(31)).new_pods == (0, 1)


def test_a_pod_that_has_ended_is_not_lost_with_its_node():
    pods = a_pod(0, running()), a_pod(1, succeeded())
    job = watched(a_running_job(), *pods, nodes=UNREACHABLE)
    plan = plan_for(job, *pods, nodes=UNREACHABLE, now=at(60))
    assert (plan.status.attempt.number, plan.status.unreachable_nodes) == (0, ())


def test_a_dead_node_does_not_end_an_attempt_before_it_ran_either():
    job = a_starting_job()
    pods = a_pod(0, running()), a_pod(1, waiting())
    job = watched(job, *pods, nodes=UNREACHABLE)
    plan = plan_for(job, *pods, nodes=UNREACHABLE, now=at(30))
    # No budget is used before all nodes ran.
    assert (plan.status.attempt.number, budgets_used(plan)) == (1, (0, 0))
    assert forced(plan) == ["digits-0-1"]


def test_an_undecided_failure_is_blamed_on_the_unreachable_node():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, running())
    job = watched(a_running_job(undecided_since=NOW), *pods, nodes=UNREACHABLE)
    plan = plan_for(job, *pods, nodes=UNREACHABLE, now=at(10))
    assert plan.status.last_failure.reason == Reason.PEER_LOST
    assert plan.status.last_failure.node == "node-1"
    # The peer's node is not dead yet, so its pod is not forced yet.
    assert forced(plan) == []


def plan_beside_a_leftover(job, nodes, now=NOW):
    """Return the plan for a job with the name of an earlier job, and with a leftover pod of it."""
    (left,) = read_pods(a_pod(0, running(), deleted_at=NOW, grace=45, nodeName="node-1"))
    return decide(replace(observation(job, nodes=nodes), leftovers=(left,)), now)


def test_a_pod_of_an_earlier_job_on_a_dead_node_is_deleted_by_force():
    job = a_job()
    first = plan_beside_a_leftover(job, UNREACHABLE)
    assert (first.new_pods, first.delete, first.wake_after) == ((), (), 30)
    assert first.status.reason == Reason.NAME_IN_USE
    assert first.status.message == (
        "waits for pod digits-0-0 on node node-1 of an earlier job with this name to end; the node "
        "is unreachable since 2026-11-21T12:00:00Z; after 30 s the pod is deleted by force"
    )
    second = plan_beside_a_leftover(written(job, first), UNREACHABLE, at(30))
    assert (second.new_pods, forced(second)) == ((), ["digits-0-0"])


def test_of_several_pods_that_are_waited_for_the_first_is_described():
    old = [a_pod(index, running(), deleted_at=at(-200)) for index in range(2)]
    by_force = "after 30 s the pod is deleted by force"
    nodes = nodes_of(a_node("node-0", "False"), a_node("node-1"))
    plan = plan_for(a_starting_job(attempt=1), *old, nodes=nodes)
    assert plan.status.message.endswith(by_force)
    obs = observation(a_job(), leftovers=read_pods(*old), nodes=nodes)
    assert decide(obs, NOW).status.message.endswith(by_force)


def test_a_pod_of_an_earlier_job_that_nobody_deletes_is_named_with_a_command():
    # The earlier job was deleted without its pods: kubectl delete --cascade=orphan.
    job = a_job()
    obs = observation(job, leftovers=read_pods(a_pod(0, running())), nodes=READY)
    assert decide(obs, NOW).status.message == (
        "waits for pod digits-0-0 on node node-0 of an earlier job with this name to end; to end "
        "it now: kubectl -n ml delete pod digits-0-0"
    )


def test_a_pod_of_an_earlier_job_that_ends_slowly_is_named_and_waited_for():
    job = a_starting_job()
    plan = plan_beside_a_leftover(job, READY)
    assert (plan.new_pods, plan.delete, plan.wake_after) == ((), (), 75)
    assert plan.status.message.endswith("of an earlier job with this name to end")
    assert plan.status.attempt.starting_since is None
    late = plan_beside_a_leftover(written(job, plan), READY, at(75))
    assert late.delete == ()
    assert "ask the administrator to check the kubelet there" in late.status.message


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (UNREACHABLE, "node node-1 is unreachable"),
        (nodes_of(a_node("node-0")), "node node-1 does not exist any more"),
        (
            nodes_of(a_node("node-0"), a_node("node-1", "False", OUT_OF_SERVICE)),
            "node node-1 has the taint node.kubernetes.io/out-of-service",
        ),
        (
            NOT_READY,
            "the pod should have ended at 2026-11-21T12:00:45Z, and its node node-1 is not ready",
        ),
        (
            None,
            "the pod should have ended at 2026-11-21T12:00:45Z, and its node node-1 is not ready",
        ),
    ],
)
def test_a_forced_deletion_says_what_happened_to_the_node(nodes, why):
    pod = a_pod(1, not_ready(running()), deleted_at=NOW, grace=45)
    job = watched(stuck_job(), pod, nodes=nodes)
    (delete,) = plan_for(job, pod, nodes=nodes, now=at(75)).delete
    assert (delete.name, delete.forced) == ("digits-0-1", why)


def test_the_taint_out_of_service_that_was_left_on_a_ready_node_forces_nothing():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "True", OUT_OF_SERVICE))
    pods = a_pod(0, running()), a_pod(1, running())
    plan = plan_for(a_running_job(), *pods, nodes=nodes)
    assert (plan.status.attempt.number, plan.delete) == (0, ())


# A pod is stuck while it ends


def stuck_job():
    """Return a job in attempt 1, waiting for a pod of attempt 0 to end."""
    return a_starting_job(attempt=1)


def test_a_stuck_pod_on_an_unreachable_node_is_deleted_by_force():
    job = watched(stuck_job(), *SECOND_ENDS, nodes=UNREACHABLE)
    plan = plan_for(job, a_pod(1, running(), deleted_at=NOW), nodes=UNREACHABLE, now=at(30))
    (delete,) = plan.delete
    assert (delete.name, delete.uid, delete.grace) == ("digits-0-1", "uid-of-digits-0-1", 0)
    assert delete.forced == "node node-1 is unreachable"


def test_a_stuck_pod_on_a_node_that_is_not_ready_is_forced_30_s_after_its_grace_period():
    pod = a_pod(1, running(), deleted_at=NOW, grace=45)
    early = plan_for(stuck_job(), pod, nodes=NOT_READY, now=at(74))
    assert (early.delete, early.wake_after) == ((), 1)
    assert forced(plan_for(stuck_job(), pod, nodes=NOT_READY, now=at(75))) == ["digits-0-1"]


def test_a_stuck_pod_on_a_ready_node_is_never_forced():
    pod = a_pod(1, running(), deleted_at=NOW)
    plan = plan_for(stuck_job(), pod, nodes=READY, now=at(10**6))
    assert (plan.delete, plan.new_pods) == ((), ())
    assert plan.status.message == (
        "attempt 1 waits for pod digits-0-1 on node node-1 to end; it should have ended at "
        "2026-11-21T12:00:45Z; its node is ready: ask the administrator to check the kubelet there"
    )


def test_a_pod_that_has_just_been_deleted_is_waited_for_without_a_suspicion():
    pod = a_pod(1, running(), deleted_at=NOW, grace=45)
    status = plan_for(stuck_job(), pod, nodes=READY, now=at(60)).status
    assert status.message == "attempt 1 waits for pod digits-0-1 on node node-1 to end"


def test_the_message_says_when_a_pod_of_an_unreachable_node_is_forced():
    job = watched(stuck_job(), *SECOND_ENDS, nodes=UNREACHABLE)
    pod = a_pod(1, running(), deleted_at=NOW)
    assert plan_for(job, pod, nodes=UNREACHABLE, now=at(5)).status.message == (
        "attempt 1 waits for pod digits-0-1 on node node-1 to end; the node is unreachable since "
        "2026-11-21T12:00:00Z; after 30 s the pod is deleted by force"
    )


def test_a_pod_whose_trainer_has_ended_but_whose_sidecar_runs_is_forced_too():
    pod = a_pod(1, with_sidecar(failed(torchrun_summary(1))), deleted_at=NOW)
    job = watched(stuck_job(), pod, nodes=UNREACHABLE)
    assert forced(plan_for(job, pod, nodes=UNREACHABLE, now=at(30))) == ["digits-0-1"]


def test_a_pod_of_a_finished_job_is_forced_off_a_dead_node():
    status = a_status(conditions=a_condition(Condition.COMPLETE), phase="Complete")
    pods = a_pod(0, succeeded()), a_pod(1, with_sidecar(succeeded()), deleted_at=NOW)
    job = watched(a_job(status=status), *pods, nodes=UNREACHABLE)
    plan = plan_for(job, *pods, nodes=UNREACHABLE, now=at(30))
    assert forced(plan) == ["digits-0-1"]


# The administrator forbids it


def test_without_a_dead_node_time_nothing_is_forced_and_the_message_has_the_command():
    pod = a_pod(1, running(), deleted_at=NOW)
    job = written(stuck_job(), plan_for(stuck_job(), pod, nodes=UNREACHABLE, policy=NEVER))
    plan = plan_for(job, pod, nodes=UNREACHABLE, policy=NEVER, now=at(10**5))
    assert (plan.delete, plan.wake_after) == ((), None)
    assert plan.status.message == (
        "attempt 1 waits for pod digits-0-1 on node node-1 to end; the node is unreachable since "
        "2026-11-21T12:00:00Z; if the node is down, delete the pod: kubectl -n ml delete "
        "pod digits-0-1 --force"
    )


def test_without_a_dead_node_time_a_running_gang_stays():
    job = written(
        a_running_job(), plan_for(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE, policy=NEVER)
    )
    plan = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, policy=NEVER, now=at(10**5))
    assert plan.status.attempt.number == 0


def test_the_administrators_time_is_used():
    policy = ClusterPolicy(dead_node_time=timedelta(seconds=300))
    job = watched(a_running_job(), *BOTH_RUN, nodes=UNREACHABLE)
    early = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, policy=policy, now=at(299))
    late = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE, policy=policy, now=at(300))
    assert (early.status.attempt.number, late.status.attempt.number) == (0, 1)


# The control plane is cut off


def test_while_most_nodes_are_not_ready_nothing_is_forced_and_the_status_says_so():
    nodes = cluster_with_unready(3, total=5)
    job = watched(a_running_job(), *BOTH_RUN, nodes=nodes)
    plan = plan_for(job, *BOTH_RUN, nodes=nodes, now=at(10**5))
    assert (plan.status.attempt.number, plan.delete, plan.wake_after) == (0, (), 5)
    assert plan.status.message == (
        "attempt 0 runs on 2 nodes; pod digits-0-0 is on node-0; 3 of 5 Kubernetes nodes are not "
        "ready, so no pod is deleted by force"
    )


def test_a_pod_that_is_waited_for_is_not_forced_while_most_nodes_are_not_ready():
    nodes = cluster_with_unready(3, total=5)
    pod = a_pod(1, running(), deleted_at=NOW)
    plan = plan_for(stuck_job(), pod, nodes=nodes, now=at(10**5))
    assert plan.delete == ()
    assert "3 of 5 Kubernetes nodes are not ready" in plan.status.message


def test_the_time_of_a_dead_node_begins_when_the_control_plane_is_back():
    cut_off = cluster_with_unready(3, total=5)
    back = cluster_with_unready(2, total=5)
    job = watched(a_running_job(), *BOTH_RUN, nodes=cut_off)
    assert job.status.unreachable_nodes == ()
    job = watched(job, *BOTH_RUN, nodes=back, since=at(600))
    assert plan_for(job, *BOTH_RUN, nodes=back, now=at(629)).status.attempt.number == 0
    assert plan_for(job, *BOTH_RUN, nodes=back, now=at(630)).status.attempt.number == 1


def test_half_of_the_nodes_are_not_most_of_them():
    half = cluster_with_unready(2, total=4)
    job = watched(a_running_job(), *BOTH_RUN, nodes=half)
    assert plan_for(job, *BOTH_RUN, nodes=half, now=at(30)).status.attempt.number == 1


def test_a_human_who_marks_a_node_out_of_service_is_believed_even_then():
    nodes = cluster_with_unready(3, total=5)
    nodes.put(read_node(a_node("node-1", "Unknown", OUT_OF_SERVICE)))
    assert forced(plan_for(a_running_job(), *BOTH_RUN, nodes=nodes)) == ["digits-0-1"]


# The operator has Roles only, so it may not read nodes


def test_without_nodes_a_running_gang_is_never_forced():
    pods = a_pod(0, running()), a_pod(1, not_ready(running()))
    plan = plan_for(a_running_job(), *pods, nodes=None, now=at(10**6))
    assert (plan.status.attempt.number, plan.delete) == (0, ())


def test_without_nodes_a_pod_that_looks_lost_is_forced_when_its_deletion_is_overdue():
    pod = a_pod(1, not_ready(running()), deleted_at=NOW, grace=45)
    early = plan_for(stuck_job(), pod, nodes=None, now=at(74))
    assert (early.delete, early.wake_after) == ((), 1)
    assert forced(plan_for(stuck_job(), pod, nodes=None, now=at(75))) == ["digits-0-1"]


def test_without_nodes_a_pod_that_its_kubelet_still_reports_is_not_forced():
    pod = a_pod(1, running(), deleted_at=NOW, grace=45)
    plan = plan_for(stuck_job(), pod, nodes=None, now=at(10**6))
    assert plan.delete == ()
    assert plan.status.message == (
        "attempt 1 waits for pod digits-0-1 on node node-1 to end; it should have ended at "
        "2026-11-21T12:00:45Z, and the operator may not read nodes; if the node is down, delete "
        "the pod: kubectl -n ml delete pod digits-0-1 --force"
    )


def test_without_nodes_a_dead_node_time_of_never_forces_nothing():
    pod = a_pod(1, not_ready(running()), deleted_at=NOW, grace=45)
    assert plan_for(stuck_job(), pod, nodes=None, policy=NEVER, now=at(10**6)).delete == ()


# Nodes about to end


def test_a_node_that_registers_anew_under_its_name_is_another_one():
    old = nodes_of(a_node("node-0"), a_node("node-1", "Unknown", uid="old"), a_node("node-2"))
    new = nodes_of(a_node("node-0"), a_node("node-1", "Unknown", uid="new"), a_node("node-2"))
    job = watched(a_running_job(), *BOTH_RUN, nodes=old)
    job = watched(job, *BOTH_RUN, nodes=new, since=at(29))
    assert plan_for(job, *BOTH_RUN, nodes=new, now=at(58)).status.attempt.number == 0
    assert plan_for(job, *BOTH_RUN, nodes=new, now=at(59)).status.attempt.number == 1


def test_a_node_that_is_gone_does_not_get_its_time_again():
    old = nodes_of(a_node("node-0"), a_node("node-1", "Unknown", uid="old"), a_node("node-2"))
    job = watched(a_running_job(), *BOTH_RUN, nodes=old)
    gone = nodes_of(a_node("node-0"), a_node("node-2"))
    job = watched(job, *BOTH_RUN, nodes=gone, since=at(20))
    assert plan_for(job, *BOTH_RUN, nodes=gone, now=at(30)).status.attempt.number == 1


def test_a_spot_notice_moves_the_gang_with_its_own_grace_period():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "True", SPOT_TAINT))
    plan = plan_for(a_running_job(), *BOTH_RUN, nodes=nodes, policy=SPOT)
    assert (plan.status.attempt.number, restarts_by_budget(plan)) == (
        1,
        {"announced": 1},
    )
    assert plan.status.last_failure.reason == "NodeEnding"
    assert SPOT_TAINT in plan.status.last_failure.message
    assert [delete.grace for delete in plan.delete] == [None, None]


@pytest.mark.parametrize("toleration", [{"key": SPOT_TAINT}, {"operator": "Exists"}])
def test_a_pod_that_tolerates_the_taint_stays(toleration):
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "True", SPOT_TAINT))
    pods = [a_pod(index, running(), tolerations=[toleration]) for index in range(2)]
    assert plan_for(a_running_job(), *pods, nodes=nodes, policy=SPOT).status.attempt.number == 0


def test_a_taint_that_the_administrator_has_not_listed_moves_nothing():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "True", SPOT_TAINT))
    assert plan_for(a_running_job(), *BOTH_RUN, nodes=nodes).status.attempt.number == 0


def test_a_cordon_alone_moves_nothing():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "True", CORDON))
    plan = plan_for(a_running_job(), *BOTH_RUN, nodes=nodes, policy=SPOT, now=at(10**6))
    assert (plan.status.phase, plan.status.attempt.number, plan.delete) == (Phase.RUNNING, 0, ())


def test_a_spot_notice_does_not_end_a_node_that_succeeded():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "True", SPOT_TAINT))
    pods = a_pod(0, running()), a_pod(1, succeeded())
    assert plan_for(a_running_job(), *pods, nodes=nodes, policy=SPOT).status.attempt.number == 0


# The volume of a dead node


def test_a_pod_that_waits_for_the_volume_of_a_dead_node_says_so():
    status = a_status(attempt=1, ran=False, unreachable_nodes=(UnreachableNode("node-9", at(-60)),))
    claim = {"name": "ckpt", "persistentVolumeClaim": {"claimName": "ckpt"}}
    pods = [
        a_pod(0, waiting(), attempt=1, volumes=[claim]),
        a_pod(1, running(), attempt=1, volumes=[claim]),
    ]
    nodes = nodes_of(a_node("node-0"), a_node("node-1"), a_node("node-9", "Unknown"))
    message = plan_for(a_job(status=status), *pods, nodes=nodes).status.message
    assert "a ReadWriteOnce volume may still be attached to the unreachable node node-9" in message
    assert "node.kubernetes.io/out-of-service" in message


def test_a_node_that_the_job_has_left_is_named_for_an_hour():
    status = a_status(attempt=1, unreachable_nodes=(UnreachableNode("node-9", NOW),))
    pods = [a_pod(index, running(), attempt=1) for index in range(2)]
    nodes = nodes_of(a_node("node-0"), a_node("node-1"), a_node("node-9", "Unknown"))
    named = plan_for(a_job(status=status), *pods, nodes=nodes, now=at(3599))
    forgotten = plan_for(a_job(status=status), *pods, nodes=nodes, now=at(3600))
    assert named.status.unreachable_nodes
    assert forgotten.status.unreachable_nodes == ()


def test_a_dead_node_of_a_job_that_is_being_deleted_is_left_to_kubernetes():
    job = a_running_job(deleting=True, unreachable_nodes=(UnreachableNode("node-1", at(-60)),))
    plan = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE)
    assert (plan.delete, plan.status) == ((), job.status)


def test_a_job_that_lost_its_last_budget_to_a_dead_node_frees_it():
    job = a_running_job(
        spec={"failurePolicy": {"maxDisruptions": 0}},
        unreachable_nodes=(UnreachableNode("node-1", at(-60)),),
    )
    plan = plan_for(job, *BOTH_RUN, nodes=UNREACHABLE)
    assert plan.status.has(Condition.FAILED)
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    assert forced(plan) == ["digits-0-1"]
