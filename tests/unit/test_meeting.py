"""The status of a gang with all containers running, before its workers have met."""

import pytest
from builders.containers import running, starting, succeeded, trainer_status, waiting
from builders.jobs import a_running_job, condition
from builders.nodes import a_node, nodes_of
from builders.plans import plan_for, written
from builders.pods import a_pod, an_agents_pod
from builders.surroundings import not_ready
from builders.times import NOW, at

from ddpjob.core.api.history import UnreachableNode
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason

FIRST = a_running_job(ran=False)
EARLY = starting(since=at(-300))
WITHOUT_TIME = {"phase": "Running", **trainer_status({"running": {}})}


def a_gang_in_place(grace=45, **fields):
    """Return a job in attempt 1 with its old pod 0, and the pods of this attempt."""
    fields = {"ran": False, "births": (0, 1), "silent_since": NOW, **fields}
    spec = {"terminationGracePeriodSeconds": grace}
    stayed = an_agents_pod(0, EARLY, attempt=1, born=0, **spec)
    return a_running_job(attempt=1, **fields), stayed, a_pod(1, starting(), attempt=1, **spec)


# (a job and its pods, the seconds after the start of the last container, the reason)

REASONS = {
    "the last container has run for less than a minute": (
        (FIRST, a_pod(0, EARLY), a_pod(1, starting())),
        59,
        Reason.STARTING,
    ),
    "all containers have run for a minute": (
        (FIRST, a_pod(0, EARLY), a_pod(1, starting())),
        60,
        Reason.WAITING_FOR_PEERS,
    ),
    "after a restart, less than a minute": (
        (a_running_job(attempt=1, ran=False), *(a_pod(i, starting(), attempt=1) for i in (0, 1))),
        59,
        Reason.STARTING,
    ),
    "after a restart": (
        (a_running_job(attempt=1, ran=False), *(a_pod(i, starting(), attempt=1) for i in (0, 1))),
        60,
        Reason.WAITING_FOR_PEERS,
    ),
    "in place, less than a minute": (a_gang_in_place(), 59, Reason.STARTING),
    "in place": (a_gang_in_place(), 60, Reason.WAITING_FOR_PEERS),
    "in place, at the first look": (a_gang_in_place(silent_since=None), 60, Reason.STARTING),
    "in place, with ranks that may write for 10 minutes": (
        a_gang_in_place(grace=600),
        60 + 554,
        Reason.STARTING,
    ),
    "in place, after these 10 minutes": (
        a_gang_in_place(grace=600),
        60 + 555,
        Reason.WAITING_FOR_PEERS,
    ),
    "one pod is ready": (
        (FIRST, a_pod(0, running()), a_pod(1, starting())),
        60,
        Reason.WAITING_FOR_PEERS,
    ),
    "one pod has succeeded alone": (
        (FIRST, a_pod(0, succeeded()), a_pod(1, starting())),
        60,
        Reason.WAITING_FOR_PEERS,
    ),
    "a container does not run": (
        (FIRST, a_pod(0, starting()), a_pod(1, waiting())),
        60,
        Reason.STARTING,
    ),
    "a pod looks lost": (
        (FIRST, a_pod(0, starting()), a_pod(1, not_ready(running()))),
        60,
        Reason.STARTING,
    ),
    "the gang has met before": (
        (a_running_job(), a_pod(0, running()), a_pod(1, starting())),
        60,
        Reason.NODES_RUNNING,
    ),
    "one node has no peers": (
        (a_running_job(nodes=1, ran=False), a_pod(0, starting())),
        60,
        Reason.STARTING,
    ),
    "no kubelet says when the containers were started": (
        (FIRST, a_pod(0, WITHOUT_TIME), a_pod(1, WITHOUT_TIME)),
        60,
        Reason.STARTING,
    ),
}


@pytest.mark.parametrize(("gang", "seconds", "reason"), REASONS.values(), ids=REASONS)
def test_the_reason_of_a_gang_that_has_not_met(gang, seconds, reason):
    status = plan_for(*gang, now=at(seconds)).status
    assert status.reason == reason
    assert condition(status, Condition.RUNNING)["reason"] == reason


def test_the_message_names_the_pods_and_where_to_look():
    plan = plan_for(FIRST, a_pod(0, starting()), a_pod(1, starting()), now=at(60))
    assert plan.status.phase == Phase.STARTING
    assert plan.status.message == (
        "0 of 2 nodes are ready; all containers have run for at least 60 s, and digits-0-0, "
        "digits-0-1 have not met the others (log: kubectl -n ml logs digits-0-0 -c trainer). Usual "
        "causes: a NetworkPolicy or a service mesh keeps the pods apart; the cluster's DNS does "
        "not answer; the arguments or the script set another number of nodes, or a rendezvous of "
        "their own"
    )


def test_the_message_names_only_pods_that_have_not_met():
    plan = plan_for(FIRST, a_pod(0, running()), a_pod(1, starting()), now=at(60))
    assert "and digits-0-1 has not met the others (log:" in plan.status.message


def test_the_message_names_some_of_many_pods():
    job = a_running_job(nodes=1000, ran=False)
    pods = [a_pod(index, starting()) for index in range(1000)]
    message = plan_for(job, *pods, now=at(60)).status.message
    assert "digits-0-0, digits-0-1, digits-0-2, digits-0-3, digits-0-4 and 995 more" in message


def test_an_unreachable_node_explains_it():
    nodes = nodes_of(a_node("node-0"), a_node("node-1", "Unknown"))
    job = a_running_job(ran=False, unreachable_nodes=(UnreachableNode("node-1", at(55)),))
    pods = a_pod(0, starting()), a_pod(1, starting())
    status = plan_for(job, *pods, now=at(60), nodes=nodes).status
    assert status.reason == Reason.STARTING
    assert "pod digits-0-1 is on node-1" in status.message


def test_nothing_is_done_about_it():
    pods = a_pod(0, starting()), a_pod(1, starting())
    plan = plan_for(FIRST, *pods, now=at(3600))
    assert (plan.new_pods, plan.delete, plan.events) == ((), (), ())


def test_the_start_up_deadline_has_the_same_words():
    job = a_running_job(ran=False, starting_since=NOW, spec={"startupDeadlineSeconds": 90})
    plan = plan_for(job, a_pod(0, starting()), a_pod(1, starting()), now=at(90))
    assert plan.status.reason == Reason.STARTUP_DEADLINE
    assert "a NetworkPolicy or a service mesh keeps the pods apart" in plan.status.message


def test_a_gang_that_meets_late_runs():
    pods = a_pod(0, starting()), a_pod(1, starting())
    job = written(FIRST, plan_for(FIRST, *pods, now=at(60)))
    pods = a_pod(0, running()), a_pod(1, running())
    assert plan_for(job, *pods, now=at(100)).status.reason == Reason.NODES_RUNNING
