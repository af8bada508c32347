"""Ask the agents of running pods for their state, and keep their answers for the next looks.

A question needs no right: it is a GET from the operator's pod to the port of a job's pod. Without
an answer, as behind a NetworkPolicy or outside the cluster, decisions are made as before.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from http import HTTPStatus

import aiohttp
from yarl import URL

from ddpjob.controller.cache import Key
from ddpjob.core.api import names
from ddpjob.core.observe.agent_state import MAX_STATE, AgentState, read_state
from ddpjob.core.plan import Question

log = logging.getLogger(__name__)

# The longest wait for an answer, the time between two questions to one pod, and how long an answer
# is used, in seconds.
ANSWER_SECONDS = 1.0
INTERVAL = 10.0
FRESH = 15.0

# How many agents are asked at a time, and how many answers are kept.
AT_A_TIME = 16
KEPT = 4096


@dataclass(frozen=True)
class Asked:
    """The last question to an agent: when, about which attempt, and the last answer with its time.

    Times are those of the clock of Inquiries.
    """

    time: float
    attempt: int
    state: AgentState | None = None
    answered: float = float("-inf")


class Inquiries:
    """The questions of one operator. `clock` gives seconds; `look_again` takes the key of a job."""

    def __init__(self, clock: Callable[[], float], look_again: Callable[[Key], None]) -> None:
        self._clock = clock
        self._look_again = look_again
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_A_TIME)

    def answers(self, uids: Iterable[str]) -> dict[str, AgentState]:
        """Return the agents' fresh answers for these pods, by UID."""
        oldest = self._clock() - FRESH
        found = ((uid, self._asked.get(uid)) for uid in uids)
        return {
            uid: asked.state
            for uid, asked in found
            if asked and asked.state and asked.answered > oldest
        }

    def ask(self, key: Key, questions: Iterable[Question]) -> None:
        """Ask agents in the background, each at most every INTERVAL seconds in an attempt."""
        due = [question for question in questions if self._is_due(question)]
        for question in due:
            last = self._asked.get(question.uid) or Asked(0.0, 0)
            asked = replace(last, time=self._clock(), attempt=question.attempt)
            self._keep(question.uid, asked)
        if due:
            task = asyncio.create_task(self._ask_all(key, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_due(self, question: Question) -> bool:
        last = self._asked.get(question.uid)
        if last is None or last.attempt != question.attempt:
            return True
        return self._clock() - last.time >= INTERVAL

    def _keep(self, uid: str, asked: Asked) -> None:
        self._asked[uid] = asked
        self._asked.move_to_end(uid)
        while len(self._asked) > KEPT:
            self._asked.popitem(last=False)

    async def _ask_all(self, key: Key, questions: list[Question]) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            asked = (self._ask_one(session, question) for question in questions)
            answered = await asyncio.gather(*asked)
        if any(answered):
            self._look_again(key)

    async def _ask_one(self, session: aiohttp.ClientSession, question: Question) -> bool:
        """Ask one agent. Return True if it has answered, or else forget its last answer."""
        async with self._places:
            text = await _get(session, question)
        state = read_state(text)
        last = self._asked.get(question.uid)
        if last:
            self._keep(question.uid, replace(last, state=state, answered=self._clock()))
        return state is not None


async def _get(session: aiohttp.ClientSession, question: Question) -> bytes:
    """Return the answer of an agent, or nothing if there is none or if it is too long."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    text = b""
    try:
        url = _url_of(question)
        async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                log.debug("the address of pod %s answers with %d", question.name, answer.status)
                return b""
            async for piece in answer.content.iter_chunked(MAX_STATE):
                text += piece
                if len(text) > MAX_STATE:
                    return b""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        log.debug("the agent of pod %s does not answer: %s", question.name, error)
        return b""
    return text


def _url_of(question: Question) -> URL:
    """Return the URL of an agent's state. Raises ValueError if the pod has no valid address."""
    host, port, path = question.address, names.AGENT_PORT, question.path
    return URL.build(scheme="http", host=host, port=port, path=path)
