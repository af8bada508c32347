"""The client of a cluster: submits jobs, follows them, and changes or deletes them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ddpjob.client.apply import CREATE, FIELD_MANAGER, Applied, Applier
from ddpjob.client.code import owned_code
from ddpjob.client.errors import (
    ClientError,
    NotConnected,
    NotFound,
    Rejected,
    WaitTimeout,
    client_errors,
)
from ddpjob.client.follow import Follower, Item
from ddpjob.client.logs import ALL_LINES, LogChoice, LogLine, merged_logs
from ddpjob.core import names
from ddpjob.core.names import Phase
from ddpjob.core.readers import Dict, did_you_mean, quoted
from ddpjob.core.run_metrics import RunMetrics, parse_metric
from ddpjob.core.user_job import DDPJob
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import NotConfigured
from ddpjob.kube.kinds import CONFIG_MAPS, JOBS, PODS, Kind
from ddpjob.kube.kubeconfig import user_configuration
from ddpjob.kube.watch import list_objects, watch

Jobs = list[DDPJob]

# Seconds for a deleted job to be gone, or for a suspended one to have no pods.
CHANGE_SECONDS = 600.0

# Lines at the end of a log that tell how far a training is.
PROGRESS_LINES = 200


class AsyncClient:
    """Jobs of one cluster, with the rights of a kubeconfig or of a pod's service account.

        async with await AsyncClient.connect() as client:
            job = await client.submit(DDPJob.create("digits", image=…, args=[…]))
            job = await client.wait("digits", timeout=600)

    Every method raises a ClientError, whose message says what is wrong. `namespace` is that of jobs
    for which none is named.
    """

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    @classmethod
    async def connect(
        cls,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> Self:
        """Return a client of a context of a kubeconfig, or of the cluster that this pod is in."""
        try:
            settings, default = await user_configuration(kubeconfig, context)
        except NotConfigured as error:
            raise NotConnected(str(error)) from error
        return cls(ApiClient(settings), namespace or default)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.api.close()

    # Read

    async def get(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Return a job. Raises NotFound."""
        place = namespace or self.namespace
        with client_errors():
            body = await self.api.get(JOBS.path(place, name))
        if body is None:
            raise await self._not_found(name, place)
        return DDPJob.from_manifest(body)

    async def list(self, *, namespace: str | None = None, all_namespaces: bool = False) -> Jobs:
        """Return the jobs of a namespace or of all namespaces, by their names."""
        place = None if all_namespaces else namespace or self.namespace
        with client_errors():
            found, _ = await list_objects(self.api, JOBS, place, {"limit": "250"})
        jobs = [DDPJob.from_manifest(body) for body in found]
        return sorted(jobs, key=lambda job: (job.namespace, job.name))

    async def watch(
        self, name: str | None = None, *, namespace: str | None = None, all_namespaces: bool = False
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
                    yield sorted(jobs.values(), key=lambda job: (job.namespace, job.name))

    async def pods(self, name: str, *, namespace: str | None = None) -> Sequence[Dict]:
        """Return the pods of a job, as the API server shows them."""
        query = {"labelSelector": f"{names.LABEL_JOB}={name}"}
        with client_errors():
            found, _ = await list_objects(self.api, PODS, namespace or self.namespace, query)
        return found

    # Follow

    async def wait(
        self, name: str, *, namespace: str | None = None, timeout: float | None = None
    ) -> DDPJob:
        """Return the job once it is Complete or Failed. `timeout` is in seconds.

        Raises WaitTimeout, or NotFound if it is deleted before.
        """
        job = await self.get(name, namespace=namespace)
        try:
            async with asyncio.timeout(timeout):
                return await self._wait(job)
        except TimeoutError as error:
            job = await self.get(name, namespace=namespace)
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
        self, name: str, choice: LogChoice = ALL_LINES, *, namespace: str | None = None
    ) -> AsyncGenerator[Item, None]:
        """Yield the job after each change of it, and the lines of its pods, until it has finished.

        The lines are those of all nodes and attempts, unless `choice` says less.
        """
        place = namespace or self.namespace
        await self.get(name, namespace=place)
        with client_errors():
            async with aclosing(Follower(self.api, place, name, choice).items()) as items:
                async for item in items:
                    yield item

    async def logs(
        self, name: str, choice: LogChoice = ALL_LINES, *, namespace: str | None = None
    ) -> AsyncGenerator[LogLine, None]:
        """Yield what the pods of a job have written so far, in the order of time."""
        job = await self.get(name, namespace=namespace)
        pods = await self.pods(name, namespace=job.namespace)
        with client_errors():
            async with aclosing(merged_logs(self.api, pods, choice)) as lines:
                async for line in lines:
                    yield line

    async def metrics(
        self, name: str, *, namespace: str | None = None, tail: int | None = None
    ) -> RunMetrics:
        """Return the events that the trainer of rank 0 has printed: losses, accuracies, speeds.

        `tail` limits how many lines of each log are read.
        """
        choice = LogChoice(nodes=frozenset({0}), tail=tail)
        metrics = RunMetrics()
        async for line in self.logs(name, choice, namespace=namespace):
            event = parse_metric(line.text)
            if event is not None:
                metrics.events.append(event)
        return metrics

    # Write

    async def submit(
        self, job: DDPJob, *, namespace: str | None = None, dry_run: bool = False
    ) -> DDPJob:
        """Create a job, or change the fields of it that may change. Raises Rejected."""
        job = replace(job, namespace=job.namespace or namespace or "")
        applied = await self.apply([job.manifest()], dry_run=dry_run)
        return DDPJob.from_manifest(applied[0].body)

    async def apply(
        self, documents: Iterable[Dict], *, namespace: str | None = None, dry_run: bool = False
    ) -> Sequence[Applied]:
        """Apply the documents of a manifest, of any kinds, by server-side apply.

        All are tried first, so that a mistake in one changes nothing. The ConfigMap of a job's code
        becomes the job's own, and is deleted with it.
        """
        applied = await Applier(self.api, namespace or self.namespace).apply(
            documents, dry_run=dry_run
        )
        if not dry_run:
            for one in owned_code([found.body for found in applied]):
                await self._patch(CONFIG_MAPS, one)
        return applied

    async def suspend(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Suspend a job. Its pods get SIGTERM and their grace period; its checkpoints stay."""
        return await self._change(name, namespace, {"suspend": True})

    async def resume(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Resume a suspended job from its last checkpoint."""
        return await self._change(name, namespace, {"suspend": False})

    async def scale(self, name: str, nodes: int, *, namespace: str | None = None) -> DDPJob:
        """Change the number of nodes. A running job begins a new attempt of that size."""
        return await self._change(name, namespace, {"nodes": nodes})

    async def delete(self, name: str, *, namespace: str | None = None, wait: bool = True) -> DDPJob:
        """Delete a job with its pods, and return what it was. Its checkpoints stay."""
        job = await self.get(name, namespace=namespace)
        await self._delete(job)
        if wait:
            await self._wait_until(job, lambda jobs: not _has(jobs, job), "still exists")
        return job

    async def restart(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Begin a running job's next attempt, or run a finished job again.

        A running job is suspended and resumed. A finished one is deleted and created again with the
        same manifest, code and checkpoints.
        """
        job = await self.get(name, namespace=namespace)
        if job.finished:
            return await self.replace(job)
        await self.suspend(name, namespace=job.namespace)
        await self._wait_until(job, _is_suspended, "still has pods")
        return await self.resume(name, namespace=job.namespace)

    async def replace(self, job: DDPJob) -> DDPJob:
        """Delete a job and create it again with the same manifest.

        If that fails, the message of the error names the manifest's job, and `job` still has it.
        """
        code = await self._release_code(job)
        await self._delete(job)
        await self._wait_until(job, lambda jobs: not _has(jobs, job), "still exists")
        body = await self._create(job)
        for one in owned_code([*code, body]):
            await self._patch(CONFIG_MAPS, one)
        return DDPJob.from_manifest(body)

    async def _create(self, job: DDPJob) -> dict[str, Any]:
        with client_errors():
            path = JOBS.collection(job.namespace)
            return await self.api.call("POST", path, job.manifest(), CREATE)

    async def _change(self, name: str, namespace: str | None, spec: Mapping[str, Any]) -> DDPJob:
        place = namespace or self.namespace
        job = await self.get(name, namespace=place)
        if job.finished:
            raise Rejected(
                f"job {name} is {job.phase}, so it cannot be changed; ddpjob restart {name} runs "
                "it again"
            )
        body = {"metadata": {"name": name, "namespace": place}, "spec": spec}
        return DDPJob.from_manifest(await self._patch(JOBS, body))

    async def _patch(self, kind: Kind, body: Dict) -> dict[str, Any]:
        metadata = body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        with client_errors():
            return await self.api.call("PATCH", path, body, {"fieldManager": FIELD_MANAGER})

    async def _release_code(self, job: DDPJob) -> Sequence[Dict]:
        """Take the ConfigMaps of a job's code away from it, so that they outlive it."""
        query = {"labelSelector": f"{names.LABEL_CODE}={job.name}"}
        with client_errors():
            found, _ = await list_objects(self.api, CONFIG_MAPS, job.namespace, query)
        for one in found:
            metadata = {key: one["metadata"][key] for key in ("name", "namespace")}
            await self._patch(CONFIG_MAPS, {"metadata": {**metadata, "ownerReferences": None}})
        return found

    async def _delete(self, job: DDPJob) -> None:
        body = {"propagationPolicy": "Background", "preconditions": {"uid": job.uid}}
        try:
            with client_errors():
                await self.api.call("DELETE", JOBS.path(job.namespace, job.name), body)
        except Rejected as error:
            if error.status != 404:
                raise

    async def _wait_until(self, job: DDPJob, is_so: Callable[[Jobs], bool], what: str) -> None:
        """Wait until the watch of a job shows what is expected. Raises WaitTimeout."""
        changes = self.watch(job.name, namespace=job.namespace)
        try:
            async with asyncio.timeout(CHANGE_SECONDS), aclosing(changes):
                async for jobs in changes:
                    if is_so(jobs):
                        return
        except TimeoutError as error:
            raise WaitTimeout(f"job {job.name} {what} after {CHANGE_SECONDS:.0f} s") from error

    async def _not_found(self, name: str, namespace: str) -> ClientError:
        """Return the error for a job that does not exist, with the names of others."""
        jobs = await self.list(namespace=namespace)
        if not jobs:
            return NotFound(f"job {quoted(name)} not found; namespace {namespace} has no jobs")
        hint = did_you_mean(name, [job.name for job in jobs])
        return NotFound(f"job {quoted(name)} not found in namespace {namespace}{hint}")


def _has(jobs: Jobs, job: DDPJob) -> bool:
    return any(found.uid == job.uid for found in jobs)


def _is_suspended(jobs: Jobs) -> bool:
    """Return True if a job has no pods any more: it is suspended, finished or gone."""
    return not jobs or jobs[0].phase == Phase.SUSPENDED or jobs[0].finished
