"""If two gangs fit only in part, the younger gives its pods back to the older."""

from dataclasses import replace
from datetime import timedelta
from itertools import permutations

import pytest
from builders.containers import running, waiting
from builders.jobs import a_condition, a_job, a_running_job, a_status, changed
from builders.plans import budgets_used, deleted_pods, plan_for, written
from builders.pods import a_pod, read_pods
from builders.surroundings import scheduling_gated, unschedulable
from builders.times import NOW, at
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core.api.history import OlderGang, Yielding
from ddpjob.core.api.names import Condition, Identity, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.times import format_time
from ddpjob.core.decide.gangs import Contests, older_gang, read_gang
from ddpjob.core.decide.restarts import YIELD_TIME
from ddpjob.core.decide.timers import QUOTA_TIMEOUT
from ddpjob.core.observe.observation import ClusterPolicy, Refusal

QUOTA = Refusal(Reason.QUOTA, "exceeded quota", at(60))
POLICY = ClusterPolicy(gang_timeout=timedelta(seconds=600))
OLDER = OlderGang("uid-of-older", "older")
HALF = (a_pod(0, running()), a_pod(1, unschedulable("no room")))


# The gang in the way


GPU = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
NO_GPU = unschedulable(
    "0/3 nodes are available: 1 node(s) had an untolerated taint, 2 Insufficient nvidia.com/gpu."
)


def a_gang(name, created=0, *, placed=GPU, pending=GPU, **fields):
    """Return a gang of one pod with a node and one without, created `created` s after NOW.

    `placed` and `pending` are fields of the pods' spec, with those of the container. `why` explains
    why the second pod has no node. Other fields are fields of the status.
    """
    why, namespace = fields.pop("why", NO_GPU), fields.pop("namespace", "ml")
    refusal = fields.pop("refusal", None)
    values = {"starting_since": NOW, **fields}
    job = a_job(name=name, status=a_status(ran=False, **values))
    job = replace(job, created=at(created), uid=f"uid-of-{name}", namespace=namespace)
    pods = (a_pod(0, running(), **pod_spec(placed)), a_pod(1, why, **pod_spec(pending)))
    return read_gang(job, read_pods(*pods), refusal)


def pod_spec(fields):
    fields = dict(fields)
    container = {"name": "trainer", "resources": fields.pop("resources", {})}
    return {"containers": [container], **fields}


def in_the_way(younger, *others):
    """Return the name of the job in the way of `younger`, whatever the order of the looks."""
    found = set()
    for order in permutations([younger, *others]):
        contests = Contests()
        for gang in order:
            contests.see(gang)
        found.add(contests.in_the_way_of(younger))
    (older,) = found
    return older and older.name


def test_the_oldest_incomplete_gang_is_in_the_way():
    first, second, third = a_gang("first", 10), a_gang("second", 20), a_gang("third", 30)
    assert in_the_way(third, first, second) == "first"
    assert in_the_way(second, first, third) == "first"
    assert in_the_way(first, second, third) is None


def test_of_two_gangs_of_the_same_second_exactly_one_gives_way():
    one, two = a_gang("a"), a_gang("b")
    assert (in_the_way(one, two), in_the_way(two, one)) == (None, "a")


ZONE = {"nodeSelector": {"zone": "a"}}
POOL = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "p", "operator": "In", "values": ["x"]}]}
                ]
            }
        }
    }
}
WISH = {
    "affinity": {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]
        }
    }
}
TOLERATION = {"tolerations": [{"key": "gpu", "operator": "Exists"}]}
HIGH = {"priority": 1000}

