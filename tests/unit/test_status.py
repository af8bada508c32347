"""The status of a job: its form in the manifest, its conditions, and its transitions."""

from dataclasses import replace

import pytest
from builders import (
    FULL_STATUS,
    JOB_UID,
    NOW,
    a_condition,
    a_job,
    a_pod,
    a_running_job,
    a_starting_job,
    at,
    plan_for,
    running,
    succeeded,
    unschedulable,
    waiting,
)

from ddpjob.core.api import names
from ddpjob.core.api.conditions import set_condition, stamp_conditions
from ddpjob.core.api.names import Condition
from ddpjob.core.api.status import Status, is_transition
from ddpjob.core.api.times import format_time
from ddpjob.core.observe.termination import read_result

# The form in the manifest


def test_a_full_status_is_the_same_after_it_was_written_and_read():
    assert Status.from_dict(FULL_STATUS.to_dict()) == FULL_STATUS
    assert FULL_STATUS.to_dict()["nodesReady"] == "3/4"


def test_every_field_of_the_full_status_is_set():
    # Otherwise the test above could miss a field.
    empty = Status()
    assert [name for name in vars(empty) if vars(empty)[name] == vars(FULL_STATUS)[name]] == []


def test_empty_fields_are_absent():
    assert set(Status().to_dict()) == {
        "observedGeneration",
        "restarts",
        "failures",
        "disruptions",
        "nodes",
        "nodesReady",
    }


@pytest.mark.parametrize("ran", [True, False, None])
def test_previous_attempt_ran_is_the_same_after_it_was_written_and_read(ran):
    status = replace(Status(), previous_attempt_ran=ran)
    assert status.to_dict().get("previousAttemptRan") is ran
    assert Status.from_dict(status.to_dict()).previous_attempt_ran is ran


def test_attempt_0_differs_from_no_attempt():
    assert Status.from_dict({"attempt": 0, "attemptStarted": 0}).to_dict()["attemptStarted"] == 0
    assert Status.from_dict({}).attempt is None


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "x",
        {"conditions": None},
        {"nodes": 7},
        {"backoff": {"until": 3}},
        {"previousAttemptRan": "yes"},
        {"ignoredFields": "spec.x"},
    ],
)
def test_a_status_that_cannot_be_read_counts_as_absent(data):
    assert Status.from_dict(data) == Status()


def test_the_scale_subresource_finds_the_pods_of_the_job():
    status = plan_for(a_job()).status
    assert status.to_dict()["selector"] == f"{names.LABEL_JOB_UID}={JOB_UID}"


def test_failures_of_a_status_from_an_earlier_version_are_read():
    # It had no field for their sum, and `restarts` were the failures.
    status = Status.from_dict({"restarts": 2, "disruptions": 3})
    assert (status.failures, status.disruptions, status.restarts) == (2, 3, 5)
    assert Status.from_dict(status.to_dict()).failures == 2


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
    assert (same[0]["lastTransitionTime"], same[0]["reason"]) == (format_time(at(0)), "B")
    assert other[0]["lastTransitionTime"] == format_time(at(9))


def test_stamped_conditions_have_the_generation():
    (stamped,) = stamp_conditions(a_condition(Condition.RUNNING), 7, NOW)
    assert stamped["observedGeneration"] == 7


def test_conditions_keep_their_order_and_those_of_others_are_kept():
    foreign = {"type": "Foreign", "status": "True"}
    conditions = set_condition((foreign,), Condition.FAILED, True, "r", "m")
    conditions = set_condition(conditions, Condition.FAILED, True, "again", "m")
    assert [entry["type"] for entry in conditions] == ["Foreign", "Failed"]
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
    assert (new.succeeded_nodes, dict(new.result)) == ((0,), {"a": "1"})
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
