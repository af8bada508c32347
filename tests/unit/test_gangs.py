"""Of two gangs that fit only in part, the younger gives its pods back to the older."""

from datetime import timedelta

import pytest
from builders import (
    NOW,
    a_condition,
    a_job,
    a_pod,
    a_running_job,
    a_status,
    at,
    budgets_used,
    deleted_pods,
    plan_for,
    read_pods,
    running,
    scheduling_gated,
    succeeded,
    unschedulable,
    waiting,
    written,
)

from ddpjob.core.gangs import find_older_gang, holds_room
from ddpjob.core.history import Yielding
from ddpjob.core.job import Job
from ddpjob.core.names import Condition, Phase, Reason
from ddpjob.core.observe import ClusterPolicy, Refusal
from ddpjob.core.restarts import YIELD_TIME
from ddpjob.core.status import PodCounts
from ddpjob.core.timers import QUOTA_TIMEOUT
from ddpjob.core.times import format_time

QUOTA = Refusal(Reason.QUOTA, "exceeded quota", at(60))
POLICY = ClusterPolicy(gang_timeout=timedelta(seconds=600))
HALF = (a_pod(0, running()), a_pod(1, unschedulable("no room")))


# Which gang is in the way


def a_gang(name, *, created=0, reason=Reason.UNSCHEDULABLE, active=1, **fields):
    """Return a job that fits only in part, `created` seconds after NOW."""
    status = a_status(
        ran=False,
        reason=str(reason),
        starting_since=NOW,
        pods=PodCounts(desired=2, active=active),
    )
    namespace = fields.pop("namespace", "ml")
    status = type(status)(**{**vars(status), **fields})
    job = a_job(name=name, status=status)
    return Job(**{**vars(job), "created": at(created), "uid": name, "namespace": namespace})


def test_the_oldest_incomplete_gang_is_in_the_way():
    others = [a_gang("second", created=20), a_gang("first", created=10)]
    assert find_older_gang(a_gang("third", created=30), others) == "ml/first"


def test_a_younger_gang_is_not_in_the_way():
    assert find_older_gang(a_gang("first"), [a_gang("second", created=1)]) == ""


def test_of_two_gangs_of_the_same_second_exactly_one_gives_way():
    one, two = a_gang("a"), a_gang("b")
    found = [find_older_gang(one, [two]), find_older_gang(two, [one])]
    assert sorted(found) == ["", "ml/a"]


