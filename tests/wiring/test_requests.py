"""Requests as values: their paths, and how their bodies are sent."""

import pytest
from aiohttp import web

from ddpjob.kube.kinds import JOBS, NAMESPACES, NODES, PODS
from ddpjob.kube.request import Request, Verb


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (Request(Verb.GET, PODS), "api/v1/pods"),
        (Request(Verb.CREATE, PODS, "n"), "api/v1/namespaces/n/pods"),
        (Request(Verb.GET, PODS, "n", "p", "log"), "api/v1/namespaces/n/pods/p/log"),
        (Request(Verb.GET, NAMESPACES, name="n"), "api/v1/namespaces/n"),
        (Request(Verb.GET, NODES, "n", "x"), "api/v1/nodes/x"),
        (
            Request(Verb.UPDATE, JOBS, "n", "j", "status"),
            "apis/ddpjob.dev/v1alpha1/namespaces/n/ddpjobs/j/status",
        ),
        (Request(Verb.GET, JOBS, ""), "apis/ddpjob.dev/v1alpha1/ddpjobs"),
    ],
)
def test_the_path_of_a_request(request_, path):
    assert request_.path == path


@pytest.mark.parametrize(
    ("verb", "method", "media_type"),
    [
        (Verb.CREATE, "POST", "application/json"),
        (Verb.UPDATE, "PUT", "application/json"),
        (Verb.DELETE, "DELETE", "application/json"),
        (Verb.MERGE, "PATCH", "application/merge-patch+json"),
        (Verb.STRATEGIC_MERGE, "PATCH", "application/strategic-merge-patch+json"),
        (Verb.APPLY, "PATCH", "application/apply-patch+yaml"),
    ],
)
async def test_the_verb_decides_how_a_body_is_sent(fake, api, verb, method, media_type):
    async def echo(request, proceed):
        return web.json_response({"type": request.content_type, "body": await request.json()})

    fake.fault(method, ".*/pods/p", echo)
    answer = await api.call(Request(verb, PODS, "n", "p", body={"a": 1}))
    assert answer == {"type": media_type, "body": {"a": 1}}
