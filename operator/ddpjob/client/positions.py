"""Read the current positions of waiting jobs in their queues from Kueue.

The positions are only shown to people, and every command works without them. So a missing,
forbidden or slow API is not an error.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ddpjob.core.api.queue_positions import PENDING_WORKLOADS, Position, read_positions
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.errors import CallFailed
from ddpjob.kube.kinds import PENDING_QUEUES
from ddpjob.kube.request import Request, Verb

if TYPE_CHECKING:
    from ddpjob.kube.api import ApiClient

# Workloads in a page (Kueue's own default), and the limit of pages read of a queue.
PAGE = 1000
MAX_PAGES = 5

# Limit of LocalQueues in a look. All are asked at the same time.
MAX_QUEUES = 40

# Seconds for all answers. Later positions are not shown.
TIME_LIMIT = 2.0

# Seconds between two requests to a queue while a command watches. The pause is longer after a look
# without any answer, because each such look may make the command wait for TIME_LIMIT.
PERIOD = 10.0
PERIOD_WITHOUT_ANSWER = 60.0


class LocalQueue(NamedTuple):
    """A LocalQueue with waiting jobs."""

    namespace: str
    name: str


# The Workloads of jobs, by their names, with their positions in one LocalQueue.
Found = Mapping[str, Position]


class Positions:
    """The positions of jobs in their queues, asked for again after PERIOD at the earliest."""

    def __init__(self, api: "ApiClient", clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._found: Mapping[LocalQueue, Found] = {}
        self._next_time = -float("inf")

    async def add_to(self, jobs: Sequence[DDPJob]) -> list[DDPJob]:
        """Return the jobs. Waiting jobs have their positions, as far as Kueue reports them."""
        queues = _queues_of(jobs)
        now = self._clock()
        if queues and now >= self._next_time:
            await self._look(queues)
            period = PERIOD if self._found else PERIOD_WITHOUT_ANSWER
            self._next_time = now + period
        return [replace(job, position=self._position(job)) for job in jobs]

    def _position(self, job: DDPJob) -> Position | None:
        queue = LocalQueue(job.namespace, job.queue)
        found = self._found.get(queue, {})
        return found.get(job.waiting_workload)

    async def _look(self, queues: Mapping[LocalQueue, Collection[str]]) -> None:
        asked = dict(islice(queues.items(), MAX_QUEUES))
        looks = [self._ask(queue, workloads) for queue, workloads in asked.items()]
        answers = await asyncio.gather(*looks)
        found = {}
        for queue, answer in zip(asked, answers, strict=True):
            if answer is not None:
                found[queue] = answer
        self._found = found

    async def _ask(self, queue: LocalQueue, workloads: Collection[str]) -> Found | None:
        """Return the positions of Workloads in a queue, or None without an answer in time."""
        found: dict[str, Position] | None = None
        # If a later page fails, the positions in the earlier pages are still right.
        with suppress(TimeoutError, CallFailed):
            async with asyncio.timeout(TIME_LIMIT):
                for number in range(MAX_PAGES):
                    page = await self._page(queue, number)
                    found = {**(found or {}), **page}
                    is_last = len(page) < PAGE
                    if is_last or found.keys() >= set(workloads):
                        break
        return found

    async def _page(self, queue: LocalQueue, number: int) -> dict[str, Position]:
        query = {
            "limit": str(PAGE),
            "offset": str(number * PAGE),
        }
        request = Request(
            Verb.GET,
            PENDING_QUEUES,
            queue.namespace,
            queue.name,
            PENDING_WORKLOADS,
            query=query,
        )
        answer = await self._api.call(request)
        return read_positions(answer, queue.namespace)


def _queues_of(jobs: Sequence[DDPJob]) -> Mapping[LocalQueue, Collection[str]]:
    """Return the LocalQueues of waiting jobs, with the names of the jobs' Workloads."""
    found = defaultdict(list)
    for job in jobs:
        if job.waiting_workload:
            queue = LocalQueue(job.namespace, job.queue)
            found[queue].append(job.waiting_workload)
    return found
