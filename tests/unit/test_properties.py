"""Histories of a job in a cluster with every kind of failure, and the invariants of all of them.

Hypothesis draws a history: the events in their order, and the operator's view of them. The view may
be old and incomplete.
"""

import os
import pickle
from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest
from actions import (
    FAILING,
    OBSERVING,
    OF_NODES,
    OF_QUEUES,
    OF_USERS,
    ORDINARY,
    RARE,
    all_deleted_pods_end,
    operator_sees_everything_and_runs,
    queue_admits_the_job,
    run_without_accidents,
    the_gang_starts,
    user_loses_the_label_of_the_default_queue,
)
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from invariants import check
from world import World, a_world

from ddpjob.core.api.queue import DEFAULT_QUEUE
from ddpjob.core.decide.causes import judge
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import ApiState, observe

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
# How many histories are drawn: the number of parts, and the histories of each. Each part is a test
# of its own, so no part nears the time limit of a test on a slow machine. Hypothesis remembers all
# examples of a part and becomes slower.
HISTORIES = {"dev": (1, 100), "ci": (8, 250), "soak": (50, 2_000)}
PARTS, PER_PART = HISTORIES[PROFILE]


# Each kind is drawn about as often as any other.
KINDS = (
    ORDINARY,
    ORDINARY,
    OBSERVING,
    FAILING,
    OF_NODES,
    OF_USERS,
    OF_QUEUES,
    ORDINARY * 3 + RARE,
)
ACTIONS = [action for kind in KINDS for action in kind * round(500 / len(kind))]
# One draw of an action with its number takes less time than a draw of the kind, one of the action
# and one of the number.
STEPS = st.lists(st.sampled_from([*product(ACTIONS, range(12))]), min_size=15, max_size=60)

BUDGETS = st.integers(0, 5)
POLICIES = st.fixed_dictionaries(
    {"maxRestarts": BUDGETS, "maxDisruptions": BUDGETS},
    optional={
        "windowSeconds": st.just(60),
        "maxAnnouncedDisruptions": BUDGETS,
        "maxAttemptsWithoutProgress": st.integers(1, 10),
    },
)
SPECS = st.fixed_dictionaries(
    {
        "nodes": st.integers(1, 4),
        "failurePolicy": POLICIES,
        "suspend": st.sampled_from([False, False, False, True]),
        "activeDeadlineSeconds": st.sampled_from([None, None, 3000, 60]),
        "startupDeadlineSeconds": st.sampled_from([None, 3000, 60]),
        "ttlSecondsAfterFinished": st.sampled_from([None, 100, 0]),
        "recovery": st.sampled_from(["InPlace", "InPlace", "Recreate"]),
        "cleanPodPolicy": st.sampled_from(["Running", "None", "All"]),
    }
)


@st.composite
def worlds(draw) -> World:
    """Draw a world in which the operator sees most, but not all, of the events."""
    queue = draw(st.sampled_from(["", "", "team-0", DEFAULT_QUEUE]))
    label = "" if queue == DEFAULT_QUEUE else queue
    world = a_world(draw(SPECS), reads_nodes=draw(st.booleans()), queue=label)
    world.queue.takes_all = queue == DEFAULT_QUEUE
    if queue:
        world.settle()
        world.act(queue_admits_the_job, 0)
    if draw(st.booleans()):
        world.act(the_gang_starts, 0)
    # Among the steps, this is too rare at a moment when it matters.
    if draw(st.booleans()):
        world.act(user_loses_the_label_of_the_default_queue, 0)
        world.act(operator_sees_everything_and_runs, 0)
    for action, choice in draw(STEPS):
        world.act(action, choice)
        if choice % 3:
            world.act(operator_sees_everything_and_runs, choice)
    return world


@pytest.mark.parametrize("part", range(PARTS))
def test_every_history_keeps_the_invariants_comes_to_rest_and_can_end(part):
    histories = settings(max_examples=PER_PART)(given(world=worlds())(assert_all_of_a_history))
    if PROFILE == "ci":
        # The histories of a part are the same in each run, and those of two parts differ.
        histories = seed(part)(histories)
    histories()


def assert_all_of_a_history(world: World) -> None:
    """Assert that a history keeps the invariants, comes to rest and can end."""
    check(world)
    at_rest = copy_of(world)
    at_rest.settle()
    assert_at_rest(at_rest)
    run_without_accidents(world)
    assert world.status.finished or world.job.deleting
    check(world)
    if not world.job.deleting:
        assert_room_is_given_back(world)


def assert_room_is_given_back(world: World) -> None:
    """Assert that a finished job holds no room in a queue once its pods have ended."""
    all_deleted_pods_end(world, 0)
    world.settle()
    if all(pod.released for pod in world.of_gangs()):
        assert not [workload for workload in world.queue.workloads if workload.held]
        assert not world.queue.unfinished()


def copy_of(world: World) -> World:
    """Return a world with the same past, of objects that never change, and a future of its own."""
    past = {name: getattr(world, name) for name in ("story", "jobs", "nodes")}
    try:
        for name in past:
            setattr(world, name, [])
        # This takes a third of the time of `deepcopy`.
        copied: World = pickle.loads(pickle.dumps(world))
    finally:
        vars(world).update(past)
    for name, objects in past.items():
        setattr(copied, name, list(objects))
    return copied


def assert_at_rest(world: World) -> None:
    """Assert that the operator has nothing to write, and has something to wake it."""
    status = world.status
    waits = world.operator.plan().wake_after
    assert waits != 0
    # A new operator, and a look between two moments, find nothing to do either. The only thing for
    # an operator to find out again is a refusal of the API server.
    if not world.operator.refusal:
        world.restart_operator()
    for seconds in (0, min(waits or 5, 5) / 2):
        world.now += timedelta(seconds=seconds)
        plan = world.operator.plan()
        assert plan.status.to_dict() == status.to_dict()
        assert (plan.delete, plan.events, plan.place) == ((), (), None)
        assert plan.new_pods == () or world.operator.refusal
    assert status.finished or world.job.deleting or waits_for_something(world)


def waits_for_something(world: World) -> bool:
    """Return True if a pod, a moment or the user will go on with the job."""
    if world.job.spec.lifecycle.suspended or world.operator.plan().wake_after is not None:
        return True
    queue = world.queue
    waits_for_room = world.job.queue is not None and not (
        queue.state is ApiState.SERVED and queue.holds_room()
    )
    return waits_for_room or any(not pod.released for pod in world.operator.observe().pods)


@given(worlds(), st.randoms(use_true_random=False))
def test_neither_plan_nor_verdict_depends_on_the_order_of_the_pods(world, random):
    observed = world.operator.observe()
    shuffled = list(observed.pods)
    random.shuffle(shuffled)
    mixed = replace(observed, pods=observe(observed.job, shuffled, observed.refusal).pods)
    assert judge(mixed, world.now) == judge(observed, world.now)
    assert decide(mixed, world.now) == decide(observed, world.now)
