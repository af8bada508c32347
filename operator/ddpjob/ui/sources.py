"""Read the jobs for the pages: those of a cluster, or the runs of this machine."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Generic, Protocol, TypeVar

from ddpjob.client import AsyncClient, ClientError, LogChoice, LogLine
from ddpjob.client.local import LocalClient
from ddpjob.core.observe.observation import Pod
from ddpjob.core.observe.pods import read_pod
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.jobs.user_job import DDPJob

# Lines at the end of a log: for the page of a job, for its curves, and for its progress in a list.
LOG_LINES = 300
CURVE_LINES = 20_000
PROGRESS_LINES = 20

# Times in seconds: the longest wait for a kubelet, for the page of a job and in a list, where one
# must not delay the others; and how long the figures of a job are kept.
LOG_SECONDS, LIST_SECONDS = 10.0, 2.0
KEPT_SECONDS = 10.0

# Maximum number of jobs whose figures are kept, and of jobs whose progress is kept.
MAX_METRICS, MAX_PROGRESS = 20, 100

T = TypeVar("T")


class Source(Protocol):
    """Jobs to read. Every method raises ClientError. `title` says whose jobs they are."""

    title: str

    async def jobs(self) -> Sequence[DDPJob]: ...

    async def job(self, namespace: str, name: str) -> DDPJob: ...

    async def pods(self, job: DDPJob) -> Sequence[Pod]: ...

    async def progress(self, job: DDPJob) -> Progress:
        """Return the progress of a running job."""
        ...

    async def metrics(self, job: DDPJob) -> RunMetrics: ...

    async def log(self, job: DDPJob, node: int) -> Sequence[LogLine]:
        """Return the last lines of a node."""
        ...


class Kept(Generic[T]):
    """The values read for the last `size` jobs. They are read again after KEPT_SECONDS.

    Pages ask for them every few seconds, and several at once: for text, and for the picture.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._found: dict[str, asyncio.Task[tuple[float, T]]] = {}

    async def get(self, key: str, read: Callable[[], Awaitable[T]]) -> T:
        """Return the kept value of `read` for a job, or call it."""

        async def timed() -> tuple[float, T]:
            value = await read()
            return time.monotonic(), value

        task = self._found.pop(key, None)
        if task is None or _is_old(task):
            task = asyncio.create_task(timed())
        # The newest one is last.
        self._found[key] = task
        if len(self._found) > self._size:
            del self._found[next(iter(self._found))]
        # A closed page must not end the reads of others.
        return (await asyncio.shield(task))[1]


def _is_old(task: "asyncio.Task[tuple[float, T]]") -> bool:
    if not task.done():
        return False
    if task.cancelled() or task.exception():
        return True
    return time.monotonic() - task.result()[0] > KEPT_SECONDS


class ClusterSource:
    """The jobs of a namespace of a cluster, or of all namespaces."""

    def __init__(self, client: AsyncClient, *, all_namespaces: bool) -> None:
        self._client = client
        self._all = all_namespaces
        self._metrics: Kept[RunMetrics] = Kept(MAX_METRICS)
        self._progress: Kept[Progress] = Kept(MAX_PROGRESS)
        self.title = "all namespaces" if all_namespaces else f"namespace {client.namespace}"

    async def jobs(self) -> Sequence[DDPJob]:
        return await self._client.list(all_namespaces=self._all)

    async def job(self, namespace: str, name: str) -> DDPJob:
        return await self._client.get(name, namespace=namespace)

    # The rights to list pods and to read logs may be missing. The status of a job says enough.

    async def pods(self, job: DDPJob) -> Sequence[Pod]:
        with suppress(ClientError):
            found = map(read_pod, await self._client.pods(job))
            return [pod for pod in found if pod is not None]
        return ()

    async def progress(self, job: DDPJob) -> Progress:
        async def read() -> Progress:
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(LIST_SECONDS):
                    return await self._client.progress(job, tail=PROGRESS_LINES)
            return Progress()

        return await self._progress.get(job.uid, read)

    async def metrics(self, job: DDPJob) -> RunMetrics:
        async def read() -> RunMetrics:
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(LOG_SECONDS):
                    return await self._client.metrics(
                        job.name, namespace=job.namespace, tail=CURVE_LINES
                    )
            return RunMetrics()

        return await self._metrics.get(job.uid, read)

    async def log(self, job: DDPJob, node: int) -> Sequence[LogLine]:
        choice = LogChoice(nodes=frozenset({node}), tail=LOG_LINES)
        found: deque[LogLine] = deque(maxlen=LOG_LINES)
        try:
            async with asyncio.timeout(LOG_SECONDS):
                lines = self._client.logs(job.name, choice, namespace=job.namespace)
                async with aclosing(lines):
                    async for line in lines:
                        found.append(line)
        except TimeoutError as error:
            message = f"the log cannot be read: no answer within {LOG_SECONDS:.0f} s"
            raise ClientError(message) from error
        return found


class LocalSource:
    """The runs of `ddpjob run --local` in one folder."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self._metrics: Kept[RunMetrics] = Kept(MAX_METRICS)
        self.title = f"folder {client.runs}"

    async def jobs(self) -> Sequence[DDPJob]:
        return await asyncio.to_thread(self._client.list)

    async def job(self, namespace: str, name: str) -> DDPJob:
        return await asyncio.to_thread(self._client.get, name)

    async def pods(self, job: DDPJob) -> Sequence[Pod]:
        return ()

    async def progress(self, job: DDPJob) -> Progress:
        return Progress.from_events((await self.metrics(job)).events)

    async def metrics(self, job: DDPJob) -> RunMetrics:
        return await self._metrics.get(
            job.name, lambda: asyncio.to_thread(self._client.metrics, job.name)
        )

    async def log(self, job: DDPJob, node: int) -> Sequence[LogLine]:
        choice = LogChoice(nodes=frozenset({node}), tail=LOG_LINES)
        return await asyncio.to_thread(
            lambda: deque(self._client.logs(job.name, choice), LOG_LINES)
        )
