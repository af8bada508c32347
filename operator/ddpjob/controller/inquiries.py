"""Ask the agents of running pods for their state, and keep their answers for the next looks.

A question needs no right: it is a GET from the operator's pod to the port of a job's pod. Without
an answer, as behind a NetworkPolicy or outside the cluster, decisions are made as before.

Behind a NetworkPolicy each question lasts until its timeout. So jobs take turns, and each has only
some of the places: a large silent job does not delay the questions to others.
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
from ddpjob.controller.fair import FairLine
from ddpjob.core.api import names
from ddpjob.core.observe.agent_state import MAX_STATE, AgentState, read_state
from ddpjob.core.plan import Question

log = logging.getLogger(__name__)

# The longest wait for an answer, the time between two questions to one pod, and how long an answer
# is used, in seconds.
ANSWER_SECONDS = 1.0
INTERVAL = 10.0
FRESH = 15.0

# How many agents are asked at a time, how many of these are of one job, and how many answers are
# kept.
AT_A_TIME = 16
OF_ONE_JOB = 4
KEPT = 4096


@dataclass(frozen=True)
class Asked:
    """The last question to an agent: when, about which attempt, and the last answer with its time.

    Times are those of the clock of Inquiries. `time` is that of the look which needed the answer:
    the next look comes INTERVAL seconds after it, even if the question had to wait for its turn.
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
        # The waiting questions of each job by the pod's UID, in their order, and the jobs in line.
        self._waiting: dict[Key, dict[str, Question]] = {}
        self._line: FairLine[Key] = FairLine()
        # The pods that are being asked, each with the attempt.
        self._under_way: set[tuple[str, int]] = set()
        # The jobs with answers that no look has used yet, each with the time of the first one.
        self._news: dict[Key, float] = {}

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
        """Ask agents in the background, each at most every INTERVAL seconds in an attempt.

        A job's earlier questions that still wait keep their places. Those to other pods are given
        up.
        """
        wanted = {question.uid: question for question in questions}
        before = self._waiting.get(key, {})
        waiting = {uid: wanted[uid] for uid in before if uid in wanted}
        for uid, question in wanted.items():
            if uid not in waiting and self._is_due(question):
                last = self._asked.get(uid) or Asked(0.0, 0)
                self._keep(uid, replace(last, time=self._clock(), attempt=question.attempt))
                waiting[uid] = question
        for uid in before.keys() - waiting.keys():
            # It was not asked, so it may be asked again at once.
            last = self._asked.get(uid) or Asked(0.0, 0)
            self._keep(uid, replace(last, time=self._clock() - INTERVAL))
        self._let_wait(key, waiting)
        self._ask_next()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_due(self, question: Question) -> bool:
        if (question.uid, question.attempt) in self._under_way:
            return False
        last = self._asked.get(question.uid)
        if last is None or last.attempt != question.attempt:
            return True
        return self._clock() - last.time >= INTERVAL

    def _keep(self, uid: str, asked: Asked) -> None:
        self._asked[uid] = asked
        self._asked.move_to_end(uid)
        while len(self._asked) > KEPT:
            self._asked.popitem(last=False)

    def _let_wait(self, key: Key, waiting: dict[str, Question]) -> None:
        """Let these questions of a job wait, and no others."""
        was_waiting = self._waiting.pop(key, None) is not None
        if waiting:
            self._waiting[key] = waiting
        if waiting and not was_waiting:
            self._line.add(key, key)
        elif was_waiting and not waiting:
            self._line.remove(key, key)

    def _ask_next(self) -> None:
        """Begin waiting questions as long as there are places for them."""
        while self._line and len(self._tasks) < AT_A_TIME:
            # No other waiting job has fewer questions under way.
            key = self._line.first()
            if self._line.under_way[key] >= OF_ONE_JOB:
                return
            waiting = self._waiting.pop(key)
            self._line.remove(key, key)
            question = waiting.pop(next(iter(waiting)))
            self._line.begin(key)
            self._let_wait(key, waiting)
            self._begin(key, question)

    def _begin(self, key: Key, question: Question) -> None:
        self._under_way.add((question.uid, question.attempt))
        task = asyncio.create_task(self._ask_one(key, question))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(task, key, question))

    async def _ask_one(self, key: Key, question: Question) -> None:
        """Ask one agent. Keep its answer, or else forget its last one."""
        async with aiohttp.ClientSession(trust_env=False) as session:
            text = await _get(session, question)
        state = read_state(text)
        last = self._asked.get(question.uid)
        if last:
            self._keep(question.uid, replace(last, state=state, answered=self._clock()))
        if state is not None:
            self._news.setdefault(key, self._clock())

    def _end(self, task: asyncio.Task[None], key: Key, question: Question) -> None:
        """Give the place of an ended question to the next one."""
        self._tasks.discard(task)
        self._under_way.discard((question.uid, question.attempt))
        self._line.end(key)
        if task.cancelled():
            # The operator ends.
            return
        self._ask_next()
        self._report(key)

    def _report(self, key: Key) -> None:
        """Let a job be looked at once its questions have ended, or have lasted for a while.

        One look serves many answers, but the answers of some pods do not wait for all silent ones.
        """
        if key not in self._news:
            return
        has_ended = key not in self._waiting and not self._line.under_way[key]
        if has_ended or self._clock() - self._news[key] >= ANSWER_SECONDS:
            del self._news[key]
            self._look_again(key)


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
