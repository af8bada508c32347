"""Ask the agents of running pods for their state, and keep their answers for the next looks.

A question needs no right: it is a GET from the operator's pod to the port of a job's pod. Without
an answer, as behind a NetworkPolicy or outside the cluster, decisions are made as before.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from ddpjob.controller.cache import Key
from ddpjob.core import names
from ddpjob.core.agent_state import MAX_STATE, AgentState, read_state
from ddpjob.core.plan import Question

log = logging.getLogger(__name__)

# The longest wait for an answer, and between two questions to one pod, in seconds.
ANSWER_SECONDS = 1.0
INTERVAL = 10.0

# How many agents are asked at a time, and how many answers are kept.
AT_A_TIME = 16
KEPT = 4096


@dataclass(frozen=True)
class Answer:
    """What an agent has answered to the last question, and when it was asked."""

    asked: float
    state: AgentState | None = None


class Inquiries:
    """The questions of one operator. `clock` gives seconds; `look_again` takes the key of a job."""

    def __init__(self, clock: Callable[[], float], look_again: Callable[[Key], None]) -> None:
        self._clock = clock
        self._look_again = look_again
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_A_TIME)

    def answers(self, uids: Iterable[str]) -> dict[str, AgentState]:
        """Return the states that the agents of these pods have answered, by UID."""
        found = ((uid, self._answers.get(uid)) for uid in uids)
        return {uid: answer.state for uid, answer in found if answer and answer.state}

    def ask(self, key: Key, questions: Iterable[Question]) -> None:
        """Ask agents in the background, each at most every INTERVAL seconds."""
        due = [question for question in questions if self._is_due(question)]
        for question in due:
            self._keep(question.uid, Answer(self._clock(), self._state(question.uid)))
        if due:
            task = asyncio.create_task(self._ask_all(key, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_due(self, question: Question) -> bool:
        last = self._answers.get(question.uid)
        if last is None or (last.state and last.state.attempt != question.attempt):
            return True
        return self._clock() - last.asked >= INTERVAL

    def _state(self, uid: str) -> AgentState | None:
        last = self._answers.get(uid)
        return last.state if last else None

    def _keep(self, uid: str, answer: Answer) -> None:
        self._answers[uid] = answer
        self._answers.move_to_end(uid)
        while len(self._answers) > KEPT:
            self._answers.popitem(last=False)

    async def _ask_all(self, key: Key, questions: list[Question]) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            asked = (self._ask_one(session, question) for question in questions)
            answered = await asyncio.gather(*asked)
        if any(answered):
            self._look_again(key)

    async def _ask_one(self, session: aiohttp.ClientSession, question: Question) -> bool:
        """Ask one agent. Return True if it has answered."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with self._places:
            try:
                url = _url_of(question.address)
                async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
                    # One more byte shows that there is too much.
                    text = await answer.content.read(MAX_STATE + 1)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                log.debug("the agent of pod %s does not answer: %s", question.name, error)
                return False
        state = read_state(text) if len(text) <= MAX_STATE else None
        if state is None:
            return False
        asked = self._answers[question.uid].asked if question.uid in self._answers else 0.0
        self._keep(question.uid, Answer(asked, state))
        return True


def _url_of(address: str) -> URL:
    """Return where the agent of a pod answers. Raises ValueError if `address` is none."""
    return URL.build(scheme="http", host=address, port=names.AGENT_PORT, path=names.STATE_PATH)
