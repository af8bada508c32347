"""The account of a job's time."""

from dataclasses import replace

import pytest
from builders.containers import failed, running, starting, succeeded
from builders.jobs import a_job, a_running_job, a_starting_job
from builders.messages import agent_report, torchrun_summary
from builders.plans import plan_for, written
from builders.pods import a_pod, read_pods
from builders.surroundings import unschedulable
from builders.times import NOW, at

from ddpjob.core.api.names import Activity
from ddpjob.core.api.status import goodput
from ddpjob.core.decide.reports import reported_totals
from ddpjob.core.observe.observation import observe

RUN = (a_pod(0, running()), a_pod(1, running()))


def account(job, *pods, now=NOW, **surroundings):
    """Return (activity, its start, the seconds before) after a look."""
    status = plan_for(job, *pods, now=now, **surroundings).status
    return status.account.activity, status.account.since, dict(status.account.seconds)


def test_a_job_without_all_its_pods_on_nodes_is_queued():
    assert account(a_job()) == ("queued", NOW, {})
    pods = a_pod(0, running()), a_pod(1, unschedulable())
    assert account(a_starting_job(), *pods) == ("queued", NOW, {})


def test_time_goes_to_the_activity_before_when_another_one_begins():
    job = written(a_job(), plan_for(a_job()))
    job = written(job, plan_for(job, a_pod(0, starting()), a_pod(1, starting()), now=at(7)))
    assert (job.status.account.activity, job.status.account.seconds) == ("starting", {"queued": 7})
    assert account(job, *RUN, now=at(12)) == ("training", at(12), {"queued": 7, "starting": 5})


def test_after_an_attempt_that_trained_the_job_recovers_until_it_trains_again():
    job = a_running_job(activity="training", since=NOW, seconds={"starting": 5})
    job = written(job, plan_for(job, RUN[0], a_pod(1, failed(torchrun_summary())), now=at(60)))
    expected = {"starting": 5, "training": 60}
    assert (job.status.account.activity, job.status.account.seconds) == ("recovering", expected)
    # The new pods wait for nodes. This belongs to the recovery.
    pods = [a_pod(index, attempt=1) for index in (0, 1)]
    assert account(job, *pods, now=at(70)) == ("recovering", at(60), expected)
    pods = [a_pod(index, running(), attempt=1) for index in (0, 1)]
    assert account(job, *pods, now=at(80)) == ("training", at(80), {**expected, "recovering": 20})


def test_a_job_that_ends_or_is_suspended_has_its_time_added():
    job = a_running_job(activity="training", since=NOW, spec={"suspend": True})
    assert account(job, *RUN, now=at(60)) == ("", None, {"training": 60})


def test_a_clock_that_was_set_back_gives_no_negative_time():
    job = a_running_job(activity="training", since=at(500), spec={"suspend": True})
    assert account(job, *RUN) == ("", None, {"training": 0})


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, ""),
        ({"queued": 5}, ""),
        ({"training": 70, "recovering": 20, "starting": 10}, "70%"),
        ({"training": 0}, "0%"),
    ],
)
def test_goodput_is_the_part_of_the_time_that_was_spent_on_training(seconds, expected):
    assert goodput(seconds) == expected


def test_the_activities_have_the_names_of_the_status():
    assert [str(activity) for activity in Activity] == [
        "queued",
        "starting",
        "training",
        "recovering",
    ]


# When training begins

MET = {"activity": "training", "since": NOW, "seconds": {"starting": 5}}
NO_MODULE = "ModuleNotFoundError: No module named 'tqdm'"


def ended_with(job, *reports, now):
    """Return the job after its pods have ended with these reports; None: the pod runs."""
    pods = [
        a_pod(index, failed(report) if report else running(), attempt=job.status.attempt.number)
        for index, report in enumerate(reports)
    ]
    return written(job, plan_for(job, *pods, now=now))


