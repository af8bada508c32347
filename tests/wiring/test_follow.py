"""The logs followed by a user, if the API server or a kubelet does not answer."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from ddpjob import DDPJob
from ddpjob.client import follow
from ddpjob.client.follow import Follower
from ddpjob.client.logs import ALL_LINES, LogLine, PodLog
from ddpjob.kube.errors import Unreachable
from ddpjob.kube.request import Request

UID = "uid"


class Logs:
    """An API server with given answers to requests of a log; the last one is repeated."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers)
        self.queries: list[Mapping[str, str]] = []

    async def stream(self, request: Request, *_: Any) -> AsyncIterator[bytes]:
        self.queries.append(request.query)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        for line in answer:
            yield line.encode()


async def read(api: Logs, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Read the log of an ended pod, and return its lines."""
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0.0)
    job = DDPJob.create("j", image="i", args=["a"])
    follower = Follower(api, job, ALL_LINES, _ended={UID})  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await follower._read(UID, PodLog("n", "j-0-0", 0, 0), ALL_LINES)
    found = []
    while not follower._found.empty():
        line = follower._found.get_nowait()
        assert isinstance(line, LogLine)
        found.append(line.text)
    return found


async def test_a_log_goes_on_after_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ["2026-01-01T00:00:01Z a", "2026-01-01T00:00:02Z b"]
    api = Logs(Unreachable("reset"), first)
    assert await read(api, monkeypatch) == ["a", "b"]
    assert api.queries[0]["follow"] == "true"


async def test_a_kubelet_that_never_answers_does_not_keep_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Logs(Unreachable("timed out"))
    (line,) = await read(api, monkeypatch)
    assert "the rest of the log of this pod cannot be read" in line
    assert len(api.queries) == follow.MAX_FAILURES