# An older gang, by why a younger one with GPUs need not give way to it.
OTHERS = {
    "it runs": {"starting_since": None},
    "it is finished": {"conditions": a_condition(Condition.COMPLETE)},
    "it waits for something else": {"why": waiting("ErrImagePull")},
    "it lacks another resource": {
        "why": unschedulable("0/3 nodes are available: 3 Insufficient cpu.")
    },
    "no node is the right one": {
        "why": unschedulable("0/3 nodes are available: 3 node(s) didn't match")
    },
    "it needs other nodes by a selector": {"pending": GPU | ZONE},
    "it needs other nodes by affinity": {"pending": GPU | POOL},
    "it needs other nodes by a toleration": {"pending": GPU | TOLERATION},
    "it lacks a quota of its own namespace": {
        "namespace": "other",
        "refusal": QUOTA,
        "why": waiting(),
    },
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_an_older_job_is_not_in_the_way_if(fields):
    younger = a_gang("younger", 10)
    assert in_the_way(younger, a_gang("older")) == "older"
    assert in_the_way(younger, a_gang("older", **fields)) is None


def test_a_gang_without_the_resource_that_an_older_one_lacks_keeps_its_pods():
    cpu = {"resources": {"requests": {"cpu": "1"}}}
    younger = a_gang(
        "younger", 10, placed=cpu, pending=cpu, why=unschedulable("3 Insufficient cpu")
    )
    assert in_the_way(younger, a_gang("older")) is None


def test_a_wish_about_nodes_changes_nothing():
    assert in_the_way(a_gang("younger", 10, placed=GPU | WISH), a_gang("older")) == "older"


def test_a_gang_gives_way_to_none_of_a_lower_priority():
    high = a_gang("younger", 10, placed=GPU | HIGH, pending=GPU | HIGH)
    assert in_the_way(high, a_gang("older")) is None
    older = a_gang("older", placed=GPU | HIGH, pending=GPU | HIGH)
    assert in_the_way(a_gang("younger", 10), older) == "older"
    assert in_the_way(high, older, a_gang("oldest", -10)) == "older"


def test_too_many_pods_are_a_lack_that_every_pod_is_part_of():
    full = unschedulable("0/2 nodes are available: 2 Too many pods.")
    assert in_the_way(a_gang("younger", 10), a_gang("older", why=full)) == "older"


UNDER_QUOTA = {"refusal": QUOTA, "why": waiting()}


def test_gangs_may_wait_for_each_other_for_different_reasons():
    assert in_the_way(a_gang("younger", 10, **UNDER_QUOTA), a_gang("older")) == "older"
    assert in_the_way(a_gang("younger", 10), a_gang("older", **UNDER_QUOTA)) == "older"


def test_a_quota_is_shared_within_a_namespace():
    younger = a_gang("younger", 10, **UNDER_QUOTA)
    assert in_the_way(younger, a_gang("older", **UNDER_QUOTA)) == "older"
    assert in_the_way(younger, a_gang("older", namespace="other", **UNDER_QUOTA)) is None


def test_a_gang_under_a_quota_holds_nodes_for_jobs_of_its_namespace_only():
    younger = a_gang("younger", 10, **UNDER_QUOTA)
    assert in_the_way(younger, a_gang("older", namespace="other")) is None
    oldest = a_gang("oldest", -10, namespace="other")
    assert in_the_way(younger, a_gang("older"), oldest) == "older"
    assert in_the_way(a_gang("younger", 10), a_gang("older", namespace="other")) == "older"


def test_a_gang_that_lacks_nothing_is_in_nobodys_way():
    gang = a_gang("gang", why=running())
    assert (gang.lacks, gang.holds) == (frozenset(), frozenset())


def test_gangs_that_changed_or_went_are_in_the_way_no_more():
    contests, younger = Contests(), a_gang("younger", 10)
    for gang in (a_gang("older"), a_gang("oldest", -10), younger):
        contests.see(gang)
    assert contests.in_the_way_of(younger).name == "oldest"
    contests.see(a_gang("oldest", -10, starting_since=None))
    assert contests.in_the_way_of(younger).name == "older"
    contests.forget(a_gang("older").job)
    assert contests.in_the_way_of(younger) is None
    contests.forget(younger.job)
    assert contests == Contests()


@given(st.data())
def test_the_oldest_is_that_of_a_search_through_all(data):
    contests, known = Contests(), {}
    kinds = [GPU, GPU | ZONE, GPU | HIGH, GPU | ZONE | HIGH]
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from("abcdefgh"))
        if data.draw(st.booleans()):
            spec = data.draw(st.sampled_from(kinds))
            since = data.draw(st.sampled_from([NOW, NOW, None]))
            gang = a_gang(name, ord(name), placed=spec, pending=spec, starting_since=since)
            contests.see(gang)
            known[name] = gang
        elif name in known:
            contests.forget(known.pop(name).job)
    for gang in known.values():
        others = [
            (other.age, other.job)
            for other in known.values()
            if other.lacks & gang.holds and gang.lacks and other.holds
            if other.priority >= gang.priority and other.age < gang.age
        ]
        assert contests.in_the_way_of(gang) == min(others, default=(None, None))[1]