OTHERS = {
    "it runs": {"starting_since": None},
    "it is finished": {"conditions": a_condition(Condition.COMPLETE)},
    "it waits for something else": {"reason": Reason.IMAGE_PULL},
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_an_older_job_is_not_in_the_way_if(fields):
    assert find_older_gang(a_gang("younger", created=10), [a_gang("older", **fields)]) == ""


@pytest.mark.parametrize("reason", [Reason.QUOTA, Reason.UNSCHEDULABLE])
def test_gangs_may_wait_for_each_other_for_different_reasons(reason):
    younger = a_gang("younger", created=10, reason=reason)
    (other,) = {Reason.QUOTA, Reason.UNSCHEDULABLE} - {reason}
    assert find_older_gang(younger, [a_gang("older", reason=other)]) == "ml/older"


@pytest.mark.parametrize("reason", [Reason.QUOTA, Reason.UNSCHEDULABLE])
def test_a_gang_holds_room_if_it_has_what_others_need(reason):
    gang = a_gang("gang", reason=reason)
    placed, unplaced, over = read_pods(
        a_pod(0, running()), a_pod(1, unschedulable("no room")), a_pod(2, succeeded())
    )
    assert holds_room(gang, [placed])
    assert holds_room(gang, [unplaced]) is (reason == Reason.QUOTA)
    assert not holds_room(gang, [over])


@pytest.mark.parametrize(
    ("reason", "found"), [(Reason.QUOTA, ""), (Reason.UNSCHEDULABLE, "other/older")]
)
def test_a_quota_is_shared_within_a_namespace_and_the_cluster_by_all(reason, found):
    younger = a_gang("younger", created=10, reason=reason)
    older = a_gang("older", reason=reason, namespace="other")
    assert find_older_gang(younger, [older]) == found


def test_a_gang_that_gave_way_waits_until_the_older_one_runs():
    younger = a_gang(
        "younger", created=10, reason=Reason.YIELDED, yielding=Yielding("ml/older", at(600))
    )
    starting = a_gang("older", reason=Reason.STARTING)
    running_gang = a_gang("older", reason=Reason.NODES_RUNNING, starting_since=None)
    assert find_older_gang(younger, [starting]) == "ml/older"
    assert find_older_gang(younger, [running_gang]) == ""


def test_a_gang_does_not_wait_for_a_job_that_was_deleted():
    younger = a_gang("younger", created=10, yielding=Yielding("ml/older", at(600)))
    assert find_older_gang(younger, []) == ""


# Giving way


def a_half_gang(**fields):
    """Return a job whose attempt has waited for its nodes since NOW."""
    return a_running_job(ran=False, starting_since=NOW, **fields)


def test_on_a_full_cluster_the_younger_gang_gives_way_after_the_gang_timeout():
    early = plan_for(a_half_gang(), *HALF, older_gang="ml/older", policy=POLICY, now=at(599))
    assert (early.delete, early.wake_after) == ((), 1)
    plan = plan_for(a_half_gang(), *HALF, older_gang="ml/older", policy=POLICY, now=at(600))
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    assert (plan.status.attempt, budgets_used(plan)) == (1, (0, 0))
    assert plan.status.reason == Reason.YIELDED
    assert plan.status.yielding == Yielding("ml/older", at(600) + YIELD_TIME)
    assert plan.status.message == (
        "only 1 of 2 pods had room; all are deleted to make room for the older job ml/older, which "
        "is incomplete too"
    )
    assert [event.reason for event in plan.events] == ["YieldedToOlderJob"]


def test_without_an_older_gang_pods_wait_for_ever_for_an_autoscaler():
    plan = plan_for(a_half_gang(), *HALF, policy=POLICY, now=at(10**6))
    assert (plan.delete, plan.status.reason) == ((), Reason.UNSCHEDULABLE)


def test_under_a_quota_the_younger_gang_gives_way_after_20_seconds():
    job = a_half_gang(latched=False)
    moment = NOW + QUOTA_TIMEOUT
    plan = plan_for(job, a_pod(0), older_gang="ml/older", refusal=QUOTA, now=moment)
    assert deleted_pods(plan) == ["digits-0-0"]
    assert plan.status.yielding


def test_pods_that_wait_under_a_quota_without_an_older_gang_stay():
    job = a_half_gang(latched=False)
    plan = plan_for(job, a_pod(0), refusal=QUOTA, now=at(600))
    assert (plan.delete, plan.status.reason) == ((), Reason.QUOTA)


@pytest.mark.parametrize(
    "pods",
    [
        (a_pod(0, running()), a_pod(1, waiting())),
        (a_pod(0, running()), a_pod(1, running())),
        (a_pod(0, scheduling_gated()), a_pod(1, scheduling_gated())),
    ],
    ids=["starting", "running", "gated"],
)
def test_a_gang_that_has_room_or_holds_none_does_not_give_way(pods):
    plan = plan_for(a_half_gang(), *pods, older_gang="ml/older", policy=POLICY, now=at(10**6))
    assert (plan.delete, plan.status.attempt) == ((), 0)


def test_a_gang_that_trains_does_not_give_way():
    pods = a_pod(0, running()), a_pod(1, running())
    plan = plan_for(a_running_job(), *pods, older_gang="ml/older", policy=POLICY, now=at(10**6))
    assert (plan.delete, plan.status.phase) == ((), Phase.RUNNING)


# Waiting


def a_yielding_job(until=600, **fields):
    return a_running_job(
        attempt=1, latched=False, ran=False, yielding=Yielding("ml/older", at(until)), **fields
    )


def test_a_gang_that_gave_way_names_the_older_job_that_is_incomplete_now():
    plan = plan_for(a_yielding_job(), older_gang="ml/another", now=at(10))
    assert plan.status.message.startswith("waits until the older job ml/another runs")


def test_a_gang_that_gave_way_creates_no_pods_and_says_why():
    job = a_yielding_job()
    plan = plan_for(job, older_gang="ml/older", now=at(10))
    assert (plan.create, plan.wake_after) == ((), 5)
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.YIELDED)
    assert plan.status.message == (
        "waits until the older job ml/older runs, which needs the same room; at most until "
        f"{format_time(job.status.yielding.until)}"
    )
    again = plan_for(written(job, plan), older_gang="ml/older", now=at(15))
    assert again.status == plan.status


def test_a_gang_that_gave_way_begins_when_the_older_one_runs():
    plan = plan_for(a_yielding_job(), older_gang="", now=at(10))
    assert plan.create == (0, 1)
    assert plan.status.yielding is None


def test_a_gang_that_gave_way_tries_again_after_10_minutes():
    assert timedelta(minutes=10) == YIELD_TIME
    assert plan_for(a_yielding_job(), older_gang="ml/older", now=at(600)).create == (0, 1)
    assert plan_for(a_yielding_job(), older_gang="ml/older", now=at(601)).create == (0, 1)


def test_a_gang_that_gave_way_before_the_clock_was_set_back_waits_ten_minutes_from_then_on():
    job = a_yielding_job(until=86400)
    plan = plan_for(job, older_gang="ml/older", now=at(10))
    assert (plan.create, plan.status.yielding.until) == ((), at(10) + YIELD_TIME)
    late = plan_for(written(job, plan), older_gang="ml/older", now=at(10) + YIELD_TIME)
    assert late.create == (0, 1)


def test_the_time_to_start_does_not_run_while_a_gang_gives_way():
    job = a_yielding_job(spec={"startupDeadlineSeconds": 5})
    assert plan_for(job, older_gang="ml/older", now=at(300)).status.starting_since is None


def test_a_gang_that_gave_way_first_waits_for_its_own_pods_to_end():
    pods = [a_pod(index, running(), deleted_at=NOW) for index in range(2)]
    plan = plan_for(a_yielding_job(), *pods, older_gang="ml/older")
    assert plan.status.reason == Reason.WAITING_FOR_OLD_PODS


def test_the_first_pod_of_a_gang_that_gave_way_shows_the_quota_again():
    job = a_yielding_job()
    plan = plan_for(job, older_gang="", refusal=QUOTA, now=at(10))
    assert (plan.create, plan.status.reason) == ((), Reason.QUOTA)
