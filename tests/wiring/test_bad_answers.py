"""Answers and objects of a cluster that must neither stop the operator nor start two attempts."""

import asyncio
import json
import sys

import pytest
from aiohttp import web
from fake_api import refusal
from gang import a_job, is_running, pods, status, until

from ddpjob.controller import lister
from ddpjob.controller.main import RECURSION_LIMIT, operate

POD_POSTS = "/api/v1/namespaces/ml/pods"
DENIED = 'admission webhook "keep.example" denied the request: not now'


def resize(fake, nodes):
    fake.change("ddpjobs", "digits", spec={**fake.get("ddpjobs", "digits")["spec"], "nodes": nodes})


@pytest.mark.parametrize("code", [404, 409])
async def test_a_deletion_that_a_webhook_denies_is_no_deletion(fake, operator, code):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    denied = refusal(code, "Conflict", DENIED)
    fake.fault("DELETE", f"{POD_POSTS}/.*", denied, times=float("inf"))
    resize(fake, 3)
    await until(lambda: any(event["reason"] == "DeleteRefused" for event in fake.all("events")))
    await until(lambda: len(fake.writes(f"{POD_POSTS}/digits-0-0")) > 1)
    assert pods(fake) == ["digits-0-0", "digits-0-1"]


async def test_an_overloaded_api_server_does_not_postpone_the_startup_deadline(fake, operator):
    busy = refusal(429, "TooManyRequests", "try again later")
    fake.fault("POST", POD_POSTS, busy, times=float("inf"))
    fake.create("ddpjobs", a_job(startupDeadlineSeconds=2))
    await until(lambda: status(fake).get("phase") == "Failed")
    assert status(fake)["reason"] == "TooManyRequests"
    assert "startupDeadlineSeconds=2: 429 TooManyRequests" in status(fake)["message"]


async def test_pods_that_cannot_be_deleted_are_reported_in_one_event(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    denied = refusal(403, "Forbidden", DENIED)
    fake.fault("DELETE", f"{POD_POSTS}/.*", denied, times=float("inf"))
    resize(fake, 3)
    await until(lambda: len(fake.writes(f"{POD_POSTS}/.*")) >= 6)
    refused = [event for event in fake.all("events") if event["reason"] == "DeleteRefused"]
    assert len(refused) == 1
    assert "pod digits-0-0 cannot be deleted; it is tried again" in refused[0]["message"]


async def test_a_pod_without_the_operators_labels_is_not_created_again(fake, operator):
    async def strip(request, proceed):
        name = json.loads((await proceed()).body)["metadata"]["name"]
        changed = fake.change("pods", name, metadata={"labels": {"ddpjob.dev/job": "digits"}})
        return web.json_response(changed, status=201)

    fake.fault("POST", POD_POSTS, strip, times=float("inf"))
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == "Forbidden")
    assert "ddpjob.dev/attempt" in status(fake)["message"]


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (500, "etcdserver: request is too large", "InvalidPod"),
        (413, "Request entity too large: limit is 3145728", "InvalidPod"),
        (500, "resource quota evaluation timed out", "NoAnswer"),
    ],
)
async def test_the_answer_to_a_create_reaches_the_status(fake, operator, code, message, reason):
    fake.fault("POST", POD_POSTS, refusal(code, "InternalError", message), times=float("inf"))
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == reason)
    assert message in status(fake)["message"]


@pytest.mark.parametrize("namespaces", [("ml", "other")])
async def test_no_attempt_begins_while_pods_cannot_be_read(fake, options, monkeypatch):
    monkeypatch.setattr(lister, "INTERVAL", 0.2)
    monkeypatch.setattr(lister, "EARLY_INTERVALS", ())
    monkeypatch.setattr(lister, "COMPLETE_INTERVAL", 0)
    first = asyncio.create_task(operate(options))
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    resize(fake, 3)
    await until(lambda: status(fake).get("attempt", {}).get("number") == 1)
    first.cancel()
    await asyncio.wait([first])

    fake.fault("GET", POD_POSTS, refusal(403, "Forbidden", "pods is forbidden"), times=3)
    second = asyncio.create_task(operate(options))
    await until(
        lambda: not any("/pods" in fault.path.pattern for fault in fake.faults) or second.done()
    )
    second.cancel()
    await asyncio.wait([second])
    assert not any(name.startswith("digits-1-") for name in pods(fake))


@pytest.fixture
def recursion_limit():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(RECURSION_LIMIT)
    yield
    sys.setrecursionlimit(before)


async def test_a_job_of_deep_json_stops_no_other_job(fake, recursion_limit, operator):
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    fake.create("ddpjobs", a_job("deep", affinity={"nodeAffinity": deep}))
    await until(lambda: status(fake, "deep"))
    fake.create("ddpjobs", a_job())
    await until(lambda: {"digits-0-0", "digits-0-1"} <= set(pods(fake)))
