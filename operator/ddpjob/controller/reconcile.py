"""One look at one job: observe the cache, decide, act. And the periodic LIST that keeps the cache honest."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.client import JOBS, MANAGED, Api, ApiError, Unreachable
from ddpjob.controller.lease import LeaseLost
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.wake import Wakeups
from ddpjob.core import names
from ddpjob.core.api import Job, Status
from ddpjob.core.decide import Plan, decide
from ddpjob.core.names import Cause
from ddpjob.core.observe import observe

log = logging.getLogger(__name__)

WORKERS = 16
RESYNC_SECONDS = 60.0


@dataclass
class Reconciler:
    """Works the queue of one operator."""

    api: Api
    cache: Cache
    actor: Actor
    queue: Wakeups[Key]
    metrics: Metrics
    namespaces: Sequence[str] = ()
    turned: float = 0.0
    synced: bool = False

    async def work(self) -> None:
        """One worker: takes keys until it is cancelled."""
        while True:
            key = await self.queue.get()
            self.metrics.depth.set(len(self.queue))
            started, failed = time.monotonic(), False
            try:
                await self.look_at(key)
            except LeaseLost:
                raise
            except (ApiError, Unreachable) as error:
                failed = True
                log.warning("%s/%s: %s", *key, error, extra={"job": "/".join(key)})
            except Exception:
                failed = True
                log.exception("%s/%s: looking at this job failed", *key, extra={"job": "/".join(key)})
            finally:
                self.metrics.reconciles.labels("error" if failed else "ok").inc()
                self.metrics.latency.observe(time.monotonic() - started)
                self.queue.done(key, failed)

    async def look_at(self, key: Key) -> None:
        seen = self.cache.job(key)
        if seen is None:
            return
        job = seen.job
        observation = observe(job, self.cache.pods_of(job.uid), self.actor.refusal_of(job.uid))
        plan = decide(observation, datetime.now(UTC))
        outcome = await self.actor.apply(seen, plan)
        self._tell(job, plan)
        if outcome.wake_after is not None:
            self.queue.add(key, outcome.wake_after)

    def _tell(self, job: Job, plan: Plan) -> None:
        old, new = job.status, plan.status
        for cause, count in (
            (Cause.FAILURE, _more(old, new, "restarts")),
            (Cause.DISRUPTION, _more(old, new, "disruptions")),
        ):
            if count > 0:
                self.metrics.restarts.labels(str(cause)).inc(count)
        for event in plan.events:
            words = f"{job.namespace}/{job.name}: {event.reason}: {event.message}"
            log.info(words, extra={"job": f"{job.namespace}/{job.name}", "reason": event.reason})

    async def resync(self) -> None:
        """LISTs at once and then every minute; never ends and never raises for a sick API server."""
        while True:
            self.turned = time.monotonic()
            try:
                await self.list_once()
            except (ApiError, Unreachable) as error:
                log.warning("cannot list: %s", error)
            await asyncio.sleep(RESYNC_SECONDS if self.synced else 1.0)

    async def list_once(self) -> None:
        """Jobs first: a pod of a job that came in between waits for its job's own event."""
        oldest = None
        for namespace in self.namespaces or (None,):
            scope = f"/namespaces/{namespace}" if namespace else ""
            jobs, version = await self._list(f"{JOBS}{scope}/{names.PLURAL}")
            self.cache.listed_jobs(jobs, version, namespace)
            pods, pods_version = await self._list(f"api/v1{scope}/pods", MANAGED)
            self.cache.listed_pods(pods, pods_version, namespace)
            oldest = min(version, oldest or version)
        for key in list(self.cache.jobs):
            self.queue.add(key)
        self._forget_the_gone()
        if self.synced and oldest is not None:
            self.cache.prune(oldest)
        self.synced = True

    async def _list(self, path: str, selector: str = "") -> tuple[list[dict[str, Any]], int]:
        pages = [page async for page in self.api.pages(path, selector)]
        return [obj for objects, _ in pages for obj in objects], pages[-1][1]

    def _forget_the_gone(self) -> None:
        living = {seen.job.uid for seen in self.cache.jobs.values()}
        for uid in [uid for uid in self.actor.memories if uid not in living]:
            self.actor.forget(uid)


def _more(old: Status, new: Status, counter: str) -> int:
    return int(getattr(new, counter)) - int(getattr(old, counter))
