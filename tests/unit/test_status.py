"""The status of a job: its form in the manifest, its conditions, and its transitions."""

from dataclasses import MISSING, fields, is_dataclass

import pytest
from builders.containers import running, succeeded, waiting
from builders.jobs import FULL_STATUS, JOB_UID, a_condition, a_job, a_running_job, a_starting_job
from builders.plans import plan_for
from builders.pods import a_pod
from builders.surroundings import unschedulable
from builders.times import NOW, at

from ddpjob.core.api import names
from ddpjob.core.api.conditions import ConditionStatus, set_condition, stamp_conditions
from ddpjob.core.api.names import Condition
from ddpjob.core.api.status import Status, is_transition
from ddpjob.core.observe.termination import read_result

# The form in the manifest


def test_a_full_status_is_the_same_after_it_was_written_and_read():
    assert Status.from_dict(FULL_STATUS.to_dict()) == FULL_STATUS
    assert FULL_STATUS.to_dict()["nodesReady"] == "3/4"


def test_every_field_of_the_full_status_is_set():
    # Otherwise the test above could miss a field.
    for part in (FULL_STATUS, *parts_of(FULL_STATUS)):
        for field in fields(part):
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            assert getattr(part, field.name) != default, field.name


def parts_of(part):
    """Yield the parts of a part, and theirs."""
    for field in fields(part):
        value = getattr(part, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if is_dataclass(one):
                yield one
                yield from parts_of(one)


def test_empty_fields_are_absent():
    expected = {"observedGeneration", "restarts", "budget", "nodes", "nodesReady"}
    assert set(Status().to_dict()) == expected


def test_attempt_0_differs_from_no_attempt():
    assert Status.from_dict({"attempt": {"number": 0}}).to_dict()["attempt"] == {"number": 0}
    assert Status.from_dict({}).attempt.number is None


def test_what_only_the_operator_needs_is_written_apart():
    status = FULL_STATUS.to_dict()
    assert set(status["attempt"]) == {"number", "start", "runningTime"}
    assert set(status["budget"]) == {"failures", "disruptions", "announced"}
    assert status["operator"]["attempt"]["host"] == {"index": 1, "address": "10.0.0.7"}
    assert status["operator"]["budget"]["retried"]["announced"] == 2


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "x",
        {"conditions": None},
        {"nodes": 7},
        {"backoff": {"until": 3}},
        {"attempt": {"number": True}},
        {"account": {"seconds": {"training": "x"}}},
        {"failedNodes": [{"name": "node-1"}, 7]},
        {"operator": []},
        {"operator": {"attempt": {"previousRan": "yes", "yielding": {"to": "x"}}}},
        {"ignoredFields": "spec.x"},
    ],
)
def test_a_status_that_cannot_be_read_counts_as_absent(data):
    assert Status.from_dict(data) == Status()


def test_the_scale_subresource_finds_the_pods_of_the_job():
    status = plan_for(a_job()).status
    assert status.to_dict()["selector"] == f"{names.LABEL_JOB_UID}={JOB_UID}"


# Conditions


@pytest.mark.parametrize("kind", Condition)
@pytest.mark.parametrize("holds", [True, False])
def test_complete_and_failed_finish_a_job(kind, holds):
    status = Status(conditions=a_condition(kind, holds))
    assert status.has(kind) is holds
    assert status.finished is (holds and kind in (Condition.COMPLETE, Condition.FAILED))


def test_the_transition_time_of_a_condition_moves_only_with_its_status():
    first = a_condition(Condition.RUNNING, False, now=at(0))
    same = set_condition(first, Condition.RUNNING, False, "B", "b")
    same = stamp_conditions(same, 1, at(5))
    other = set_condition(same, Condition.RUNNING, True, "C", "c")
    other = stamp_conditions(other, 1, at(9))
    assert (same[0].last_transition_time, same[0].reason) == (at(0), "B")
    assert other[0].last_transition_time == at(9)


def test_stamped_conditions_have_the_generation():
    (stamped,) = stamp_conditions(a_condition(Condition.RUNNING), 7, NOW)
    assert stamped.observed_generation == 7


def test_conditions_keep_their_order_and_those_of_others_are_kept():
    foreign = ConditionStatus("Foreign", "True", "r", "m")
    conditions = set_condition((foreign,), Condition.FAILED, True, "r", "m")
    conditions = set_condition(conditions, Condition.FAILED, True, "again", "m")
    assert [condition.type for condition in conditions] == ["Foreign", "Failed"]
    assert conditions[0] == foreign


# The result


def test_a_result_is_limited_in_entries_and_in_length():
    long = ", ".join(f'"key{number}": 1' for number in range(100))
    assert len(read_result(f"{{{long}}}")) == 32
    result = read_result(f'{{"{"k" * 300}": "{"v" * 300}"}}')
    assert dict(result) == {"k" * 256: "v" * 256}


# What has to be written at once


def test_counts_and_messages_are_progress():
    old = plan_for(a_starting_job(), a_pod(0, waiting()), a_pod(1, waiting())).status
    new = plan_for(a_starting_job(), a_pod(0, running()), a_pod(1, waiting())).status
    assert old != new
    assert not is_transition(old, new)


def test_a_succeeded_node_and_its_result_are_progress():
    job = a_running_job()
    old = plan_for(job, a_pod(0, running()), a_pod(1, running())).status
    new = plan_for(job, a_pod(0, succeeded('{"a": 1}')), a_pod(1, running())).status
    assert (new.attempt.succeeded_nodes, dict(new.result)) == ((0,), {"a": "1"})
    assert not is_transition(old, new)


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        (a_job(), []),
        (a_starting_job(), [a_pod(0), a_pod(1)]),
        (a_starting_job(), [a_pod(0, running()), a_pod(1, running())]),
        (a_starting_job(), [a_pod(0), a_pod(1, unschedulable())]),
        (a_running_job(), [a_pod(0, running())]),
        (a_running_job(spec={"nodes": 3}), [a_pod(0, running()), a_pod(1, running())]),
        (a_running_job(), [a_pod(0, succeeded()), a_pod(1, succeeded())]),
    ],
    ids=["begins", "latches", "runs", "is blocked", "restarts", "is resized", "completes"],
)
def test_it_is_a_transition_when_a_job(job, pods):
    assert is_transition(job.status, plan_for(job, *pods).status)


def test_an_equal_status_is_no_transition():
    job = a_running_job()
    assert not is_transition(job.status, job.status)
