"""The questions of the operator to the agents, over real connections."""

import asyncio
import json
from dataclasses import replace
from typing import ClassVar

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


# Agents without an answer, as behind a NetworkPolicy


SILENT = ("ml", "silent")


@pytest.fixture
def get(monkeypatch):
    """Let each question to a pod of `silent` hang, and answer all others. Return what was asked."""

    class Network:
        asked: ClassVar[list] = []
        most = 0
        now = 0

    async def get(session, question):
        Network.asked.append(question.uid)
        if not question.uid.startswith("silent"):
            return b'{"attempt": 0}'
        Network.now += 1
        Network.most = max(Network.most, Network.now)
        try:
            await asyncio.sleep(module.ANSWER_SECONDS)
        finally:
            Network.now -= 1
        return b""

    monkeypatch.setattr(module, "_get", get)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    return Network


def silent_questions(count, attempt=0):
    return [question(f"silent-{number}", attempt) for number in range(count)]


async def test_a_large_silent_job_does_not_delay_the_questions_to_others(get, asking):
    inquiries, looks = asking
    inquiries.ask(SILENT, silent_questions(1000))
    await asyncio.sleep(0)
    inquiries.ask(KEY, [question()])
    assert await asyncio.wait_for(looks.get(), 10) == KEY
    assert get.asked.index("a") <= module.OF_ONE_JOB
    assert get.most == module.OF_ONE_JOB


async def test_silent_jobs_take_turns_with_others(get, asking):
    inquiries, looks = asking
    for number in range(2 * module.AT_A_TIME):
        inquiries.ask(("ml", f"silent-{number}"), [question(f"silent-{number}-{i}") for i in "ab"])
    inquiries.ask(KEY, [question()])
    assert await asyncio.wait_for(looks.get(), 10) == KEY
    # The first half of them had free places for both questions, and the others one turn each.
    assert len(get.asked) <= 3 * module.AT_A_TIME + 1
    assert get.most <= module.AT_A_TIME


async def test_a_pod_is_not_asked_again_while_its_question_waits(get, asking):
    inquiries, _ = asking
    for _ in range(5):
        inquiries.ask(SILENT, silent_questions(20))
        inquiries._clock.now += module.INTERVAL
    assert (len(inquiries._waiting[SILENT]), len(inquiries._tasks)) == (16, 4)
    while inquiries._tasks:
        await asyncio.wait(inquiries._tasks)
        await asyncio.sleep(0)
    assert sorted(get.asked) == sorted({asked.uid for asked in silent_questions(20)})


async def test_a_question_that_waits_is_about_the_present_attempt_and_pods(get, asking):
    inquiries, _ = asking
    inquiries.ask(SILENT, silent_questions(20))
    inquiries.ask(SILENT, silent_questions(10, attempt=1)[4:])
    waiting = inquiries._waiting[SILENT]
    assert list(waiting) == [f"silent-{number}" for number in range(4, 10)]
    assert {one.attempt for one in waiting.values()} == {1}
    inquiries.ask(SILENT, [])
    assert not inquiries._waiting
    assert not inquiries._line


async def test_the_answers_of_some_pods_do_not_wait_for_all_silent_ones(get, asking):
    inquiries, looks = asking
    inquiries.ask(SILENT, [question(), *silent_questions(1000)])
    while looks.empty():
        await asyncio.wait(inquiries._tasks, return_when=asyncio.FIRST_COMPLETED)
        inquiries._clock.now += module.ANSWER_SECONDS
    assert inquiries._waiting
    assert inquiries.answers(["a"])
