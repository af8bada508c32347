"""The memory of a status: the last ten attempts, and the Kubernetes nodes of their failures."""

import pytest
from builders.containers import ended, failed, oom_killed, running, succeeded
from builders.jobs import a_job, a_running_job, a_status
from builders.messages import follower_summary, slow_rank_summary, torchrun_summary, torchrun_tail
from builders.nodes import a_node, nodes_of
from builders.plans import plan_for, written
from builders.pods import a_pod
from builders.surroundings import rejected_by_kubelet, unschedulable
from builders.times import NOW, at

from ddpjob.core.api.history import (
    MAX_ATTEMPT_MESSAGE,
    MAX_NODES_LISTED,
    EndedAttempt,
    FailedNode,
    count_failed_node,
    forget_old_failures,
)
from ddpjob.core.render.objects import pods as render_pods
from ddpjob.core.render.pod_context import Settings

ONE_FAILED = (a_pod(0, running()), a_pod(1, failed(torchrun_summary(1), when=at(4))))
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


# The last attempts


def test_a_failed_attempt_is_kept_with_its_cause_its_place_and_its_times():
    plan = plan_for(a_running_job(), *ONE_FAILED, now=at(9))
    assert plan.status.to_dict()["attempts"] == [
        {
            "attempt": 0,
            "cause": "Failure",
            "reason": "WorkerFailed",
            "message": "rank 1 in pod digits-0-1 failed with exit code 1: ValueError: boom",
            "node": "node-1",
            "pod": "digits-0-1",
            "rank": 1,
            "exitCode": 1,
            "start": "2026-11-21T12:00:00Z",
            "runningTime": "2026-11-21T12:00:00Z",
            "end": "2026-11-21T12:00:09Z",
        },
    ]


WAYS_TO_END = {
    "Failure": (a_running_job(), ONE_FAILED),
    "Disruption": (a_running_job(), (a_pod(0, running()),)),
    "Rendezvous": (
        a_running_job(ran=False, undecided_since=at(-10)),
        (a_pod(0, failed(torchrun_tail("rendezvous-timeout"))), a_pod(1, unschedulable())),
    ),
    "Resized": (a_running_job(spec={"nodes": 3}), (a_pod(0, running()), a_pod(1, running()))),
    "Suspended": (
        a_running_job(spec={"suspend": True}),
        (a_pod(0, running()), a_pod(1, running())),
    ),
    "Stopped": (
        a_running_job(active_since=at(-9), spec={"activeDeadlineSeconds": 9}),
        (a_pod(0, running()), a_pod(1, running())),
    ),
    "Succeeded": (a_running_job(), (a_pod(0, succeeded()), a_pod(1, succeeded()))),
}


@pytest.mark.parametrize("cause", WAYS_TO_END)
def test_each_way_to_end_has_a_cause_a_reason_a_message_and_an_end(cause):
    job, pods = WAYS_TO_END[cause]
    (entry,) = plan_for(job, *pods).status.attempts
    assert (entry.attempt, entry.cause) == (0, cause)
    assert entry.reason
    assert entry.message
    assert entry.end == NOW


def test_the_newest_attempt_comes_first_and_ten_are_kept():
    older = tuple(EndedAttempt(attempt) for attempt in range(10, 0, -1))
    job = a_running_job(attempt=11, attempts=older)
    pods = [a_pod(index, running(), attempt=11) for index in range(1)]
    attempts = [entry.attempt for entry in plan_for(job, *pods).status.attempts]
    assert attempts == [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]


def test_the_message_of_an_attempt_is_short():
    error = torchrun_summary(1, error="ValueError: " + "x" * 400)
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, failed(error)))
    assert len(plan.status.attempts[0].message) == MAX_ATTEMPT_MESSAGE
    assert len(plan.status.last_failure.message) > MAX_ATTEMPT_MESSAGE


def test_a_job_that_fails_keeps_its_last_attempt_too():
    job = a_running_job(failures=3)
    status = plan_for(job, *ONE_FAILED).status
    assert [entry.attempt for entry in status.attempts] == [0]


def test_an_attempt_is_not_in_the_history_while_it_runs():
    status = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, running())).status
    assert status.attempts == ()


def test_budgets_do_not_depend_on_the_history():
    job = a_running_job(failures=3, attempts=())
    assert plan_for(job, *ONE_FAILED).status.finished
    job = a_running_job(attempts=tuple(EndedAttempt(0, "Failure") for _ in range(10)))
    assert plan_for(job, *ONE_FAILED).status.attempt.number == 1


# Kubernetes nodes of failed attempts


def failed_on(job, node, *, attempt=0, now=NOW, status=None):
    """Return the job after an attempt failed on a Kubernetes node."""
    broken = status or failed(torchrun_summary(1))
    pods = [
        a_pod(0, running(), attempt=attempt),
        a_pod(1, broken, attempt=attempt, nodeName=node),
    ]
    return written(job, plan_for(job, *pods, now=now))


def test_the_second_failure_on_a_node_makes_the_next_attempts_avoid_it():
    job = failed_on(a_running_job(), "gpu-7")
    assert [node.is_avoided for node in job.status.failed_nodes] == [False]
    job = failed_on(job, "gpu-7", attempt=1, now=at(60))
    assert job.status.failed_nodes == (FailedNode("gpu-7", 2, at(60)),)
    assert avoided_by_pods(job) == ["gpu-7"]