# The reports of attempt 0's pods at its end, 40 s after the workers have met, and the seconds of
# starting and of training after the meeting.
ENDS = {
    "no step and no heartbeat": ((None, agent_report(0)), (5, 40)),
    "a heartbeat": ((None, agent_report(0, trained={"0": at(30).timestamp()})), (35, 10)),
    "a first step on one node, an earlier heartbeat on another": (
        (
            agent_report(0, trained={"0": at(30).timestamp()}),
            agent_report(0, trained={"0": at(20).timestamp()}),
        ),
        (25, 20),
    ),
    "a heartbeat by a clock that is behind": (
        (None, agent_report(0, trained={"0": at(-900).timestamp()})),
        (5, 40),
    ),
    "a heartbeat by a clock that is ahead": (
        (None, agent_report(0, trained={"0": at(900).timestamp()})),
        (45, 0),
    ),
    "a heartbeat of another attempt": (
        (None, agent_report(0, trained={"7": at(30).timestamp()})),
        (5, 40),
    ),
    "an error at an import": ((None, agent_report(0, exception=NO_MODULE)), (45, 0)),
    "wrong use": ((None, agent_report(0, exit_code=2, exception="usage: train.py")), (45, 0)),
    "such an error after a step": (
        (None, agent_report(0, exception="TypeError: x", steps={"0": [0, 0]})),
        (5, 40),
    ),
    "such an error after a heartbeat": (
        (None, agent_report(0, exception="TypeError: x", trained={"0": at(1).timestamp()})),
        (6, 39),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_training_begins_with_the_first_step_or_heartbeat_else_with_the_meeting(end):
    reports, expected = ENDS[end]
    job = ended_with(a_running_job(**MET), *reports, now=at(40))
    seconds = job.status.account.seconds
    assert (seconds["starting"], seconds["training"]) == expected


def test_an_error_after_a_minute_is_none_of_the_start():
    report = agent_report(0, exception="TypeError: x")
    job = ended_with(a_running_job(**MET), None, report, now=at(60))
    assert job.status.account.seconds == {"starting": 5, "training": 60}


def test_the_goodput_of_a_job_that_died_at_its_imports_is_0():
    job = a_running_job(**MET)
    for attempt, seconds in enumerate((10, 60)):
        report = agent_report(attempt, exception=NO_MODULE)
        job = ended_with(job, report, report, now=at(seconds))
        assert job.status.account.activity in ("queued", "starting", "")
        pods = [a_pod(index, running(), attempt=attempt + 1) for index in (0, 1)]
        job = written(job, plan_for(job, *pods, now=at(seconds + 40)))
    assert job.status.reason == "SameErrorAgain"
    assert job.status.account.seconds["training"] == 0
    assert job.status.account.goodput == "0%"


def test_a_report_that_comes_later_moves_the_time_then_and_once():
    job = ended_with(a_running_job(**MET), None, agent_report(0), now=at(40))
    assert job.status.account.seconds == {"starting": 5, "training": 40}
    # The pod of rank 0 ends after the attempt.
    late = a_pod(0, failed(agent_report(0, "Stopped", trained={"0": at(30).timestamp()})))
    for moment in (50, 60):
        job = written(job, plan_for(job, late, now=at(moment)))
        seconds = job.status.account.seconds
        assert (seconds["starting"], seconds["training"]) == (35, 10)
    entry = job.status.attempts[0]
    assert (entry.training_time, entry.untrained_seconds) == (at(30), 30)


def test_steps_that_are_known_later_show_that_an_attempt_did_not_end_at_its_start():
    job = ended_with(
        a_running_job(**MET), None, agent_report(0, exception="TypeError: x"), now=at(40)
    )
    assert job.status.account.seconds == {"starting": 45, "training": 0}
    late = a_pod(0, failed(agent_report(0, "Stopped", steps={"0": [0, 20]})))
    job = written(job, plan_for(job, late, now=at(50)))
    assert job.status.account.seconds == {"starting": 5, "training": 40, "queued": 10}


def test_a_suspended_attempt_that_still_succeeds_is_corrected_once():
    job = a_running_job(**MET, spec={"suspend": True})
    job = written(job, plan_for(job, *RUN, now=at(40)))
    report = agent_report(0, "Succeeded", trained={"0": at(10).timestamp()})
    one = a_pod(0, succeeded(report)), a_pod(1, running())
    both = a_pod(0, succeeded(report)), a_pod(1, succeeded())
    for pods in (one, both):
        job = written(job, plan_for(job, *pods, now=at(45)))
        assert job.status.account.seconds == {"starting": 15, "training": 30}
    assert job.status.phase == "Complete"


def test_a_job_that_is_complete_has_its_training_from_its_first_step():
    report = agent_report(0, "Succeeded", trained={"0": at(25).timestamp()})
    pods = a_pod(0, succeeded(report)), a_pod(1, succeeded())
    job = written(a_running_job(**MET), plan_for(a_running_job(**MET), *pods, now=at(100)))
    assert job.status.account.seconds == {"starting": 30, "training": 75}


@pytest.mark.parametrize("trained", [None, 7, [1], {"0": "x"}, {"x": 1}, {"0": 1e300}, {"0": None}])
def test_times_that_are_none_are_ignored(trained):
    job = ended_with(a_running_job(**MET), None, agent_report(0, trained=trained), now=at(40))
    assert job.status.account.seconds == {"starting": 5, "training": 40}


# Steps


def steps_of(job):
    """Return (attempt, first step, last step, steps lost) of the ended attempts."""
    return [
        (ended.attempt, ended.first_step, ended.last_step, ended.steps_lost)
        for ended in job.status.attempts
    ]


def test_an_attempt_has_lost_the_steps_that_the_next_one_made_again():
    job = a_running_job()
    report = agent_report(0, steps={"0": [0, 75]})
    job = written(job, plan_for(job, RUN[0], a_pod(1, failed(report)), now=at(60)))
    assert steps_of(job) == [(0, 0, 75, None)]
    # The pod has gone, and its steps stay.
    pods = [a_pod(index, running(), attempt=1) for index in (0, 1)]
    job = written(job, plan_for(job, *pods, now=at(70)))
    last = agent_report(1, "Succeeded", steps={"1": [50, 120]})
    pods = [a_pod(0, succeeded(last), attempt=1), a_pod(1, succeeded(), attempt=1)]
    job = written(job, plan_for(job, *pods, now=at(90)))
    assert steps_of(job) == [(1, 50, 120, None), (0, 0, 75, 25)]


def test_an_attempt_has_lost_steps_also_if_the_next_one_made_none():
    job = a_running_job()
    report = agent_report(0, steps={"0": [0, 75]})
    job = written(job, plan_for(job, RUN[0], a_pod(1, failed(report)), now=at(60)))
    pods = [a_pod(0, running(), attempt=1), a_pod(1, failed(agent_report(1)), attempt=1)]
    job = written(job, plan_for(job, *pods, now=at(70)))
    last = agent_report(2, "Succeeded", steps={"2": [50.0, 120.0]})
    pods = [a_pod(0, succeeded(last), attempt=2), a_pod(1, succeeded(), attempt=2)]
    job = written(job, plan_for(job, *pods, now=at(90)))
    assert steps_of(job) == [(2, 50, 120, None), (1, None, None, None), (0, 0, 75, 25)]


def test_an_attempt_that_resumed_at_its_last_step_has_lost_nothing():
    job = a_running_job()
    report = agent_report(0, steps={"0": [0, 75]})
    job = written(job, plan_for(job, RUN[0], a_pod(1, failed(report)), now=at(60)))
    again = agent_report(1, steps={"1": [75, 80]})
    pods = [a_pod(0, running(), attempt=1), a_pod(1, failed(again), attempt=1)]
    job = written(job, plan_for(job, *pods, now=at(90)))
    assert steps_of(job) == [(1, 75, 80, None), (0, 0, 75, 0)]


def test_the_history_has_the_steps_that_each_attempt_was_to_make():
    job = a_running_job()
    report = agent_report(0, steps={"0": [0, 75]}, total=90)
    job = written(job, plan_for(job, RUN[0], a_pod(1, failed(report)), now=at(60)))
    last = agent_report(1, "Succeeded", total=120)
    pods = [a_pod(index, succeeded(last), attempt=1) for index in (0, 1)]
    job = written(job, plan_for(job, *pods, now=at(90)))
    assert [ended.total_steps for ended in job.status.attempts] == [120, 90]


@pytest.mark.parametrize(
    ("total", "reported", "found"),
    [(1, 0, {0: 1}), (None, 0, {}), (0, 0, {}), (-1, 0, {}), (90, None, {})],
)
def test_a_planned_number_of_steps_is_positive_and_of_a_known_attempt(total, reported, found):
    (pod,) = read_pods(a_pod(0, running()))
    pod = replace(pod, total_steps=total, reported=reported)
    assert reported_totals(observe(a_running_job(), [pod])) == found


@pytest.mark.parametrize(
    "steps",
    [None, 7, [1, 2], {"0": 5}, {"0": [1]}, {"0": [1, "x"]}, {"x": [1, 2]}, {"0": [1, 10**30]}],
)
def test_steps_that_are_none_are_ignored(steps):
    job = a_running_job()
    pods = [RUN[0], a_pod(1, failed(agent_report(0, steps=steps)))]
    assert steps_of(written(job, plan_for(job, *pods, now=at(60)))) == [(0, None, None, None)]
