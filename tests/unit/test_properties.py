"""What holds in every world, however its pods, users and operators misbehave."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from builders import NOW, a_job, a_manifest, a_pod, at, read
from hypothesis import example, given, settings
from hypothesis import strategies as st
from world import (
    ACCIDENTS,
    LAST,
    ORDINARY,
    World,
    a_world,
    behave,
    everybody_starts,
    operator_looks,
)

from ddpjob.core.causes import judge
from ddpjob.core.decide import decide
from ddpjob.core.job import Job
from ddpjob.core.names import Condition, Phase
from ddpjob.core.observe import Observation, TrainerState, observe
from ddpjob.core.pods import owner_uid, read_pod
from ddpjob.core.status import Status, stamp_conditions

steps = st.tuples(
    st.one_of(st.sampled_from(ORDINARY), st.sampled_from(ACCIDENTS + LAST)), st.integers(0, 11)
)


@st.composite
def worlds(draw) -> World:
    """A world in which the operator looks after most of what happens, but not after all of it."""
    world = a_world(draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    if draw(st.booleans()):
        for action in (operator_looks, everybody_starts, operator_looks):
            action(world, 0)
    for action, choice in draw(st.lists(steps, min_size=6, max_size=30)):
        action(world, choice)
        if choice % 3:
            operator_looks(world, 0)
    return world


def statuses(world: World) -> list[Status]:
    return [look.plan.status for look in world.looks]


def the_end(status: Status) -> Status:
    """What may not change any more: all but the generation that was seen and the count of what still runs."""
    nodes = replace(status.pods, active=0, ready=0)
    return replace(
        status,
        observed_generation=0,
        conditions=stamp_conditions(status.conditions, 0),
        nodes=nodes,
    )


# --- what holds of every history; each takes the world in which it happened


def attempts_restarts_and_disruptions_never_fall(world):
    for old, new in pairwise(statuses(world)):
        assert (new.attempt or 0) >= (old.attempt or 0)
        assert new.restarts >= old.restarts
        assert new.disruptions >= old.disruptions


def a_new_attempt_costs_at_most_one_and_never_more_than_the_budget(world):
    for look in world.looks:
        old, new = look.seen.job.status, look.plan.status
        cost = new.restarts + new.disruptions - old.restarts - old.disruptions
        assert cost in (0, 1)
        assert not cost or new.attempt == old.attempt + 1
    policy = world.manifest["spec"]["failurePolicy"]
    assert world.status.restarts <= policy["maxRestarts"]
    assert world.status.disruptions <= policy["maxDisruptions"]


def finished_never_changes_and_nothing_is_created_for_it(world):
    for look in world.looks:
        old, new = look.seen.job.status, look.plan.status
        if old.finished:
            assert (look.plan.create, look.plan.events) == ((), ())
            assert the_end(new) == the_end(old)


def complete_failed_and_running_exclude_each_other(world):
    for status in statuses(world):
        assert sum(status.has(kind) for kind in Condition) <= 1


def an_attempt_never_has_more_pods_than_nodes_nor_two_of_one_index(world):
    for look in world.looks:
        pods = [(p.attempt, p.index) for p in look.seen.pods]
        assert len(pods) == len(set(pods))
        assert all(
            index < look.seen.job.status.pods.desired
            for index in (p.index for p in look.seen.current)
        )
        assert all(0 <= index < look.plan.status.pods.desired for index in look.plan.create)


def two_attempts_never_live_at_the_same_time(world):
    for look in world.looks:
        assert (
            len(
                {
                    p.attempt
                    for p in look.seen.pods
                    if p.state in (TrainerState.PENDING, TrainerState.RUNNING)
                }
            )
            <= 1
        )
        assert all(p.released for p in look.seen.older) or not look.plan.create


def no_index_is_refilled_after_the_latch(world):
    for look in world.looks:
        if look.plan.create and look.seen.job.status.attempt is not None:
            assert not look.seen.latched


def a_node_that_is_done_is_lost_to_nobody(world):
    for look in world.looks:
        old, new = look.seen.job.status, look.plan.status
        if new.disruptions > old.disruptions:
            assert int(new.last_failure["pod"].rpartition("-")[2]) not in old.succeeded_nodes
        if old.succeeded_nodes and new.attempt == old.attempt and not new.finished:
            assert set(old.succeeded_nodes) <= set(new.succeeded_nodes)
            assert not set(old.succeeded_nodes) & set(look.plan.create)


def pods_are_created_only_for_a_status_that_names_their_attempt(world):
    for look in world.looks:
        if look.plan.create:
            assert look.plan.status.attempt is not None
            assert not look.plan.status.finished


def each_event_is_told_once(world):
    told = Counter(
        (event.reason, event.message) for look in world.looks for event in look.plan.events
    )
    assert all(count == 1 for count in told.values()), told


def each_new_attempt_and_each_end_is_told(world):
    for look in world.looks:
        old, new = look.seen.job.status, look.plan.status
        if new.finished != old.finished or (new.attempt or 0) > (old.attempt or 0):
            assert len(look.plan.events) == 1


def every_status_says_why_and_at_which_generation(world):
    for look in world.looks:
        job, status = look.seen.job, look.plan.status
        if job.deleting:
            assert status == job.status
            continue
        assert status.phase in set(Phase)
        assert status.reason
        assert status.observed_generation == job.generation
        assert all(c["observedGeneration"] == job.generation for c in status.conditions)


def a_status_survives_the_api_server(world):
    for status in statuses(world):
        assert Status.from_dict(status.to_dict()).to_dict() == status.to_dict()


INVARIANTS = (
    attempts_restarts_and_disruptions_never_fall,
    a_new_attempt_costs_at_most_one_and_never_more_than_the_budget,
    finished_never_changes_and_nothing_is_created_for_it,
    complete_failed_and_running_exclude_each_other,
    an_attempt_never_has_more_pods_than_nodes_nor_two_of_one_index,
    two_attempts_never_live_at_the_same_time,
    no_index_is_refilled_after_the_latch,
    a_node_that_is_done_is_lost_to_nobody,
    pods_are_created_only_for_a_status_that_names_their_attempt,
    each_event_is_told_once,
    each_new_attempt_and_each_end_is_told,
    every_status_says_why_and_at_which_generation,
    a_status_survives_the_api_server,
)


@settings(max_examples=80)
@given(worlds())
def test_in_every_world(world):
    for holds in INVARIANTS:
        holds(world)


# --- what holds of every state


@given(worlds())
def test_planning_again_after_acting_comes_to_rest(world):
    world.settle()
    plan = world.plan()
    assert (plan.delete, plan.events) == ((), ())
    assert plan.create == () or world.refusal
    assert plan.status.to_dict() == world.manifest["status"]


@given(worlds())
def test_a_job_at_rest_is_finished_or_waits_for_something_that_it_names(world):
    world.settle()
    seen, plan = world.observe(), world.plan()
    if not plan.status.finished and not seen.job.deleting:
        assert plan.status.reason
        assert plan.wake_after is not None or any(not p.released for p in seen.pods)


@given(worlds())
def test_a_job_whose_world_stops_misbehaving_ends(world):
    behave(world)
    assert world.status.finished or world.observe().job.deleting
    for holds in INVARIANTS:
        holds(world)


@given(worlds(), st.randoms(use_true_random=False))
def test_neither_plan_nor_verdict_depends_on_the_order_of_the_pods(world, random):
    seen = world.observe()
    shuffled = list(seen.pods)
    random.shuffle(shuffled)
    assert decide(observe(seen.job, shuffled, seen.refusal), world.now) == decide(seen, world.now)
    for attempt in {
        pod.attempt for pod in seen.pods
    }:  # a verdict is on one attempt, which has one pod an index
        ordered, mixed = (
            [pod for pod in pods if pod.attempt == attempt] for pods in (seen.pods, shuffled)
        )
        assert judge(mixed, (), world.now) == judge(ordered, (), world.now)


# --- whatever an API server may hold

words = st.sampled_from(
    [
        "phase",
        "state",
        "terminated",
        "running",
        "waiting",
        "containerStatuses",
        "name",
        "trainer",
        "exitCode",
        "Failed",
        "Running",
        "Succeeded",
        "conditions",
        "type",
        "status",
        "True",
        "DisruptionTarget",
        "finishedAt",
        "reason",
        "message",
        "PodScheduled",
        "lastTransitionTime",
        "2026-11-21T12:00:00Z",
        "0001-01-01T00:00:00+14:00",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words
json = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=6,
)
trainers = st.lists(st.fixed_dictionaries({"name": st.just("trainer"), "state": json}), max_size=1)
pod_statuses = st.fixed_dictionaries(
    {}, optional={"phase": words, "conditions": json, "containerStatuses": trainers}
)


@given(pod_statuses, json)
@example(
    {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": None}}]},
    {},
)
def test_no_pod_makes_a_look_raise(status, odd):
    pod = {**a_pod(0), "status": status}
    odd_pod = {**a_pod(1), "spec": odd}
    odd_pod["metadata"] = {
        **odd_pod["metadata"],
        "deletionTimestamp": odd,
        "deletionGracePeriodSeconds": odd,
    }
    for job in (a_job(), Job.from_dict(a_manifest(status={"attempt": 0, "nodes": {"desired": 2}}))):
        decide(observe(job, read(pod, odd_pod)), NOW)


@given(json)
def test_no_metadata_makes_reading_raise(metadata):
    read_pod({"metadata": metadata})
    read_pod({"metadata": {"labels": metadata}})
    owner_uid({"metadata": metadata})
    owner_uid({"metadata": {"ownerReferences": metadata}})


@given(json, json)
def test_no_job_makes_a_look_raise(status, spec):
    job = Job.from_dict({"metadata": {"uid": "x"}, "status": status, "spec": spec})
    decide(observe(job, read(a_pod(0), a_pod(1, attempt=1))), NOW)


status_fields = st.dictionaries(
    st.sampled_from(sorted(Status.__dataclass_fields__)) | words, json, max_size=6
)


@given(status_fields, st.integers(-1, 3), st.integers(-1, 3))
def test_no_status_makes_a_look_raise(fields, attempt, started):
    status = {
        **fields,
        "attempt": attempt,
        "attemptStarted": started,
        "backoff": {"count": 1, "until": None},
    }
    job = Job.from_dict(a_manifest(status=status))
    decide(observe(job, read(a_pod(0), a_pod(1, attempt=1))), at(5))


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1, -(10**12)])
def test_an_endless_grace_period_can_be_read(seconds):
    pod = a_pod(0, {"phase": "Running"}, deleted_at=NOW)
    pod["metadata"]["deletionGracePeriodSeconds"] = seconds
    assert read_pod(pod).disruption


def test_an_observation_of_nothing_is_calm():
    assert Observation(a_job()).current == ()
