"""Delete pods and jobs, and report the pods that cannot be deleted."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddpjob.controller.cache import Cache
from ddpjob.controller.events import Reporter
from ddpjob.controller.writer import Writer, is_gone, run_all
from ddpjob.core.api.job import Job
from ddpjob.core.api.readers import Dict
from ddpjob.core.plan import Delete, Event
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import JOBS, PODS
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)


@dataclass
class Deleter:
    """Deletes the objects of jobs, each only as it was seen."""

    writer: Writer
    cache: Cache
    reporter: Reporter

    async def delete_pods(self, job: Job, deletes: Iterable[Delete]) -> None:
        """Delete pods side by side. If some cannot be deleted, report the first by name.

        Raises CallFailed or LeaseLost.
        """
        failed: dict[str, CallFailed] = {}

        async def delete_pod(delete: Delete) -> None:
            try:
                await self._delete_pod(job, delete)
            except CallFailed as error:
                failed[delete.name] = error
                raise

        try:
            await run_all(delete_pod(delete) for delete in deletes)
        except CallFailed:
            first = min(failed)
            message = f"pod {first} cannot be deleted; it is tried again: {failed[first]}"
            await self.reporter.post_once(job, "DeleteRefused", message)
            raise

    async def _delete_pod(self, job: Job, delete: Delete) -> None:
        body: dict[str, Any] = {"preconditions": {"uid": delete.uid}}
        if delete.grace is not None:
            body["gracePeriodSeconds"] = delete.grace
        request = Request(Verb.DELETE, PODS, job.namespace, delete.name, body=body)
        try:
            answer = await self.writer.write(request)
        except ApiError as error:
            if not is_gone(error):
                raise
            self.cache.pods.drop(delete.uid)
            return
        if delete.forced:
            # The API server removes such a pod at once, unless a finalizer keeps it. Its answer is
            # the pod.
            if answer.get("metadata", {}).get("finalizers"):
                self.cache.pods.see(answer)
            else:
                self.cache.pods.drop(delete.uid)
            message = f"pod {delete.name} is deleted by force: {delete.forced}"
            await self.reporter.post(job, Event("Warning", "ForceDeleted", message))
        elif answer.get("kind") == "Pod":
            self.cache.pods.see(answer)

    async def delete_job(self, body: Dict) -> None:
        """Delete a job as it was read, unless it has changed. Its pods go with it."""
        metadata = body["metadata"]
        keys = ("uid", "resourceVersion")
        options = {
            "preconditions": {key: metadata[key] for key in keys},
            "propagationPolicy": "Background",
        }
        place = (metadata["namespace"], metadata["name"])
        try:
            await self.writer.write(Request(Verb.DELETE, JOBS, *place, body=options))
        except ApiError as error:
            if not is_gone(error):
                raise
        else:
            log.info("%s/%s: deleted", metadata["namespace"], metadata["name"])
