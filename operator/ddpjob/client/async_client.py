"""The client of a cluster: submits jobs, follows them, and changes or deletes them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ddpjob.client.apply import CREATE, FIELD_MANAGER, Applied, Applier
from ddpjob.client.code import owned_code, released_code
from ddpjob.client.errors import NotConnected, Rejected, WaitTimeout, client_errors
from ddpjob.client.reader import JobReader, Jobs
from ddpjob.core.api import names
from ddpjob.core.api.names import Phase
from ddpjob.core.api.readers import Dict, child
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError, NotConfigured
from ddpjob.kube.kinds import CONFIG_MAPS, JOBS, Kind
from ddpjob.kube.kubeconfig import user_configuration
from ddpjob.kube.request import Request, Verb

# Seconds for a deleted job to be gone, or for a suspended one to have no pods.
CHANGE_SECONDS = 600.0


class AsyncClient(JobReader):
    """Jobs of one cluster, with the rights of a kubeconfig or of a pod's service account.

        async with await AsyncClient.connect() as client:
            job = await client.submit(DDPJob.create("digits", image=…, args=[…]))
            job = await client.wait("digits", timeout=600)

    After a failure, every method raises a ClientError. Its message says what is wrong. `namespace`
    is the default for jobs without one.
    """

    @classmethod
    async def connect(
        cls,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> Self:
        """Return a client for a context of a kubeconfig, or for the cluster of this pod."""
        try:
            settings, default = await user_configuration(kubeconfig, context)
            api = ApiClient(settings)
        except NotConfigured as error:
            raise NotConnected(str(error)) from error
        # A certificate or key of the kubeconfig may be missing or broken.
        except (OSError, ValueError) as error:
            raise NotConnected(f"the kubeconfig cannot be used: {error}") from error
        return cls(api, namespace or default)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.api.close()

    async def submit(
        self,
        job: DDPJob,
        *,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> DDPJob:
        """Create a job, or change its mutable fields. Raises Rejected."""
        place = job.namespace or namespace or ""
        job = replace(job, namespace=place)
        applied = await self.apply(job.documents, dry_run=dry_run)
        # Jobs are applied last.
        last = applied[-1]
        return DDPJob.from_manifest(last.body)

    async def apply(
        self,
        documents: Iterable[Dict],
        *,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> Sequence[Applied]:
        """Apply the documents of a manifest, of any kinds, by server-side apply.

        All are tried in a dry run first, so a mistake in one changes nothing. The job becomes the
        owner of its code's ConfigMap, so both are deleted together.
        """
        applier = Applier(self.api, namespace or self.namespace)
        applied = await applier.apply(documents, dry_run=dry_run)
        if not dry_run:
            bodies = [one.body for one in applied]
            await self.own_code(bodies)
        return applied

    async def own_code(self, bodies: Sequence[Dict]) -> None:
        """Make jobs the owners of their code's ConfigMaps, so these are deleted with the jobs."""
        for patch in owned_code(bodies):
            await self._patch(Verb.STRATEGIC_MERGE, CONFIG_MAPS, patch)

    async def suspend(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Suspend a job. Its pods get SIGTERM and their grace period; its checkpoints stay."""
        return await self._change(name, namespace, {"suspend": True})

    async def resume(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Resume a suspended job from its last checkpoint."""
        return await self._change(name, namespace, {"suspend": False})

    async def retry(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Take a Failed job up again, with its counters, its history and its last checkpoint.

        Raises Rejected for a job in another phase.
        """
        job = await self.get(name, namespace=namespace)
        if job.phase == Phase.FAILED:
            retries = job.spec.get("retries", 0) + 1
            return await self._change_spec(job, {"retries": retries})
        advice = "nothing is to be done"
        if job.finished:
            advice = f"ddpjob restart {name} runs it again"
        message = f"job {name} is {job.phase}, and only a Failed job is taken up; {advice}"
        raise Rejected(message)

    async def scale(self, name: str, nodes: int, *, namespace: str | None = None) -> DDPJob:
        """Change the number of nodes. A running job begins a new attempt with the new number."""
        return await self._change(name, namespace, {"nodes": nodes})

    async def delete(
        self,
        name: str,
        *,
        namespace: str | None = None,
        wait: bool = True,
    ) -> DDPJob:
        """Delete a job with its pods, and return what it was. Its checkpoints stay."""
        job = await self.get(name, namespace=namespace)
        await self._delete(job)
        if wait:
            await self._wait_until_gone(job)
        return job

    async def restart(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Begin a running job's next attempt, or run a finished job again.

        A running job is suspended and resumed. A finished one is deleted and created again with the
        same manifest, code and checkpoints.
        """
        job = await self.get(name, namespace=namespace)
        if job.finished:
            return await self.replace(job)
        if job.phase == Phase.SUSPENDED:
            message = f"job {name} is suspended; ddpjob resume {name} continues it"
            raise Rejected(message)
        await self.suspend(name, namespace=job.namespace)
        await self._wait_until(job, _is_suspended, "is not suspended")
        return await self.resume(name, namespace=job.namespace)

    async def replace(self, job: DDPJob) -> DDPJob:
        """Delete a job and create it again with the same manifest.

        The API server tries the manifest first, under another name. If the creation fails
        nevertheless, `job` still has the manifest.
        """
        trial = job.renamed_for_trial()
        await self.apply([trial.manifest()], dry_run=True)
        code = await self.remove(job, keeps_code=True)
        body = await self._create(job)
        await self.own_code([*code, body])
        return DDPJob.from_manifest(body)

    async def remove(self, job: DDPJob, *, keeps_code: bool) -> Sequence[Dict]:
        """Delete a job to make room for a new one.

        With `keeps_code`, keep the ConfigMap of its code for the new job, and return it.
        """
        code: Sequence[Dict] = ()
        if keeps_code:
            code = await self._release_code(job)
        await self._delete(job)
        await self._wait_until_gone(job)
        return code

    async def _create(self, job: DDPJob) -> dict[str, Any]:
        request = Request(
            Verb.CREATE,
            JOBS,
            job.namespace,
            body=job.manifest(),
            query=CREATE,
        )
        with client_errors():
            return await self.api.call(request)

    async def _change(
        self,
        name: str,
        namespace: str | None,
        spec: Mapping[str, Any],
    ) -> DDPJob:
        job = await self.get(name, namespace=namespace)
        if job.finished:
            advice = f"ddpjob restart {name} runs it again"
            if not job.succeeded:
                advice = f"ddpjob retry {name} goes on with it, and {advice}"
            message = f"job {name} is {job.phase}, so it cannot be changed; {advice}"
            raise Rejected(message)
        return await self._change_spec(job, spec)

    async def _change_spec(self, job: DDPJob, spec: Mapping[str, Any]) -> DDPJob:
        metadata = {
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        }
        patch = {"metadata": metadata, "spec": spec}
        changed = await self._patch(Verb.MERGE, JOBS, patch)
        return DDPJob.from_manifest(changed)

    async def _patch(self, verb: Verb, kind: Kind, body: Dict) -> dict[str, Any]:
        metadata = body["metadata"]
        request = Request(
            verb,
            kind,
            metadata["namespace"],
            metadata["name"],
            body=body,
            query={"fieldManager": FIELD_MANAGER},
        )
        with client_errors():
            return await self.api.call(request)

    async def _release_code(self, job: DDPJob) -> Sequence[Dict]:
        """Remove a job from the owners of its sent code, so the ConfigMap outlives the job."""
        if not job.code:
            return ()
        read = Request(Verb.GET, CONFIG_MAPS, job.namespace, job.code)
        with client_errors():
            code = await self.api.read(read)
        if code is None:
            return ()
        labels = child(code["metadata"], "labels")
        if names.LABEL_CODE not in labels:
            return ()
        patch = released_code(code, job)
        await self._patch(Verb.STRATEGIC_MERGE, CONFIG_MAPS, patch)
        return (code,)

    async def _delete(self, job: DDPJob) -> None:
        options = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": job.uid},
        }
        request = Request(
            Verb.DELETE,
            JOBS,
            job.namespace,
            job.name,
            body=options,
        )
        with client_errors():
            try:
                await self.api.call(request)
            except ApiError as error:
                if not error.is_absent:
                    raise

    async def _wait_until_gone(self, job: DDPJob) -> None:
        def is_gone(jobs: Jobs) -> bool:
            return all(found.uid != job.uid for found in jobs)

        await self._wait_until(job, is_gone, "still exists")

    async def _wait_until(
        self,
        job: DDPJob,
        is_so: Callable[[Jobs], bool],
        what: str,
    ) -> None:
        """Wait until the watch of a job shows what is expected. Raises WaitTimeout."""
        changes = self.watch(job.name, namespace=job.namespace)
        try:
            async with asyncio.timeout(CHANGE_SECONDS), aclosing(changes):
                async for jobs in changes:
                    if is_so(jobs):
                        return
        except TimeoutError as error:
            message = f"job {job.name} {what} after {CHANGE_SECONDS:.0f} s"
            raise WaitTimeout(message) from error


def _is_suspended(jobs: Jobs) -> bool:
    """Return True if the operator ends the pods of a job, or if it is finished or gone."""
    if not jobs:
        return True
    job = jobs[0]
    return job.phase == Phase.SUSPENDED or job.finished
