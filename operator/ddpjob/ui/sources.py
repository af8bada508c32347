"""What the pages show: the jobs of a cluster, or the runs of this machine."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Protocol

from ddpjob.client import AsyncClient, ClientError, LogChoice, LogLine
from ddpjob.client.local import LocalClient
from ddpjob.core.observe import Pod
from ddpjob.core.pods import read_pod
from ddpjob.core.run_metrics import RunMetrics
from ddpjob.core.user_job import DDPJob

# Lines of a node's log that a page shows, and lines at its end that are read for the curves.
LOG_LINES = 300
CURVE_LINES = 20_000


class Source(Protocol):
    """Jobs to read. Every method raises ClientError. `title` says whose jobs they are."""

    title: str

    async def jobs(self) -> Sequence[DDPJob]: ...

    async def job(self, namespace: str, name: str) -> DDPJob: ...

    async def pods(self, job: DDPJob) -> Sequence[Pod]: ...

    async def metrics(self, job: DDPJob) -> RunMetrics: ...

    async def log(self, job: DDPJob, node: int) -> Sequence[LogLine]:
        """Return the last lines of a node."""
        ...


class ClusterSource:
    """The jobs of a namespace of a cluster, or of all namespaces."""

    def __init__(self, client: AsyncClient, *, all_namespaces: bool) -> None:
        self._client = client
        self._all = all_namespaces
        self.title = "all namespaces" if all_namespaces else f"namespace {client.namespace}"

    async def jobs(self) -> Sequence[DDPJob]:
        return await self._client.list(all_namespaces=self._all)

    async def job(self, namespace: str, name: str) -> DDPJob:
        return await self._client.get(name, namespace=namespace)

    async def pods(self, job: DDPJob) -> Sequence[Pod]:
        # Without the right to list pods, the status of the job says enough.
        with suppress(ClientError):
            found = map(read_pod, await self._client.pods(job))
            return [pod for pod in found if pod is not None]
        return ()

    async def metrics(self, job: DDPJob) -> RunMetrics:
        # The right to read logs may be missing too.
        with suppress(ClientError):
            return await self._client.metrics(job.name, namespace=job.namespace, tail=CURVE_LINES)
        return RunMetrics()

    async def log(self, job: DDPJob, node: int) -> Sequence[LogLine]:
        choice = LogChoice(nodes=frozenset({node}), tail=LOG_LINES)
        async with aclosing(self._client.logs(job.name, choice, namespace=job.namespace)) as lines:
            return last_lines([line async for line in lines])


class LocalSource:
    """The runs of `ddpjob run --local` in one folder."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self.title = f"folder {client.runs}"

    async def jobs(self) -> Sequence[DDPJob]:
        return await asyncio.to_thread(self._client.list)

    async def job(self, namespace: str, name: str) -> DDPJob:
        return await asyncio.to_thread(self._client.get, name)

    async def pods(self, job: DDPJob) -> Sequence[Pod]:
        return ()

    async def metrics(self, job: DDPJob) -> RunMetrics:
        return await asyncio.to_thread(self._client.metrics, job.name)

    async def log(self, job: DDPJob, node: int) -> Sequence[LogLine]:
        choice = LogChoice(nodes=frozenset({node}))
        return await asyncio.to_thread(lambda: last_lines(self._client.logs(job.name, choice)))


def last_lines(lines: Iterable[LogLine]) -> Sequence[LogLine]:
    """Return the last lines of several pods together."""
    return list(deque(lines, LOG_LINES))
