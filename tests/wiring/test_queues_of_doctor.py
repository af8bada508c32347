"""What `ddpjob doctor` finds of queues."""

from typing import Any

import pytest

from ddpjob.client.queues import find_held, find_traps, find_without_kueue
from ddpjob.core.api.kueue import Demand, Queue, new_workload, read_workload
from ddpjob.core.api.names import Identity
from ddpjob.jobs.user_job import DDPJob


def a_job(queue: str = "") -> DDPJob:
    job = DDPJob.create("digits", image="i", args=["train.py"])
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return DDPJob.from_manifest(
        {**job.manifest(), "metadata": {"name": "digits", "labels": labels}}
    )


def queues(*names: str) -> list[dict[str, Any]]:
    return [{"metadata": {"name": name}} for name in names]


@pytest.mark.parametrize(
    ("job", "known", "found"),
    [
        (a_job("team"), queues("team"), []),
        (a_job("team"), queues(), ["waits for the LocalQueue team, which does not exist"]),
        (a_job("team"), queues("a", "b"), ["waits for the LocalQueue team, which does not exist"]),
        (a_job(), queues("team"), []),
        (a_job(), queues("default"), ["default also takes the pods of jobs without a queue"]),
        (a_job("default"), queues("default"), []),
    ],
)
def test_queues_that_do_not_exist_and_a_default_one_are_found(
    job: DDPJob, known: list[dict[str, Any]], found: list[str]
) -> None:
    shown = list(find_traps([job], known))
    assert len(shown) == len(found)
    assert all(words in one.found for words, one in zip(found, shown, strict=True))


def test_without_kueue_a_job_that_waits_for_a_queue_is_found() -> None:
    (found,) = find_without_kueue([a_job("team")])
    assert "job digits has the queue team, and Kueue is not installed" in found.found
    assert not list(find_without_kueue([a_job()]))


@pytest.mark.parametrize("deleting", [False, True])
def test_a_workload_that_waits_for_the_operator_has_the_command(deleting: bool) -> None:
    owner = Identity("ml", "digits", "uid")
    body = new_workload(owner, 1, Demand(Queue("team"), 2, {}))
    body["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    if deleting:
        body["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    workload = read_workload(body)
    assert workload
    found = list(find_held([workload]))
    assert bool(found) == deleting
    for one in found:
        assert f"kubectl -n ml patch workload {workload.name}" in one.advice
