"""What comes back from an API server, and what its refusals mean."""

import asyncio
import time

import pytest
from aiohttp import web
from fake_api import refusal
from gang import a_job

from ddpjob.client import AsyncClient, Rejected
from ddpjob.controller.errors import Refused
from ddpjob.controller.refusals import refused_or_error
from ddpjob.controller.writer import is_gone
from ddpjob.core.api.reasons import Reason
from ddpjob.kube import api as client
from ddpjob.kube.api import ApiClient, configuration
from ddpjob.kube.errors import ApiError, Unreachable
from ddpjob.kube.kinds import JOBS, PODS
from ddpjob.kube.request import ReadDocument, Request, Verb


async def test_an_error_has_the_message_of_the_api_server(fake, api):
    fake.fault("GET", ".*", refusal(403, "Forbidden", "no, and this is why"))
    with pytest.raises(ApiError, match="no, and this is why") as caught:
        await api.call(ReadDocument(JOBS.api))
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("", "404 page not found"),
        ("NotFound", "the server could not find the requested resource"),
        ("", "<html>a proxy's page</html>"),
        ("NotFound", 'admission webhook "keep.example" denied the request: not now'),
    ],
)
async def test_only_the_api_server_says_that_an_object_is_gone(fake, api, reason, message):
    read = Request(Verb.GET, JOBS, "ml", "digits")
    assert not await api.read(read)
    fake.fault("GET", ".*/ddpjobs/digits", refusal(404, reason, message))
    with pytest.raises(ApiError) as caught:
        await api.read(read)
    assert not is_gone(caught.value)


async def test_a_job_that_a_webhook_keeps_is_not_deleted(fake, kubeconfig):
    fake.create("ddpjobs", a_job())
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as user:
        denied = refusal(404, "NotFound", 'admission webhook "keep.example" denied the request')
        fake.fault("DELETE", ".*/ddpjobs/digits", denied)
        with pytest.raises(Rejected, match="denied the request"):
            await user.delete("digits", wait=False)
        gone = refusal(404, "NotFound", 'ddpjobs.ddpjob.dev "digits" not found')
        fake.fault("DELETE", ".*/ddpjobs/digits", gone)
        await user.delete("digits", wait=False)


async def test_an_api_server_that_answers_too_late_counts_as_unreachable(fake, api):
    fake.stall()
    with pytest.raises(Unreachable):
        await api.call(ReadDocument(JOBS.api), timeout=0.05)


async def test_a_missing_api_server_counts_as_unreachable(kubeconfig, fake):
    settings = await configuration(kubeconfig)
    settings.host = "http://127.0.0.1:1"
    api = ApiClient(settings)
    with pytest.raises(Unreachable):
        await api.call(ReadDocument(JOBS.api))
    await api.close()


@pytest.mark.parametrize("text", ["<html>a proxy's page</html>", "[]", ""])
async def test_an_answer_that_is_no_object_counts_as_unreachable(fake, api, text):
    async def page(request, proceed):
        return web.Response(text=text)

    fake.fault("GET", ".*", page)
    with pytest.raises(Unreachable):
        await api.call(ReadDocument(JOBS.api))


def no_op():
    pass


async def list_pages(api):
    return [objects async for objects, _ in api.pages(JOBS, None, no_op)]


