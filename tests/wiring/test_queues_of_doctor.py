"""What `ddpjob doctor` finds of queues."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_api import FakeApi, refusal

from ddpjob.client import AsyncClient
from ddpjob.client.queues import (
    check_queues,
    find_held,
    find_refused_pods,
    find_traps,
    find_without_kueue,
)
from ddpjob.core.api.kueue import Demand, Workload, new_workload, read_workload
from ddpjob.core.api.names import Identity
from ddpjob.core.api.queue import Queue
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


@pytest.mark.parametrize(
    ("reason", "message", "found"),
    [
        (
            "FailedCreate",
            'failed calling webhook "mpod.kb.io": context deadline exceeded',
            "Kueue's webhook mpod.kb.io fails, so the pods of job digits are refused",
        ),
        ("HeldByKueue", "", "Kueue takes the pods of job digits one by one"),
    ],
)
def test_pods_that_kueue_refuses_or_holds_are_found(reason: str, message: str, found: str) -> None:
    manifest = DDPJob.create("digits", image="i", args=["train.py"]).manifest()
    status = {"phase": "Pending", "reason": reason, "message": message}
    job = DDPJob.from_manifest({**manifest, "status": status})
    (finding,) = find_refused_pods([job])
    assert finding.found.startswith(found)
    conditions = [{"type": "Failed", "status": "True"}]
    ended = DDPJob.from_manifest({**manifest, "status": {**status, "conditions": conditions}})
    assert not list(find_refused_pods([ended]))


def test_without_kueue_a_job_that_waits_for_a_queue_is_found() -> None:
    (found,) = find_without_kueue([a_job("team")])
    assert "job digits has the queue team, and Kueue is not installed" in found.found
    assert not list(find_without_kueue([a_job()]))


def a_workload(*conditions: str, deleting: bool = False) -> Workload:
    """Return a Workload of a job with quota, with these conditions True."""
    owner = Identity("ml", "digits", "uid")
    body = new_workload(owner, 1, Demand(Queue("team"), 2, {}))
    body["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    if deleting:
        body["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    held = [{"type": kind, "status": "True"} for kind in ("QuotaReserved", *conditions)]
    body["status"] = {"conditions": held}
    (workload,) = filter(None, [read_workload(body)])
    return workload


def a_finished_job() -> DDPJob:
    conditions = [{"type": "Complete", "status": "True"}]
    manifest = {**a_job("team").manifest(), "status": {"conditions": conditions}}
    manifest["metadata"] = {**manifest["metadata"], "uid": "uid"}
    return DDPJob.from_manifest(manifest)


@pytest.mark.parametrize(
    ("workload", "jobs", "why"),
    [
        (a_workload(), [], ""),
        (a_workload(), [a_finished_job()], "has the room of a finished job"),
        (a_workload("Finished"), [a_finished_job()], ""),
        (a_workload("Evicted"), [], "has to give its room back"),
        (a_workload(deleting=True), [], "is deleted"),
    ],
)
def test_a_workload_that_waits_for_the_operator_has_the_command(
    workload: Workload, jobs: list[DDPJob], why: str
) -> None:
    found = list(find_held([workload], jobs))
    assert [f"Workload {workload.name} {why}, and waits" in one.found for one in found] == (
        [True] if why else []
    )
    for one in found:
        assert f"kubectl -n ml patch workload {workload.name}" in one.advice
        assert ("delete workload" in one.advice) == (not workload.deleting)


async def served(*_: object) -> web.Response:
    """Answer as an API server with Kueue when asked for the kinds of its API."""
    return web.json_response({"resources": []})


@pytest.mark.parametrize(
    ("forbidden", "found"),
    [
        ([], ["job digits waits for the LocalQueue team, which does not exist"]),
        (["localqueues"], []),
        (["localqueues", "workloads"], []),
        (["workloads"], ["job digits waits for the LocalQueue team, which does not exist"]),
    ],
    ids=["nothing", "queues", "queues and workloads", "workloads"],
)
async def test_a_queue_that_the_user_may_not_see_is_not_said_to_be_missing(
    fake: FakeApi, kubeconfig: Path, forbidden: list[str], found: list[str]
) -> None:
    fake.fault("GET", "/apis/kueue.x-k8s.io/v1beta2", served)
    for plural in forbidden:
        fake.fault("GET", f".*/{plural}", refusal(403, "Forbidden"))
    fake.create("ddpjobs", a_job("team").manifest())
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        assert [one.found for one in await check_queues(client)] == found