def test_a_look_at_one_of_many_pending_jobs_is_no_search(monkeypatch):
    contests = Contests()
    gangs = [a_gang(f"j{number}", number) for number in range(100)]
    for number in range(3000):
        gang = gangs[number % 100]
        job = gang.job._replace(uid=f"u{number}")
        contests.see(replace(gang, job=job, age=(gang.age[0], job.uid)))
    compared = 0

    class Counting(Identity):
        def __hash__(self):
            nonlocal compared
            compared += 1
            return super().__hash__()

    last = replace(gangs[-1], job=Counting("ml", "last", "z"), age=(gangs[-1].age[0], "z"))
    contests.see(last)
    assert contests.in_the_way_of(last).name == "j0"
    assert compared < 20


# The job in the way, as its younger rival may know it


def test_a_gang_that_gave_way_waits_until_the_older_one_runs():
    younger = a_job(name="younger", status=a_status(yielding=Yielding("uid-of-older", at(600))))
    older = a_job(name="older", status=a_status(ran=False, starting_since=NOW))
    older = replace(older, uid="uid-of-older", namespace=younger.namespace)
    assert older_gang(younger, None, older) == OlderGang("uid-of-older", "older")
    runs = replace(older, status=changed(older.status, starting_since=None))
    assert older_gang(younger, None, runs) is None
    assert older_gang(younger, None, None) is None


def test_the_name_of_a_job_in_another_namespace_is_not_told():
    job = a_job()
    there = older_gang(job, Identity("secret", "llm", "u"), None)
    assert (there.uid, str(there)) == ("u", "an older job of another namespace")
    here = older_gang(job, Identity(job.namespace, "llm", "u"), None)
    assert str(here) == "the older job llm"


# Giving way


def a_half_gang(**fields):
    """Return a job with an attempt that has waited for its nodes since NOW."""
    return a_running_job(ran=False, starting_since=NOW, **fields)


def test_on_a_full_cluster_the_younger_gang_gives_way_after_the_gang_timeout():
    early = plan_for(a_half_gang(), *HALF, older_gang=OLDER, policy=POLICY, now=at(599))
    assert (early.delete, early.wake_after) == ((), 1)
    plan = plan_for(a_half_gang(), *HALF, older_gang=OLDER, policy=POLICY, now=at(600))
    assert deleted_pods(plan) == ["digits-0-0", "digits-0-1"]
    assert (plan.status.attempt.number, budgets_used(plan)) == (1, (0, 0))
    assert plan.status.reason == Reason.YIELDED
    assert plan.status.attempt.yielding == Yielding(OLDER.uid, at(600) + YIELD_TIME)
    assert plan.status.message == (
        "only 1 of 2 pods had room; all are deleted to make room for the older job older, which "
        "is incomplete too"
    )
    assert [event.reason for event in plan.events] == ["YieldedToOlderJob"]


def test_without_an_older_gang_pods_wait_for_ever_for_an_autoscaler():
    plan = plan_for(a_half_gang(), *HALF, policy=POLICY, now=at(10**6))
    assert (plan.delete, plan.status.reason) == ((), Reason.UNSCHEDULABLE)


