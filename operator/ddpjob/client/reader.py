"""Read what a cluster knows of jobs, and follow them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from html import escape

from ddpjob.client.errors import (
    ClientError,
    NotConnected,
    NotFound,
    WaitTimeout,
    client_errors,
)
from ddpjob.client.follow import Follower, Item
from ddpjob.client.logs import ALL_LINES, LogChoice, LogLine, merged_logs
from ddpjob.core.api import names
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.readers import Dict, did_you_mean, quoted
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.run_metrics import RunMetrics, parse_metric
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.api import ApiClient
from ddpjob.kube.kinds import JOBS, PODS
from ddpjob.kube.request import Request, Verb
from ddpjob.kube.watch import list_objects, watch

# Last lines of a log, read to find the progress of a training.
PROGRESS_LINES = 200


class Jobs(list[DDPJob]):
    """Jobs in their order. Printed, and in a notebook, they are a table."""

    def __str__(self) -> str:
        # Imported late to keep commands quick.
        from ddpjob.show.jobs import job_table

        namespaces = {job.namespace for job in self}
        lines = job_table(
            self,
            {},
            datetime.now(UTC),
            namespaces=len(namespaces) > 1,
        )
        return "\n".join(line.plain for line in lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class JobReader:
    """The read-only methods of a client. `namespace` is the default for jobs without one."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def get(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Return a job. Raises NotFound."""
        place = namespace or self.namespace
        read = Request(Verb.GET, JOBS, place, name)
        with client_errors():
            body = await self.api.read(read)
        if body is None:
            raise await self._not_found(name, place)
        return DDPJob.from_manifest(body)

    async def list(
        self,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
    ) -> Jobs:
        """Return the jobs of a namespace or of all namespaces, by their names."""
        place = None if all_namespaces else namespace or self.namespace
        with client_errors():
            found, _ = await list_objects(self.api, JOBS, place, {"limit": "250"})
        jobs = map(DDPJob.from_manifest, found)
        return _by_name(jobs)

    async def watch(
        self,
        name: str | None = None,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
    ) -> AsyncGenerator[Jobs, None]:
        """Yield the jobs, and again after each change of one of them, for ever."""
        place = None if all_namespaces else namespace or self.namespace
        query = {"fieldSelector": f"metadata.name={name}"} if name else {}
        jobs: dict[str, DDPJob] = {}
        is_listed = False
        with client_errors():
            async for change in watch(self.api, JOBS, place, query):
                if change is None:
                    is_listed = True
                else:
                    what, body = change
                    job = DDPJob.from_manifest(body)
                    jobs[job.uid] = job
                    if what == "DELETED":
                        del jobs[job.uid]
                if is_listed:
                    yield _by_name(jobs.values())

    async def pods(self, job: DDPJob, *, node: int | None = None) -> Sequence[Dict]:
        """Return the pods of a job or of one of its nodes, as the API server shows them."""
        selector = f"{names.LABEL_JOB}={job.name}"
        if node is not None:
            selector += f",{names.LABEL_INDEX}={node}"
        query = {"labelSelector": selector, "limit": "250"}
        with client_errors():
            found, _ = await list_objects(self.api, PODS, job.namespace, query)
        # Those of an earlier job with this name may still end.
        return [pod for pod in found if owner_of(pod) == job.identity]

    async def wait(
        self,
        name: str,
        *,
        namespace: str | None = None,
        timeout: float | None = None,
    ) -> DDPJob:
        """Return the job once it is Complete or Failed. `timeout` is in seconds.

        Raises WaitTimeout, or NotFound if it is deleted before.
        """
        job = await self.get(name, namespace=namespace)
        if job.finished:
            return job
        try:
            async with asyncio.timeout(timeout):
                return await self._wait(job)
        except TimeoutError as error:
            with suppress(NotConnected):
                job = await self.get(name, namespace=namespace)
            if job.finished:
                return job
            raise WaitTimeout(
                f"job {name} has not finished after {timeout:g} s: {job.phase}: {job.message}"
            ) from error

    async def _wait(self, job: DDPJob) -> DDPJob:
        async with aclosing(self.watch(job.name, namespace=job.namespace)) as changes:
            async for jobs in changes:
                if not jobs:
                    raise NotFound(f"job {job.name} was deleted")
                if jobs[0].finished:
                    return jobs[0]
        raise AssertionError("a watch has no end")

    async def follow(
        self,
        name: str,
        choice: LogChoice = ALL_LINES,
        *,
        namespace: str | None = None,
    ) -> AsyncGenerator[Item, None]:
        """Yield the job after each change of it, and the lines of its pods, until it has finished.

        The lines are those of all nodes and attempts, unless `choice` limits them. Raises
        ValueError for an attempt together with a tail: its last lines are not known yet.
        """
        if choice.attempt is not None and choice.tail is not None:
            raise ValueError("the tail of an attempt cannot be followed")
        job = await self.get(name, namespace=namespace)
        follower = Follower(self.api, job, _resolved(choice, job))
        with client_errors():
            async with aclosing(follower.items()) as items:
                async for item in items:
                    yield item

    async def logs(
        self,
        name: str,
        choice: LogChoice = ALL_LINES,
        *,
        namespace: str | None = None,
    ) -> AsyncGenerator[LogLine, None]:
        """Yield what the pods of a job have written so far, in the order of time."""
        job = await self.get(name, namespace=namespace)
        pods = await self.pods(job)
        async with aclosing(self._lines(job, choice, pods)) as lines:
            async for line in lines:
                yield line

    async def _lines(
        self,
        job: DDPJob,
        choice: LogChoice,
        pods: Iterable[Dict],
    ) -> AsyncGenerator[LogLine, None]:
        merged = merged_logs(self.api, pods, _resolved(choice, job))
        with client_errors():
            async with aclosing(merged) as lines:
                async for line in lines:
                    yield line

    async def metrics(
        self,
        name: str,
        *,
        namespace: str | None = None,
        tail: int | None = None,
    ) -> RunMetrics:
        """Return the events printed by the trainer of rank 0: losses, accuracies, speeds.

        `tail` limits how many lines of each log are read.
        """
        job = await self.get(name, namespace=namespace)
        return await self._metrics(job, tail)

    async def _metrics(self, job: DDPJob, tail: int | None) -> RunMetrics:
        metrics = RunMetrics()
        pods = await self.pods(job, node=0)
        async with aclosing(self._lines(job, LogChoice(tail=tail), pods)) as lines:
            async for line in lines:
                event = parse_metric(line.text)
                if event is not None:
                    metrics.events.append(event)
        return metrics

    async def progress(self, job: DDPJob, *, tail: int = PROGRESS_LINES) -> Progress:
        """Return how far a job is, as the last lines of its log tell."""
        metrics = await self._metrics(job, tail)
        return Progress.from_events(metrics.events)

    async def _not_found(self, name: str, namespace: str) -> ClientError:
        """Return the error for a missing job, with a hint at similar names."""
        jobs = await self.list(namespace=namespace)
        if not jobs:
            return NotFound(f"job {quoted(name)} not found; namespace {namespace} has no jobs")
        hint = did_you_mean(name, [job.name for job in jobs])
        return NotFound(f"job {quoted(name)} not found in namespace {namespace}{hint}")


def _by_name(jobs: Iterable[DDPJob]) -> Jobs:
    return Jobs(sorted(jobs, key=lambda job: (job.namespace, job.name)))


def _resolved(choice: LogChoice, job: DDPJob) -> LogChoice:
    """Return a choice with the job's number of ranks per node."""
    return replace(choice, ranks_per_node=job.processes_per_node)
