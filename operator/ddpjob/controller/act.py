"""Carries plans out: the only writer. Status first, under the version it was computed from; then deletes, creates, events."""

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.controller.cache import Cache, SeenJob
from ddpjob.controller.client import Api, ApiError, Unreachable, core_path, job_path
from ddpjob.controller.lease import Lease, LeaseLost
from ddpjob.controller.metrics import Metrics
from ddpjob.core import names, render
from ddpjob.core.job import Job
from ddpjob.core.names import Reason
from ddpjob.core.observe import Refusal
from ddpjob.core.plan import Delete, Event, Plan
from ddpjob.core.pod_context import Settings
from ddpjob.core.pods import owner_uid
from ddpjob.core.readers import SpecError
from ddpjob.core.status import Status, is_transition
from ddpjob.core.times import format_time

log = logging.getLogger(__name__)

IN_FLIGHT = 16
"""Writes under way at once: where one API server's throughput levels off."""

PROGRESS_EVERY = 2.0
"""Seconds between status writes of one job that tell of mere progress."""

STRICT = {"fieldValidation": "Strict"}
"""A misspelt field of a pod is refused by its name, where the API server's default would drop it."""

FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
"""Seconds before something that the API server refused is tried again; doubled for each refusal in a row."""


@dataclass
class Outcome:
    """When to look again, in seconds; None: when something changes."""

    wake_after: float | None = None


@dataclass
class Memory:
    """What is known of one job's writes and need not survive this process."""

    last_write: float = float("-inf")
    refusal: Refusal | None = None
    refusals: int = 0