async def test_a_long_list_comes_in_pages_that_grow(fake, api, monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAGE", 2)
    for number in range(12):
        fake.create("ddpjobs", a_job(f"job-{number}"))
    pages = await list_pages(api)
    assert [len(objects) for objects in pages] == [2, 8, 2]
    assert len({job["metadata"]["uid"] for objects in pages for job in objects}) == 12


async def test_the_pages_of_large_objects_stay_small(fake, api, monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAGE", 2)
    monkeypatch.setattr(client, "PAGE_BYTES", 30_000)
    for number in range(6):
        job = a_job(f"job-{number}")
        job["spec"]["args"] = ["x" * 10_000]
        fake.create("ddpjobs", job)
    assert [len(objects) for objects in await list_pages(api)] == [2, 2, 2]


async def test_a_page_that_fails_is_requested_again_and_not_the_whole_list(fake, api, monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAGE", 1)
    monkeypatch.setattr(client, "LONGEST_PAGE", 1)
    monkeypatch.setattr(client, "FIRST_PAGE_RETRY", 0.01)
    for number in range(4):
        fake.create("ddpjobs", a_job(f"job-{number}"))
    pages = api.pages(JOBS, None, no_op)
    await anext(pages)
    fake.fault("GET", ".*", refusal(429, "TooManyRequests"), times=3)
    rest = [objects async for objects, _ in pages]
    assert len(rest) == 3
    assert len(fake.reads("/apis/.*/ddpjobs")) == 4 + 3


async def test_a_list_that_is_forbidden_is_not_tried_again(fake, api):
    fake.fault("GET", ".*", refusal(403, "Forbidden"))
    with pytest.raises(ApiError):
        await list_pages(api)
    assert len(fake.reads("/apis/.*/ddpjobs")) == 1


async def test_retry_after_delays_the_next_request(fake, api):
    await asyncio.wait_for(api.wait_until_allowed(), 1)
    fake.fault("GET", ".*", refusal(429, "TooManyRequests", **{"Retry-After": "1"}))
    with pytest.raises(ApiError):
        await api.call(ReadDocument(JOBS.api))
    asked = time.monotonic()
    await api.wait_until_allowed()
    assert time.monotonic() - asked > 0.9


async def test_a_webhook_that_asks_for_a_pause_does_not_stop_the_other_requests(fake, api):
    denied = 'admission webhook "quota.acme.dev" denied the request'
    fake.fault("POST", ".*", refusal(429, "TooManyRequests", denied, **{"Retry-After": "60"}))
    with pytest.raises(ApiError):
        await api.call(Request(Verb.CREATE, PODS, "ml", body={}))
    await asyncio.wait_for(api.wait_until_allowed(), 1)


@pytest.mark.parametrize(
    ("status", "words", "reason", "final"),
    [
        (422, "spec.containers[0].name: Required value", Reason.INVALID_POD, True),
        (400, "unknown field spec.containerz", Reason.INVALID_POD, True),
        (
            403,
            'pods "a" is forbidden: exceeded quota: small, requested: pods=1',
            Reason.QUOTA,
            False,
        ),
        (
            422,
            "ValidatingAdmissionPolicy 'digests' with binding 'all' denied request: …",
            Reason.FORBIDDEN,
            False,
        ),
        (403, 'pods "a" is forbidden: failed quota: small: must specify cpu', Reason.QUOTA, False),
        (
            403,
            'pods "a" is forbidden: violates PodSecurity "restricted:latest": …',
            Reason.POD_SECURITY,
            False,
        ),
        (403, "… because it is being terminated", Reason.NAMESPACE_ENDING, False),
        (404, 'namespaces "ml" not found', Reason.NAMESPACE_ENDING, False),
        (403, 'User "x" cannot create resource "pods"', Reason.FORBIDDEN, False),
        (413, "Request entity too large", Reason.INVALID_POD, True),
        (500, "etcdserver: request is too large", Reason.INVALID_POD, True),
        (503, "the server is overloaded", Reason.NO_ANSWER, False),
        (504, "request did not complete", Reason.NO_ANSWER, False),
    ],
)
def test_each_refusal_has_its_reason(status, words, reason, final):
    refused = refused_or_error(ApiError(status, "NotFound" if status == 404 else "", words))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.final) == (reason, final)
    assert words in refused.message


def test_a_refusal_by_pod_security_says_what_to_do():
    error = ApiError(403, "Forbidden", 'violates PodSecurity "restricted:latest"')
    assert "set spec.podSecurity to Restricted" in str(refused_or_error(error))
    assert "remove from spec.podTemplate" in str(refused_or_error(error, restricted=True))


def test_a_quota_on_an_unnamed_resource_gets_advice():
    error = ApiError(
        403, "Forbidden", 'pods "a" is forbidden: failed quota: small: must specify limits.memory'
    )
    assert "create the job again with spec.resources" in str(refused_or_error(error))


@pytest.mark.parametrize("status", [401, 404, 409, 429])
def test_other_errors_stay_errors(status):
    error = ApiError(status, "", "later")
    assert refused_or_error(error) is error