def test_under_a_quota_the_younger_gang_gives_way_after_20_seconds():
    job = a_half_gang(latched=False)
    moment = NOW + QUOTA_TIMEOUT
    plan = plan_for(job, a_pod(0), older_gang=OLDER, refusal=QUOTA, now=moment)
    assert deleted_pods(plan) == ["digits-0-0"]
    assert plan.status.attempt.yielding


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
    plan = plan_for(a_half_gang(), *pods, older_gang=OLDER, policy=POLICY, now=at(10**6))
    assert (plan.delete, plan.status.attempt.number) == ((), 0)


def test_a_gang_that_trains_does_not_give_way():
    pods = a_pod(0, running()), a_pod(1, running())
    plan = plan_for(a_running_job(), *pods, older_gang=OLDER, policy=POLICY, now=at(10**6))
    assert (plan.delete, plan.status.phase) == ((), Phase.RUNNING)


# Waiting


def a_yielding_job(until=600, **fields):
    return a_running_job(
        attempt=1, latched=False, ran=False, yielding=Yielding(OLDER.uid, at(until)), **fields
    )


def test_a_gang_that_gave_way_names_the_older_job_that_is_incomplete_now():
    plan = plan_for(a_yielding_job(), older_gang=OlderGang("u", "another"), now=at(10))
    assert plan.status.message.startswith("waits until the older job another runs")


def test_a_gang_that_gave_way_creates_no_pods_and_says_why():
    job = a_yielding_job()
    plan = plan_for(job, older_gang=OLDER, now=at(10))
    assert (plan.new_pods, plan.wake_after) == ((), 5)
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.YIELDED)
    assert plan.status.message == (
        "waits until the older job older runs, which needs the same room; at most until "
        f"{format_time(job.status.attempt.yielding.until)}"
    )
    again = plan_for(written(job, plan), older_gang=OLDER, now=at(15))
    assert again.status == plan.status


def test_a_gang_that_gave_way_begins_when_the_older_one_runs():
    plan = plan_for(a_yielding_job(), older_gang=None, now=at(10))
    assert plan.new_pods == (0, 1)
    assert plan.status.attempt.yielding is None


def test_a_gang_that_gave_way_tries_again_after_10_minutes():
    assert timedelta(minutes=10) == YIELD_TIME
    assert plan_for(a_yielding_job(), older_gang=OLDER, now=at(600)).new_pods == (0, 1)
    assert plan_for(a_yielding_job(), older_gang=OLDER, now=at(601)).new_pods == (0, 1)


def test_a_gang_that_gave_way_before_the_clock_was_set_back_waits_ten_minutes_from_then_on():
    job = a_yielding_job(until=86400)
    plan = plan_for(job, older_gang=OLDER, now=at(10))
    assert (plan.new_pods, plan.status.attempt.yielding.until) == ((), at(10) + YIELD_TIME)
    late = plan_for(written(job, plan), older_gang=OLDER, now=at(10) + YIELD_TIME)
    assert late.new_pods == (0, 1)


def test_the_time_to_start_does_not_run_while_a_gang_gives_way():
    job = a_yielding_job(spec={"startupDeadlineSeconds": 5})
    assert plan_for(job, older_gang=OLDER, now=at(300)).status.attempt.starting_since is None


def test_a_gang_that_gave_way_first_waits_for_its_own_pods_to_end():
    pods = [a_pod(index, running(), deleted_at=NOW) for index in range(2)]
    plan = plan_for(a_yielding_job(), *pods, older_gang=OLDER)
    assert plan.status.reason == Reason.WAITING_FOR_OLD_PODS


def test_the_first_pod_of_a_gang_that_gave_way_shows_the_quota_again():
    job = a_yielding_job()
    plan = plan_for(job, older_gang=None, refusal=QUOTA, now=at(10))
    assert (plan.new_pods, plan.status.reason) == ((), Reason.QUOTA)
