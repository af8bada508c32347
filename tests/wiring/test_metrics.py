"""The metrics of the operator: those of each job, of the queue, and of requests."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddpjob.controller.cache import Cache
from ddpjob.controller.job_metrics import PART
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core.api.conditions import set_condition
from ddpjob.core.api.history import EndedAttempt
from ddpjob.core.api.names import Condition
from ddpjob.core.api.status import Account, Attempt, Status
from ddpjob.kube.kinds import JOBS, PODS
from ddpjob.kube.request import ReadDocument, Request, Verb


def a_job(name: str = "digits", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"},
        "spec": {"image": "i", "args": ["a"], "nodes": 2},
        "status": status,
    }


def lines(cache: Cache, **options: Any) -> list[str]:
    return asyncio.run(Metrics(cache, (), **options).text()).decode().splitlines()


RUNNING = {
    "phase": "Running",
    "attempt": {"number": 3},
    "budget": {"failures": 1, "disruptions": 2},
    "nodes": {"desired": 2, "ready": 1},
    "account": {"seconds": {"starting": 25, "training": 75}},
    # The newest attempt comes first.
    "attempts": [
        {"attempt": 2, "cause": "Hang", "end": "1970-01-01T00:05:00Z"},
        {"attempt": 1, "cause": "Failure", "end": "1970-01-01T00:02:00Z"},
        {"attempt": 0, "cause": "Hang", "end": "1970-01-01T00:01:00Z"},
    ],
}
HANG = 'ddpjob_job_attempt_end_timestamp_seconds{cause="Hang",ddpjob="digits",namespace="team"}'


@pytest.mark.parametrize(
    "line",
    [
        'ddpjob_job_info{accelerator="cpu",ddpjob="digits",namespace="team"} 1.0',
        'ddpjob_job_phase{ddpjob="digits",namespace="team",phase="Running"} 1.0',
        'ddpjob_job_attempt{ddpjob="digits",namespace="team"} 3.0',
        'ddpjob_job_restarts{budget="failures",ddpjob="digits",namespace="team"} 1.0',
        'ddpjob_job_restarts{budget="disruptions",ddpjob="digits",namespace="team"} 2.0',
        'ddpjob_job_nodes{ddpjob="digits",namespace="team",state="ready"} 1.0',
        'ddpjob_job_activity_seconds{activity="training",ddpjob="digits",namespace="team"} 75.0',
        'ddpjob_job_goodput_ratio{ddpjob="digits",namespace="team"} 0.75',
        'ddpjob_jobs{phase="Running"} 1.0',
        f"{HANG} 300.0",
    ],
)
def test_each_job_has_its_metrics(line: str) -> None:
    cache = Cache()
    cache.jobs.see(a_job(**RUNNING))
    assert line in lines(cache)


def test_a_new_job_is_pending_and_has_no_attempt() -> None:
    cache = Cache()
    cache.jobs.see(a_job())
    found = "\n".join(lines(cache))
    assert 'ddpjob_job_phase{ddpjob="digits",namespace="team",phase="Pending"} 1.0' in found
    assert "ddpjob_job_attempt{" not in found
    assert "ddpjob_job_goodput_ratio{" not in found


def test_the_training_that_goes_on_counts() -> None:
    since = (datetime.now(UTC) - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    cache = Cache()
    seconds = {"queued": 3600, "training": 60}
    account = {"seconds": seconds, "activity": "training", "since": since}
    cache.jobs.see(a_job(account=account))
    (line,) = [one for one in lines(cache) if one.startswith("ddpjob_job_goodput_ratio{")]
    assert float(line.split()[-1]) == pytest.approx(7260 / 10860, abs=0.01)


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Pending", "account": {"seconds": {"queued": 7200, "starting": 5}}},
        {
            "phase": "Failed",
            "account": {"seconds": {"starting": 90, "training": 10}},
            "conditions": [{"type": "Failed", "status": "True"}],
        },
    ],
    ids=["it has never trained", "it has finished"],
)
def test_a_job_has_no_goodput_while(status: dict[str, Any]) -> None:
    cache = Cache()
    cache.jobs.see(a_job(**status))
    assert not [line for line in lines(cache) if line.startswith("ddpjob_job_goodput_ratio{")]


def test_time_that_was_counted_as_training_is_not_counted_again_as_starting() -> None:
    metrics = Metrics(Cache(), ())
    status = Status(account=Account(seconds={"starting": 5, "training": 40}))
    metrics.count_seconds(Status(), status)
    later = replace(status, account=Account(seconds={"starting": 35, "training": 10}))
    metrics.count_seconds(status, later)
    text = asyncio.run(metrics.text()).decode()
    assert 'ddpjob_activity_seconds_total{activity="training"} 40.0' in text
    assert 'ddpjob_activity_seconds_total{activity="starting"} 5.0' in text


def test_a_restart_of_an_attempt_without_pods_has_its_own_cause() -> None:
    """After a failure, a job is suspended and resumed during its back-off."""
    metrics = Metrics(Cache(), ())
    failed = EndedAttempt(0, "Failure")
    first = Status(attempt=Attempt(0))
    held = Status(
        attempt=Attempt(1),
        attempts=(failed,),
        conditions=set_condition((), Condition.SUSPENDED, True, "Suspended", ""),
    )
    for old, number in ((first, 1), (held, 2)):
        metrics.count_restarts(old, replace(held, attempt=Attempt(number)))
    found = asyncio.run(metrics.text()).decode().splitlines()
    counts = [line for line in found if line.startswith("ddpjob_restarts_total")]
    assert {line for line in counts if not line.endswith(" 0.0")} == {
        'ddpjob_restarts_total{cause="Failure"} 1.0',
        'ddpjob_restarts_total{cause="Suspended"} 1.0',
    }


def test_a_finished_job_has_the_time_of_its_end() -> None:
    cache = Cache()
    cache.jobs.see(a_job(phase="Failed", completionTime="1970-01-01T00:10:00Z"))
    end = 'ddpjob_job_completion_timestamp_seconds{ddpjob="digits",namespace="team"} 600.0'
    assert end in lines(cache)


@pytest.mark.parametrize("attempt", [{"cause": ["x"]}, {"cause": "Hang", "end": 5}, {}])
def test_an_attempt_that_somebody_has_changed_has_no_metric(attempt: dict[str, Any]) -> None:
    cache = Cache()
    cache.jobs.see(a_job(attempts=[attempt]))
    name = "ddpjob_job_attempt_end_timestamp_seconds{"
    assert not [line for line in lines(cache) if line.startswith(name)]


def test_a_job_in_an_excluded_namespace_has_no_metrics() -> None:
    cache = Cache()
    cache.jobs.see(a_job(**RUNNING))
    found = lines(cache, excluded={"team"})
    assert not [line for line in found if "digits" in line]
    assert 'ddpjob_jobs{phase="Running"} 0.0' in found


def test_a_job_that_is_gone_has_no_metrics() -> None:
    cache = Cache()
    cache.jobs.see(a_job())
    cache.jobs.drop("digits")
    assert not [line for line in lines(cache) if 'ddpjob="digits"' in line]


def test_the_names_of_jobs_can_be_left_out() -> None:
    cache = Cache()
    cache.jobs.see(a_job(**RUNNING))
    assert not [line for line in lines(cache, each_job=False) if "digits" in line]


def test_requests_are_counted_by_what_they_are_about() -> None:
    metrics = Metrics(Cache(), ())
    for name in ("p", "q"):
        metrics.count_request(Request(Verb.MERGE, PODS, "n", name, body={}), 200)
    metrics.count_request(Request(Verb.UPDATE, JOBS, "n", "j", "status", body={}), 0)
    metrics.count_request(ReadDocument(JOBS.api), 404)
    text = asyncio.run(metrics.text()).decode()
    name = "ddpjob_api_requests_total"
    assert f'{name}{{method="PATCH",resource="pods",status="200"}} 2.0' in text
    assert f'{name}{{method="PUT",resource="ddpjobs/status",status="0"}} 1.0' in text
    assert f'{name}{{method="GET",resource="",status="404"}} 1.0' in text


async def test_the_time_that_a_job_waits_in_the_queue_is_measured() -> None:
    now = SimpleNamespace(seconds=10.0)
    queue: WorkQueue[str] = WorkQueue(lambda: now.seconds)
    waits: list[float] = []
    queue.on_wait = waits.append
    queue.add("job")
    now.seconds = 12.5
    assert await queue.get() == "job"
    assert waits == [2.5]


def test_metrics_can_be_read_whatever_a_status_has_in_it() -> None:
    cache = Cache()
    cache.jobs.see(a_job(phase='a "phase"\\ of\n two lines', attempt={"number": 10**15}))
    families = list(text_string_to_metric_families("\n".join(lines(cache)) + "\n"))
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert samples["ddpjob_job_phase"].labels["phase"] == 'a "phase"\\ of\n two lines'
    assert samples["ddpjob_job_attempt"].value == 2**31 - 1
    names = [family.name for family in families]
    assert len(names) == len(set(names))


def test_the_operator_works_while_the_metrics_of_many_jobs_are_written() -> None:
    cache = Cache()
    for number in range(10 * PART):
        cache.jobs.see(a_job(f"job-{number}", **RUNNING))
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            # A job goes meanwhile.
            cache.jobs.drop(f"job-{turns}")
            await asyncio.sleep(0)

    async def scrape() -> None:
        working = asyncio.create_task(other_work())
        await Metrics(cache, ()).text()
        working.cancel()

    asyncio.run(scrape())
    assert turns >= 9