def test_failures_on_different_nodes_make_none_of_them_avoided():
    job = failed_on(a_running_job(), "gpu-7")
    job = failed_on(job, "gpu-8", attempt=1)
    assert [node.name for node in job.status.failed_nodes] == ["gpu-8", "gpu-7"]
    assert avoided_by_pods(job) == []


@pytest.mark.parametrize(
    ("status", "is_counted"),
    [
        (oom_killed(), True),
        (ended(1, "no summary"), True),
        (rejected_by_kubelet(), True),
        (rejected_by_kubelet("OutOfcpu"), True),
        (rejected_by_kubelet("NodeShutdown"), False),
        (ended(255, reason="Unknown"), False),
    ],
)
def test_a_node_is_counted_for_failures_and_for_pods_that_its_kubelet_refuses(status, is_counted):
    job = a_running_job(undecided_since=at(-10))
    assert bool(failed_on(job, "gpu-7", status=status).status.failed_nodes) is is_counted


def test_a_deleted_pod_says_nothing_about_its_node():
    plan = plan_for(a_running_job(), a_pod(0, running()), a_pod(1, running(), deleted_at=NOW))
    assert plan.status.failed_nodes == ()


def test_a_follower_says_nothing_about_its_node():
    ends = (failed(follower_summary(0)), failed(slow_rank_summary(1)))
    pods = [a_pod(index, end, nodeName="gpu-7") for index, end in enumerate(ends)]
    plan = plan_for(a_running_job(), *pods)
    assert (plan.status.budget.failures, plan.status.failed_nodes) == (1, ())


def test_a_pod_that_is_gone_has_no_node_to_avoid():
    assert plan_for(a_running_job(), a_pod(0, running())).status.failed_nodes == ()


def test_a_failure_is_forgotten_after_an_hour():
    nodes = (FailedNode("gpu-7", 2, NOW),)
    assert forget_old_failures(nodes, at(3600)) == nodes
    assert forget_old_failures(nodes, at(3601)) == ()


def test_a_new_attempt_no_longer_avoids_a_node_after_an_hour():
    job = a_running_job(failed_nodes=(FailedNode("gpu-7", 5, NOW),))
    plan = plan_for(job, a_pod(0, running()), now=at(3601))
    assert plan.status.failed_nodes == ()


def test_a_failure_after_an_hour_is_the_first_one_again():
    job = a_running_job(failed_nodes=(FailedNode("gpu-7", 5, NOW),))
    job = failed_on(job, "gpu-7", now=at(3601))
    assert job.status.failed_nodes == (FailedNode("gpu-7", 1, at(3601)),)


def test_the_nodes_are_kept_while_an_attempt_runs():
    nodes = (FailedNode("gpu-7", 2, NOW),)
    job = a_running_job(failed_nodes=nodes)
    plan = plan_for(job, a_pod(0, running()), a_pod(1, running()), now=at(10**5))
    assert plan.status.failed_nodes == nodes


def test_a_clock_that_was_set_back_forgets_nothing():
    job = a_running_job(failed_nodes=(FailedNode("gpu-7", 2, at(7200)),))
    assert plan_for(job, a_pod(0, running())).status.failed_nodes == (FailedNode("gpu-7", 2, NOW),)


def test_the_list_of_nodes_is_bounded():
    nodes = tuple(FailedNode(f"gpu-{number}", 1, NOW) for number in range(MAX_NODES_LISTED))
    listed = count_failed_node(nodes, "new", at(1))
    assert len(listed) == MAX_NODES_LISTED
    assert listed[0] == FailedNode("new", 1, at(1))


# What the pods then have


def pods_of(job):
    return list(render_pods(job, range(job.status.pods.desired), Settings()))


def avoided_by_pods(job):
    """Return the host names that the pods of a job wish to avoid."""
    (pod, *_) = pods_of(job)
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    found = []
    for wish in affinity.get(PREFERRED, []):
        for expression in wish["preference"]["matchExpressions"]:
            assert (expression["key"], expression["operator"]) == (
                "kubernetes.io/hostname",
                "NotIn",
            )
            found += expression["values"]
    return found


def test_avoiding_a_node_is_a_wish_and_the_users_affinity_stays():
    term = {
        "weight": 5,
        "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]},
    }
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
    affinity = {"nodeAffinity": {PREFERRED: [term], REQUIRED: required}, "podAffinity": {"x": 1}}
    status = a_status(failed_nodes=(FailedNode("gpu-7", 2, NOW),))
    (pod, *_) = pods_of(a_job(status=status, affinity=affinity))
    rendered = pod["spec"]["affinity"]
    assert rendered["podAffinity"] == {"x": 1}
    assert rendered["nodeAffinity"][REQUIRED] == required
    assert rendered["nodeAffinity"][PREFERRED][0] == term
    assert rendered["nodeAffinity"][PREFERRED][1]["weight"] == 100


def test_without_a_bad_node_the_pods_have_no_affinity():
    status = a_status(failed_nodes=(FailedNode("gpu-7", 1, NOW),))
    (pod, *_) = pods_of(a_job(status=status))
    assert "affinity" not in pod["spec"]


def test_an_unreachable_node_is_not_one_on_which_the_job_failed():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "Unknown"))
    pods = a_pod(0, running()), a_pod(1, running())
    job = written(a_running_job(), plan_for(a_running_job(), *pods, nodes=nodes))
    assert plan_for(job, *pods, nodes=nodes, now=at(30)).status.failed_nodes == ()
