"""The questions of the operator to the agents, over real connections."""

import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import web

from ddpjob.controller import inquiries as module
from ddpjob.controller.inquiries import Inquiries
from ddpjob.core.api import names
from ddpjob.core.observe.agent_state import AgentState
from ddpjob.core.plan import Question

KEY = ("ml", "digits")


def question(uid="a", attempt=0, address="127.0.0.1"):
    return Question(f"digits-0-{uid}", uid, address, attempt, names.STATE_PATH)


@pytest.fixture
async def agent(monkeypatch):
    """Serve /state, and return the agent: its answer, its delays and the count of requests."""

    class Agent:
        body = json.dumps({"attempt": 0, "ended": [[0, 0]]}).encode()
        wait = 0.0
        pieces = 1
        requests = 0

    async def answer(request):
        Agent.requests += 1
        await asyncio.sleep(Agent.wait)
        response = web.StreamResponse()
        await response.prepare(request)
        size = len(Agent.body) // Agent.pieces + 1
        for start in range(0, len(Agent.body), size):
            await response.write(Agent.body[start : start + size])
            await asyncio.sleep(0.02 if Agent.pieces > 1 else 0)
        return response

    app = web.Application()
    app.router.add_get("/state", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(names, "AGENT_PORT", site._server.sockets[0].getsockname()[1])
    yield Agent
    await runner.cleanup()


class Clock:
    """A clock set by the test."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
async def asking():
    looks: asyncio.Queue = asyncio.Queue()
    found = Inquiries(Clock(), looks.put_nowait)
    yield found, looks
    await found.close()


async def test_an_answer_is_there_at_the_next_look(agent, asking):
    inquiries, looks = asking
    inquiries.ask(KEY, [question()])
    assert await asyncio.wait_for(looks.get(), 10) == KEY
    assert inquiries.answers(["a", "b"]) == {"a": AgentState(0, ended=((0, 0),))}


async def test_a_pod_is_asked_again_after_some_time_or_in_another_attempt(agent, asking):
    inquiries, looks = asking
    for _ in range(5):
        inquiries.ask(KEY, [question()])
    await asyncio.wait_for(looks.get(), 10)
    inquiries.ask(KEY, [question()])
    assert agent.requests == 1
    # The answer is still about attempt 0, as from a pod still ending its processes.
    for _ in range(5):
        inquiries.ask(KEY, [question(attempt=1)])
    await asyncio.wait_for(looks.get(), 10)
    inquiries.ask(KEY, [question(attempt=1)])
    assert agent.requests == 2
    inquiries._clock.now += module.INTERVAL
    inquiries.ask(KEY, [question(attempt=1)])
    # The last answer counts until the next one comes.
    assert inquiries.answers(["a"])
    await asyncio.wait_for(looks.get(), 10)
    assert agent.requests == 3


async def test_an_answer_does_not_count_for_long(agent, asking):
    inquiries, looks = asking
    inquiries.ask(KEY, [question()])
    await asyncio.wait_for(looks.get(), 10)
    inquiries._clock.now += module.FRESH
    assert inquiries.answers(["a"]) == {}


async def test_the_last_answer_of_a_pod_that_answers_no_more_does_not_count(agent, asking):
    inquiries, looks = asking
    inquiries.ask(KEY, [question()])
    await asyncio.wait_for(looks.get(), 10)
    agent.body = b"no state"
    inquiries._clock.now += module.INTERVAL
    await assert_no_answer(asking, question())


async def test_another_pod_at_the_address_of_a_lost_one_does_not_answer_for_it(agent, asking):
    lost = replace(question(), path=names.state_path("uid of a job", 0))
    await assert_no_answer(asking, lost)


async def test_an_answer_may_come_in_pieces(agent, asking):
    agent.pieces = 3
    inquiries, looks = asking
    inquiries.ask(KEY, [question()])
    await asyncio.wait_for(looks.get(), 10)
    assert inquiries.answers(["a"])


@pytest.mark.parametrize("body", [b"no state", b"[1]", b'{"attempt": 0}' + b" " * 4096])
async def test_another_answer_is_none(agent, asking, body):
    agent.body = body
    await assert_no_answer(asking, question())


async def test_a_late_answer_is_none(agent, asking, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    agent.wait = 0.5
    await assert_no_answer(asking, question())


@pytest.mark.parametrize("address", ["127.0.0.2", "no address", "::1", "1.2.3.4:80/x?"])
async def test_no_connection_is_no_answer(agent, asking, monkeypatch, address):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    await assert_no_answer(asking, question(address=address))


async def assert_no_answer(asking, asked):
    inquiries, looks = asking
    inquiries.ask(KEY, [asked])
    await asyncio.gather(*inquiries._tasks)
    assert inquiries.answers([asked.uid]) == {}
    assert looks.empty()


async def test_no_more_answers_are_kept_than_needed(agent, asking, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    inquiries, looks = asking
    inquiries.ask(KEY, [question(str(number)) for number in range(5)])
    await asyncio.wait_for(looks.get(), 10)
    assert len(inquiries.answers(map(str, range(5)))) == 3
