"""Invariants of every history of a job, whatever its pods, its users and the operator do."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from builders import FULL_STATUS, NOW, a_job, a_manifest, a_pod, at, read_pods
from hypothesis import example, given, settings
from hypothesis import strategies as st
from world import (
    ACCIDENTS,
    FINAL,
    ORDINARY,
    World,
    a_world,
    all_pods_start,
    operator_runs,
    run_without_accidents,
)

from ddpjob.core.causes import judge
from ddpjob.core.conditions import stamp_conditions
from ddpjob.core.decide import decide
from ddpjob.core.job import Job
from ddpjob.core.names import Condition, Phase
from ddpjob.core.observe import TrainerState, observe
from ddpjob.core.pods import owner_uid, read_pod
from ddpjob.core.status import Status

actions = st.one_of(st.sampled_from(ORDINARY), st.sampled_from(ACCIDENTS + FINAL))
steps = st.tuples(actions, st.integers(0, 11))


@st.composite
def worlds(draw) -> World:
    """Draw a world in which the operator runs after most of what happens, but not after all."""
    world = a_world(
        nodes=draw(st.integers(1, 4)),
        max_restarts=draw(st.integers(0, 3)),
        max_disruptions=draw(st.integers(0, 3)),
    )
    if draw(st.booleans()):
        for action in (operator_runs, all_pods_start, operator_runs):
            action(world, 0)
    for action, choice in draw(st.lists(steps, min_size=6, max_size=30)):
        action(world, choice)
        if choice % 3:
            operator_runs(world, 0)
    return world


def statuses(world: World) -> list[Status]:
    return [turn.plan.status for turn in world.turns]


def without_counts(status: Status) -> Status:
    """Return a finished status without what may still change.

    That is the observed generation, and the count of pods that still run.
    """
    return replace(
        status,
        observed_generation=0,
        conditions=stamp_conditions(status.conditions, 0, NOW),
        pods=replace(status.pods, active=0, ready=0),
    )


# Invariants of a history


def attempts_restarts_and_disruptions_never_decrease(world):
    for old, new in pairwise(statuses(world)):
        assert (new.attempt or 0) >= (old.attempt or 0)
        assert new.failures >= old.failures
        assert new.disruptions >= old.disruptions


def a_new_attempt_costs_at_most_one_and_a_budget_is_never_exceeded(world):
    for turn in world.turns:
        old = turn.observed.status
        new = turn.plan.status
        cost = new.restarts - old.restarts
        assert cost in (0, 1)
        assert not cost or new.attempt == old.attempt + 1
    policy = world.manifest["spec"]["failurePolicy"]
    assert world.status.failures <= policy["maxRestarts"]
    assert world.status.disruptions <= policy["maxDisruptions"]


def a_finished_job_never_changes_and_no_pod_is_created_for_it(world):
    for turn in world.turns:
        old = turn.observed.status
        if old.finished:
            assert (turn.plan.create, turn.plan.events) == ((), ())
            assert without_counts(turn.plan.status) == without_counts(old)


def at_most_one_condition_is_true(world):
    for status in statuses(world):
        assert sum(status.has(kind) for kind in Condition) <= 1


def an_attempt_has_at_most_one_pod_per_node(world):
    for turn in world.turns:
        pods = [(pod.attempt, pod.index) for pod in turn.observed.pods]
        assert len(pods) == len(set(pods))
        for pod in turn.observed.current:
            assert pod.index < turn.observed.status.pods.desired
        for index in turn.plan.create:
            assert 0 <= index < turn.plan.status.pods.desired


def pods_of_two_attempts_never_run_at_the_same_time(world):
    unfinished = (TrainerState.PENDING, TrainerState.RUNNING)
    for turn in world.turns:
        pods = turn.observed.pods
        assert len({pod.attempt for pod in pods if pod.state in unfinished}) <= 1
        if turn.plan.create:
            assert all(pod.released for pod in turn.observed.older)


def no_pod_is_created_again_after_the_latch(world):
    for turn in world.turns:
        if turn.plan.create and turn.observed.status.attempt is not None:
            assert not turn.observed.latched


def a_node_that_succeeded_is_never_lost(world):
    for turn in world.turns:
        old = turn.observed.status
        new = turn.plan.status
        succeeded = set(old.succeeded_nodes)
        if new.disruptions > old.disruptions:
            lost = int(new.last_failure["pod"].rpartition("-")[2])
            assert lost not in succeeded
        if new.attempt == old.attempt and not new.finished:
            assert succeeded <= set(new.succeeded_nodes)
            assert not succeeded & set(turn.plan.create)


def pods_are_created_only_for_the_attempt_of_an_unfinished_status(world):
    for turn in world.turns:
        if turn.plan.create:
            assert turn.plan.status.attempt is not None
            assert not turn.plan.status.finished


def each_event_is_posted_once(world):
    posted = Counter()
    for turn in world.turns:
        for event in turn.plan.events:
            posted[event.reason, event.message] += 1
    assert all(count == 1 for count in posted.values()), posted


def unknown_fields_are_reported_by_at_most_one_event(world):
    reasons = [event.reason for turn in world.turns for event in turn.plan.events]
    assert reasons.count("UnknownFields") <= 1
    assert ("UnknownFields" in reasons) == bool(world.status.ignored_fields)


def each_new_attempt_and_each_end_is_reported_by_one_event(world):
    for turn in world.turns:
        old = turn.observed.status
        new = turn.plan.status
        if new.finished != old.finished or (new.attempt or 0) > (old.attempt or 0):
            events = [event for event in turn.plan.events if event.reason != "UnknownFields"]
            assert len(events) == 1


def every_status_has_a_phase_a_reason_and_the_generation(world):
    for turn in world.turns:
        job = turn.observed.job
        status = turn.plan.status
        if job.deleting:
            assert status == job.status
            continue
        assert status.phase in set(Phase)
        assert status.reason
        assert status.observed_generation == job.generation
        for condition in status.conditions:
            assert condition["observedGeneration"] == job.generation


def a_status_is_the_same_after_it_was_written_and_read(world):
    for status in statuses(world):
        assert Status.from_dict(status.to_dict()).to_dict() == status.to_dict()


INVARIANTS = (
    attempts_restarts_and_disruptions_never_decrease,
    a_new_attempt_costs_at_most_one_and_a_budget_is_never_exceeded,
    a_finished_job_never_changes_and_no_pod_is_created_for_it,
    at_most_one_condition_is_true,
    an_attempt_has_at_most_one_pod_per_node,
    pods_of_two_attempts_never_run_at_the_same_time,
    no_pod_is_created_again_after_the_latch,
    a_node_that_succeeded_is_never_lost,
    pods_are_created_only_for_the_attempt_of_an_unfinished_status,
    each_event_is_posted_once,
    unknown_fields_are_reported_by_at_most_one_event,
    each_new_attempt_and_each_end_is_reported_by_one_event,
    every_status_has_a_phase_a_reason_and_the_generation,
    a_status_is_the_same_after_it_was_written_and_read,
)


@settings(max_examples=1000)
@given(worlds())
def test_every_history_keeps_the_invariants(world):
    for invariant in INVARIANTS:
        invariant(world)


# Invariants of a state


@given(worlds())
def test_the_operator_comes_to_rest_if_nothing_else_happens(world):
    world.settle()
    plan = world.plan()
    assert (plan.delete, plan.events) == ((), ())
    assert plan.create == () or world.refusal
    assert plan.status.to_dict() == world.manifest["status"]


@given(worlds())
def test_a_job_at_rest_is_finished_or_waits_for_a_pod_or_for_a_time(world):
    world.settle()
    observed = world.observe()
    plan = world.plan()
    if not plan.status.finished and not observed.job.deleting:
        assert plan.status.reason
        assert plan.wake_after is not None or not all(pod.released for pod in observed.pods)


@given(worlds())
def test_a_job_ends_if_no_more_accidents_happen(world):
    run_without_accidents(world)
    assert world.status.finished or world.observe().job.deleting
    for invariant in INVARIANTS:
        invariant(world)


@given(worlds(), st.randoms(use_true_random=False))
def test_neither_plan_nor_verdict_depends_on_the_order_of_the_pods(world, random):
    observed = world.observe()
    shuffled = list(observed.pods)
    random.shuffle(shuffled)
    again = observe(observed.job, shuffled, observed.refusal)
    assert decide(again, world.now) == decide(observed, world.now)
    # `observe` sorts the pods. The verdict does not depend on that.
    mixed = replace(again, pods=tuple(shuffled))
    assert judge(mixed, world.now) == judge(observed, world.now)


# Any object that an API server can hold

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
keys = words | st.text(max_size=4)


def containers_of(values):
    return st.lists(values, max_size=4) | st.dictionaries(keys, values, max_size=5)


json = st.recursive(scalars, containers_of, max_leaves=6)
trainers = st.lists(st.fixed_dictionaries({"name": st.just("trainer"), "state": json}), max_size=1)
pod_statuses = st.fixed_dictionaries(
    {}, optional={"phase": words, "conditions": json, "containerStatuses": trainers}
)
TERMINATED_WITHOUT_VALUE = {
    "phase": "Failed",
    "containerStatuses": [{"name": "trainer", "state": {"terminated": None}}],
}


@given(pod_statuses, json)
@example(TERMINATED_WITHOUT_VALUE, {})
def test_no_pod_makes_decide_raise(status, value):
    pod = {**a_pod(0), "status": status}
    deleted = {**a_pod(1), "spec": value}
    deleted["metadata"] |= {"deletionTimestamp": value, "deletionGracePeriodSeconds": value}
    started = a_manifest(status={"attempt": 0, "nodes": {"desired": 2}})
    for job in (a_job(), Job.from_dict(started)):
        decide(observe(job, read_pods(pod, deleted)), NOW)


@given(json)
def test_no_metadata_makes_reading_a_pod_raise(metadata):
    read_pod({"metadata": metadata})
    read_pod({"metadata": {"labels": metadata}})
    owner_uid({"metadata": metadata})
    owner_uid({"metadata": {"ownerReferences": metadata}})


@given(json, json)
def test_no_job_makes_decide_raise(status, spec):
    job = Job.from_dict({"metadata": {"uid": "x"}, "status": status, "spec": spec})
    decide(observe(job, read_pods(a_pod(0), a_pod(1, attempt=1))), NOW)


field_names = st.sampled_from(sorted(FULL_STATUS.to_dict()))
status_fields = st.dictionaries(field_names | words, json, max_size=6)


@given(status_fields, st.integers(-1, 3), st.integers(-1, 3))
def test_no_status_makes_decide_raise(fields, attempt, started):
    status = {
        **fields,
        "attempt": attempt,
        "attemptStarted": started,
        "backoff": {"count": 1, "until": None},
    }
    job = Job.from_dict(a_manifest(status=status))
    decide(observe(job, read_pods(a_pod(0), a_pod(1, attempt=1))), at(5))