@dataclass
class Actor:
    """Writes to one API server while the Lease is held. Times: `clock` monotonic seconds, `now` the wall clock."""

    api: Api
    cache: Cache
    lease: Lease
    settings: Settings
    identity: str
    clock: Callable[[], float]
    metrics: Metrics
    memories: dict[str, Memory] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(IN_FLIGHT))

    def refusal_of(self, uid: str) -> Refusal | None:
        memory = self.memories.get(uid)
        return memory.refusal if memory else None

    def forget(self, uid: str) -> None:
        self.memories.pop(uid, None)

    def retry_now(self, uid: str) -> None:
        """What stood in the way may just have gone."""
        memory = self.memories.get(uid)
        if memory and memory.refusal and not memory.refusal.final:
            memory.refusal = Refusal(
                memory.refusal.reason, memory.refusal.message, datetime.now(UTC)
            )

    async def apply(self, seen: SeenJob, plan: Plan) -> Outcome:
        """Raises ApiError and Unreachable for what is worth another try, LeaseLost when writing is over."""
        if await self._somebody_is_there(seen.job, plan.confirm):
            return Outcome(wake_after=0.0)
        memory = self.memories.setdefault(seen.job.uid, Memory())
        changed = plan.status.to_dict() != seen.job.status.to_dict()
        wait = PROGRESS_EVERY - (self.clock() - memory.last_write)
        if (
            changed
            and wait > 0
            and not (plan.create or plan.delete or is_transition(seen.job.status, plan.status))
        ):
            return Outcome(
                wake_after=min(wait, plan.wake_after if plan.wake_after is not None else wait)
            )
        if changed and not await self._write_status(seen, plan.status, memory):
            return Outcome(wake_after=0.0)
        if plan.create and not changed and not await self.is_current(seen):
            return Outcome(wake_after=0.0)
        try:
            return await self._change_pods(seen.job, plan, memory)
        finally:  # last, and best effort: the status has said it already
            if not isinstance(sys.exception(), asyncio.CancelledError):
                await asyncio.gather(*(self._post_event(seen.job, event) for event in plan.events))

    async def _change_pods(self, job: Job, plan: Plan, memory: Memory) -> Outcome:
        try:
            await every(self._delete_pod(job, delete) for delete in plan.delete)
        except ApiError as error:
            if not plan.create:
                raise
            # With pods to create these are only ended ones, kept for their logs: nothing waits for them.
            log.warning("%s/%s: pods that have ended stay: %s", job.namespace, job.name, error)
        if not plan.create:
            return Outcome(wake_after=plan.wake_after)
        written = self.cache.job((job.namespace, job.name))
        if written is None or written.job.uid != job.uid:
            return Outcome()
        await self._create(written.job, plan.create, memory)
        return Outcome(wake_after=0.0)

    # --- status

    async def _write_status(self, seen: SeenJob, status: Status, memory: Memory) -> bool:
        """Whether it was written; if not, the cache knows a newer job by now, or that it is gone."""
        job = seen.job
        metadata = {
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
            "resourceVersion": str(seen.version),
        }
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": metadata,
            "status": status.to_dict(),
        }
        try:
            self.cache.see_job(
                await self._write("PUT", job_path(job.namespace, job.name, "status"), body)
            )
        except ApiError as error:
            if error.status not in (404, 409) or await self.is_current(seen):
                raise
            return False
        memory.last_write = self.clock()
        self.metrics.count_restarts(job.status, status)
        return True

    async def is_current(self, seen: SeenJob) -> bool:
        """Whether a job is the newest there is. Read again: pods are created only from a job known to be that."""
        key = (seen.job.namespace, seen.job.name)
        found = await self._get(job_path(*key))
        if found:
            self.cache.see_job(found)
        else:
            self.cache.drop_job(key, seen.job.uid)
        return self.cache.job(key) is seen

    # --- pods

    async def _somebody_is_there(self, job: Job, pods: tuple[str, ...]) -> bool:
        """A pod that vanished from the cache costs a restart only once the API server has confirmed it."""
        found = await asyncio.gather(
            *(self._get(core_path(job.namespace, "pods", name)) for name in pods)
        )
        there = [self.cache.find_pod(pod) for pod in found if pod and owner_uid(pod) == job.uid]
        return any(there)

    async def _delete_pod(self, job: Job, delete: Delete) -> None:
        body: dict[str, Any] = {"preconditions": {"uid": delete.uid}}
        if delete.grace is not None:
            body["gracePeriodSeconds"] = delete.grace
        try:
            answer = await self._write(
                "DELETE", core_path(job.namespace, "pods", delete.name), body
            )
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or another pod has its name by now
                raise
            self.cache.drop_pod(job.uid, delete.uid)
            return
        if answer.get("kind") == "Pod":
            self.cache.see_pod(answer)

    async def _create(self, job: Job, indices: tuple[int, ...], memory: Memory) -> None:
        """The Service and the pods, all at once; after a refusal one pod alone first, to see whether it still holds."""
        was_refused, memory.refusal = memory.refusal is not None, None
        try:
            if left := self.cache.left_by_another((job.namespace, job.name), job.uid):
                # Under another attempt's name than ours, and with the same folder for checkpoints.
                raise Refused(
                    Reason.NAME_IN_USE,
                    f"pod {left.name} of an earlier job of this name has not ended yet",
                )
            await self._create_one(job, "services", render.service(job))
            pods = render.pods(job, indices, self.settings)
            if was_refused:
                await self._create_one(job, "pods", next(pods))
            await every(self._create_one(job, "pods", pod) for pod in pods)
        except SpecError as error:
            log.exception("%s/%s: no pod can be made", job.namespace, job.name)
            memory.refusal = Refusal(Reason.INVALID_POD, str(error), datetime.now(UTC), final=True)
        except Refused as refused:
            memory.refusals += 1
            delay = min(FIRST_RETRY * 2.0 ** min(memory.refusals - 1, 10), LONGEST_RETRY)
            when = datetime.now(UTC) + timedelta(seconds=delay)
            memory.refusal = Refusal(refused.reason, refused.message, when, refused.final)
        else:
            memory.refusals = 0

    async def _create_one(self, job: Job, plural: str, body: Mapping[str, Any]) -> None:
        path = core_path(job.namespace, plural)
        try:
            created = await self._write("POST", path, body, STRICT)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                created = await self._existing(job, f"{path}/{body['metadata']['name']}")
            else:
                raise refused_or_error(error, restricted=self.settings.restricted) from error
        if plural == "pods":
            self.cache.see_pod(created)

    async def _existing(self, job: Job, path: str) -> dict[str, Any]:
        """What has our name already: ours from a pass whose answer got lost, or somebody else's."""
        found = await self._get(path)
        what = path.rsplit("/", 2)[1].removesuffix("s") + " " + path.rsplit("/", 1)[1]
        if found is None or found["metadata"].get("deletionTimestamp"):
            raise Refused(Reason.NAME_IN_USE, f"an earlier {what} is still going away")
        if owner_uid(found) == job.uid:
            return found
        if found["metadata"].get("labels", {}).get(names.LABEL_JOB) == job.name and owner_uid(
            found
        ):
            raise Refused(
                Reason.NAME_IN_USE,
                f"{what} of an earlier job of this name is still there; it is being collected",
            )
        raise Refused(
            Reason.NAME_IN_USE,
            f"a {what} that is not this job's exists; delete it or give the job another name",
        )

    # --- events and transport

    async def _post_event(self, job: Job, event: Event) -> None:
        """Raises nothing but LeaseLost."""
        words = f"{job.namespace}/{job.name}: {event.reason}: {event.message}"
        log.info(words, extra={"job": f"{job.namespace}/{job.name}", "reason": event.reason})
        now = format_time(datetime.now(UTC))
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name}.{uuid.uuid4().hex[:16]}", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "type": event.kind,
            "reason": event.reason,
            "message": event.message,
            "source": {"component": names.MANAGER},
            "reportingComponent": f"{names.GROUP}/operator",
            "reportingInstance": self.identity,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._write("POST", core_path(job.namespace, "events"), body)
        except (ApiError, Unreachable) as error:
            log.warning(
                "event %s of %s/%s is lost: %s", event.reason, job.namespace, job.name, error
            )

    async def _write(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        async with self._slots:
            await self.api.calm()
            self.lease.check()
            return await self.api.call(
                method, path, body, query, min(10.0, 5.0 + self.lease.remaining / 2)
            )

    async def _get(self, path: str) -> dict[str, Any] | None:
        try:
            return await self.api.call("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise


class Refused(Exception):
    """The API server will not create this now (or ever, if `final`); `message` says why."""

    def __init__(self, reason: str, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.reason, self.message, self.final = reason, message, final


async def every(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Every call is tried; then the first that failed is raised, a refusal before what is merely worth another try.

    A call is taken from `calls` only when there is room for it: a thousand pods are not all rendered at once.
    The loss of the Lease ends it: what is left is the next leader's.
    """
    waiting, failed = iter(calls), list[BaseException]()

    async def work() -> None:
        for call in waiting:
            try:
                await call
            except LeaseLost:
                raise
            except Exception as error:
                failed.append(error)

    ends = await asyncio.gather(*(work() for _ in range(IN_FLIGHT)), return_exceptions=True)
    failed = [*(end for end in ends if end), *failed]
    if failed:
        raise next(
            (error for kind in (LeaseLost, Refused) for error in failed if isinstance(error, kind)),
            failed[0],
        )


ADMISSION = ("admission webhook", "calling webhook", "ValidatingAdmissionPolicy")
"""In the words of a refusal: somebody's policy, which may change, or its server is down."""


def refused_or_error(error: ApiError, *, restricted: bool = False) -> Exception:
    """What the API server's answer to a create means for the job; what is none of its doing stays an error."""
    text = error.message
    if any(policy in text for policy in ADMISSION):
        return Refused(Reason.FORBIDDEN, text)
    if error.status in (400, 422):
        return Refused(Reason.INVALID_POD, text, final=True)
    if error.status == 404:
        return Refused(Reason.NAMESPACE_ENDING, text)
    if error.status != 403:
        return error
    if "failed quota" in text:  # it counts what the pod does not name
        advice = "create the job again with spec.resources that name these, or have a LimitRange give defaults"
        return Refused(Reason.QUOTA, f"{text}. What to do: {advice}.")
    if "exceeded quota" in text:
        return Refused(Reason.QUOTA, text)
    if "violates PodSecurity" in text:
        advice = (
            "podTemplate or volumes ask for more"
            if restricted
            else "install the operator with podSecurity=restricted"
        )
        return Refused(Reason.POD_SECURITY, f"{text}. What to do: {advice}.")
    if "being terminated" in text:
        return Refused(Reason.NAMESPACE_ENDING, text)
    return Refused(Reason.FORBIDDEN, text)
