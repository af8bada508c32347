"""Carries out plans: the status first, under the version it was computed from, then the pods."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.controller.cache import Cache, SeenJob
from ddpjob.controller.client import core_path, job_path
from ddpjob.controller.errors import ApiError, CallFailed, Refused
from ddpjob.controller.events import event_body
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.refusals import refused_or_error
from ddpjob.controller.writer import Writer, is_gone, run_all
from ddpjob.core import names, render
from ddpjob.core.backoff import exponential_delay
from ddpjob.core.job import Job
from ddpjob.core.names import Reason
from ddpjob.core.observe import Refusal
from ddpjob.core.plan import Delete, Event, Plan
from ddpjob.core.pod_context import Settings
from ddpjob.core.pods import owner_uid
from ddpjob.core.readers import SpecError
from ddpjob.core.status import Status, is_transition

log = logging.getLogger(__name__)

# Shortest time in seconds between two status writes that only report a job's progress.
PROGRESS_INTERVAL = 2.0

# Seconds before a refused object is tried again.
FIRST_RETRY = 1.0
LONGEST_RETRY = 60.0

# The API server then refuses a misspelt field of a pod by name. By default it would drop the field.
STRICT = {"fieldValidation": "Strict"}


@dataclass
class Outcome:
    """When to look at the job again, in seconds; None: when something changes."""

    wake_after: float | None = None


AGAIN = Outcome(wake_after=0.0)


@dataclass
class Memory:
    """The last write and refusal of a job. A restart of the process may lose them."""

    last_write: float = float("-inf")
    refusal: Refusal | None = None
    refusals: int = 0


@dataclass
class Actor:
    """Carries out plans. `clock` gives monotonic seconds. `identity` names this operator."""

    writer: Writer
    cache: Cache
    settings: Settings
    identity: str
    clock: Callable[[], float]
    metrics: Metrics
    memories: dict[str, Memory] = field(default_factory=dict)

    def refusal_of(self, uid: str) -> Refusal | None:
        memory = self.memories.get(uid)
        return memory.refusal if memory else None

    def forget_removed_jobs(self) -> None:
        existing = {seen.job.uid for seen in self.cache.jobs.values()}
        self.memories = {uid: m for uid, m in self.memories.items() if uid in existing}

    def retry_now(self, uid: str) -> None:
        """Try a refused object again at once, because what prevented it may be gone."""
        memory = self.memories.get(uid)
        if memory and memory.refusal and not memory.refusal.final:
            memory.refusal = replace(memory.refusal, retry_at=datetime.now(UTC))

    async def apply(self, seen: SeenJob, plan: Plan) -> Outcome:
        """Carry out a plan for a job as it was seen. Raises CallFailed or LeaseLost."""
        # If a pod is missing in the cache, restart only if the API server confirms that it is gone.
        if await self._any_exists(seen.job, plan.confirm):
            return AGAIN

        # A plan that only reports progress is written at most every PROGRESS_INTERVAL seconds.
        memory = self.memories.setdefault(seen.job.uid, Memory())
        changed = plan.status.to_dict() != seen.job.status.to_dict()
        wait = memory.last_write + PROGRESS_INTERVAL - self.clock()
        if changed and wait > 0 and _is_progress(seen.job.status, plan):
            if plan.wake_after is None:
                return Outcome(wait)
            return Outcome(min(wait, plan.wake_after))

        # The status is written first, under the version that it was computed from. So neither two
        # operators nor a stale cache can begin the same attempt twice.
        if changed and not await self._write_status(seen, plan.status, memory):
            return AGAIN

        # If the status was not written, read the job again: a newer version may exist.
        if plan.create and not changed and not await self.is_current(seen):
            return AGAIN

        # Post events last. A failed post is not repeated: the status has the same information.
        try:
            return await self._change_pods(seen.job, plan, memory)
        finally:
            if not isinstance(sys.exception(), asyncio.CancelledError):
                posts = [self._post_event(seen.job, event) for event in plan.events]
                await asyncio.gather(*posts)

    async def _change_pods(self, job: Job, plan: Plan, memory: Memory) -> Outcome:
        try:
            await run_all(self._delete_pod(job, delete) for delete in plan.delete)
        except ApiError as error:
            if not plan.create:
                raise
            # A plan that creates pods deletes only ended ones, so nothing waits for the deletion.
            log.warning("%s/%s: cannot delete ended pods: %s", job.namespace, job.name, error)
        if not plan.create:
            return Outcome(plan.wake_after)
        written = self.cache.job((job.namespace, job.name))
        if written is None or written.job.uid != job.uid:
            return Outcome()
        await self._create(written.job, plan.create, memory)
        return AGAIN

    # Status

    async def _write_status(self, seen: SeenJob, status: Status, memory: Memory) -> bool:
        """Write the status. Return False if the job has changed or is gone."""
        job = seen.job
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
                "resourceVersion": str(seen.version),
            },
            "status": status.to_dict(),
        }
        path = job_path(job.namespace, job.name, "status")
        try:
            written = await self.writer.write("PUT", path, body)
        except ApiError as error:
            if not is_gone(error) or await self.is_current(seen):
                raise
            return False
        self.cache.see_job(written)
        memory.last_write = self.clock()
        self.metrics.count_restarts(job.status, status)
        return True

    async def is_current(self, seen: SeenJob) -> bool:
        """Read the job again, and return True if it is still the one that was seen."""
        key = (seen.job.namespace, seen.job.name)
        found = await self.writer.get(job_path(*key))
        if found:
            self.cache.see_job(found)
        else:
            self.cache.drop_job(key, seen.job.uid)
        return self.cache.job(key) is seen

    # Pods

    async def _any_exists(self, job: Job, pod_names: tuple[str, ...]) -> bool:
        """Return True if one of the job's pods exists, which then enters the cache."""
        paths = [core_path(job.namespace, "pods", name) for name in pod_names]
        found = await asyncio.gather(*(self.writer.get(path) for path in paths))
        restored = [
            self.cache.restore_pod(pod) for pod in found if pod and owner_uid(pod) == job.uid
        ]
        return any(restored)

    async def _delete_pod(self, job: Job, delete: Delete) -> None:
        body: dict[str, Any] = {"preconditions": {"uid": delete.uid}}
        if delete.grace is not None:
            body["gracePeriodSeconds"] = delete.grace
        path = core_path(job.namespace, "pods", delete.name)
        try:
            answer = await self.writer.write("DELETE", path, body)
        except ApiError as error:
            if not is_gone(error):
                raise
            self.cache.drop_pod(job.uid, delete.uid)
            return
        if answer.get("kind") == "Pod":
            self.cache.see_pod(answer)

    async def _create(self, job: Job, indices: tuple[int, ...], memory: Memory) -> None:
        """Create the Service and the pods of a gang, and remember a refusal."""
        was_refused = memory.refusal is not None
        memory.refusal = None
        try:
            await self._create_gang(job, indices, one_first=was_refused)
        except SpecError as error:
            log.exception("%s/%s: cannot render a pod", job.namespace, job.name)
            memory.refusal = Refusal(Reason.INVALID_POD, str(error), datetime.now(UTC), final=True)
        except Refused as refused:
            memory.refusals += 1
            delay = exponential_delay(memory.refusals, FIRST_RETRY, LONGEST_RETRY)
            memory.refusal = Refusal(
                refused.reason,
                refused.message,
                datetime.now(UTC) + timedelta(seconds=delay),
                refused.final,
                refused.counts_ended_pods,
            )
        else:
            memory.refusals = 0

    async def _create_gang(self, job: Job, indices: tuple[int, ...], *, one_first: bool) -> None:
        """Create the Service, then all pods at once. Raises Refused or SpecError.

        With `one_first`, create one pod first, to test whether an earlier refusal still applies.
        """
        # An earlier job of this name may still write to the same checkpoint folder.
        left = self.cache.pod_of_another_job((job.namespace, job.name), job.uid)
        if left:
            message = f"pod {left.name} of an earlier job with this name has not ended yet"
            raise Refused(Reason.NAME_IN_USE, message)
        await self._create_object(job, "services", render.service(job))
        pods = render.pods(job, indices, self.settings)
        if one_first:
            await self._create_object(job, "pods", next(pods))
        await run_all(self._create_object(job, "pods", pod) for pod in pods)

    async def _create_object(self, job: Job, plural: str, body: Mapping[str, Any]) -> None:
        path = core_path(job.namespace, plural)
        try:
            created = await self.writer.write("POST", path, body, STRICT)
        except ApiError as error:
            if error.status != 409 or error.reason != "AlreadyExists":
                raise refused_or_error(error, restricted=self.settings.restricted) from error
            created = await self._require_own(job, plural, str(body["metadata"]["name"]))
        if plural == "pods":
            self.cache.see_pod(created)

    async def _require_own(self, job: Job, plural: str, name: str) -> dict[str, Any]:
        """Return the object that has the name already. Raises Refused if it is not the job's.

        It is the job's own if an earlier request succeeded and its answer was lost.
        """
        what = f"{plural.removesuffix('s')} {name}"
        found = await self.writer.get(core_path(job.namespace, plural, name))
        if found is None or found["metadata"].get("deletionTimestamp"):
            raise Refused(Reason.NAME_IN_USE, f"an earlier {what} is still being deleted")
        owner = owner_uid(found)
        if owner == job.uid:
            return found
        labels = found["metadata"].get("labels", {})
        if owner and labels.get(names.LABEL_JOB) == job.name:
            message = f"{what} of an earlier job with this name is still being deleted"
            raise Refused(Reason.NAME_IN_USE, message)
        message = (
            f"{what} exists and does not belong to this job; delete it or give the job another name"
        )
        raise Refused(Reason.NAME_IN_USE, message)

    # Events

    async def _post_event(self, job: Job, event: Event) -> None:
        """Log an event and post it. Raises nothing but LeaseLost."""
        key = f"{job.namespace}/{job.name}"
        log.info(
            "%s: %s: %s",
            key,
            event.reason,
            event.message,
            extra={"job": key, "reason": event.reason},
        )
        body = event_body(job, event, self.identity)
        try:
            await self.writer.write("POST", core_path(job.namespace, "events"), body)
        except CallFailed as error:
            log.warning("%s: event %s was not posted: %s", key, event.reason, error)


def _is_progress(status: Status, plan: Plan) -> bool:
    """Return True if a plan only reports progress, so that its status may wait."""
    if plan.create or plan.delete:
        return False
    return not is_transition(status, plan.status)
