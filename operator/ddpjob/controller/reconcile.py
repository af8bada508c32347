"""One look at one job: observe the cache, decide, act. And the periodic LIST that keeps the cache honest."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.client import JOBS, OUR_PODS, Api, ApiError, Unreachable
from ddpjob.controller.lease import LeaseLost
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.workqueue import Wakeups
from ddpjob.core import names
from ddpjob.core.decide import decide
from ddpjob.core.observe import observe

log = logging.getLogger(__name__)

WORKERS = 16
RESYNC_SECONDS = 60.0
EARLY_RESYNCS = (2.0, 10.0)
"""Seconds between the LISTs at the start: kopf's own comes after our first, and of a deletion between them no watch tells."""


class ReadableAgain(Exception):
    """A namespace came (back) that this process does not watch."""


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
    listed: int = 0
    """Version of the last LIST."""
    unreadable: frozenset[str] = frozenset()
    """Those of `namespaces` that the last LIST was refused: deleted, with the operator's Role in them, or not made yet."""
    unwatched: frozenset[str] = frozenset()
    """Those that no watch was begun for, since they were unreadable then."""

    @property
    def synced(self) -> bool:
        return self.listed > 0

    async def work(self) -> None:
        """One worker: takes keys until it is cancelled."""
        while True:
            key = await self.queue.get()
            started, failed = time.monotonic(), False
            try:
                await self.api.calm()
                await self.look_at(key)
            except LeaseLost:
                raise
            except (ApiError, Unreachable) as error:
                failed = True
                log.warning("%s/%s: %s", *key, error, extra={"job": "/".join(key)})
            except Exception:
                failed = True
                log.exception(
                    "%s/%s: looking at this job failed", *key, extra={"job": "/".join(key)}
                )
            finally:
                self.metrics.reconciles.labels("error" if failed else "ok").inc()
                self.metrics.latency.observe(time.monotonic() - started)
                self.queue.done(key, failed)

    async def look_at(self, key: Key) -> None:
        seen = self.cache.job(key)
        if (
            seen is None or not self.synced
        ):  # before the first LIST of pods an older attempt's may be out of sight
            return
        job = seen.job
        observation = observe(job, self.cache.pods_of(job.uid), self.actor.refusal_of(job.uid))
        if observation.job_is_stale and not await self.actor.is_current(seen):
            self.queue.add(key)
            return
        outcome = await self.actor.apply(seen, decide(observation, datetime.now(UTC)))
        if outcome.wake_after is not None:
            self.queue.add(key, outcome.wake_after)

    async def resync(self) -> None:
        """LISTs at once, soon again, and then every minute; never ends and never raises for a sick API server.

        Raises ReadableAgain where a namespace can be read that no watch was begun for: kopf takes its namespaces once.
        """
        early = iter(EARLY_RESYNCS)
        while True:
            self.turned = time.monotonic()
            try:
                await self.list_once()
            except (ApiError, Unreachable) as error:
                log.warning("cannot list: %s", error)
            if back := self.unwatched - self.unreadable:
                raise ReadableAgain(
                    f"{', '.join(sorted(back))} can be read now; the next start watches it"
                )
            await asyncio.sleep(next(early, RESYNC_SECONDS) if self.synced else 1.0)

    async def list_once(self) -> None:
        """Every namespace that can be read; raises ApiError where none of them can."""
        versions, refused = [], dict[str, ApiError]()
        for namespace in self.namespaces or (None,):
            try:
                versions.append(await self._list_namespace(namespace))
            except ApiError as error:
                if namespace is None or error.status != 403:
                    raise
                refused[namespace] = error
        for namespace in refused.keys() - self.unreadable:
            advice = "give the operator its Role there back, or take the namespace out of watchNamespaces"
            log.warning(
                "namespace %s cannot be read: %s. What to do: %s.",
                namespace,
                refused[namespace],
                advice,
            )
        self.unreadable = frozenset(refused)
        if not versions:
            raise next(iter(refused.values()))
        for key in list(self.cache.jobs):
            self.queue.add(key)
        self._forget_the_gone()
        self.cache.prune(self.listed)
        self.listed = min(versions)

    async def _list_namespace(self, namespace: str | None) -> int:
        """Jobs first: a pod of a job that came in between waits for its job's own event."""
        scope = f"/namespaces/{namespace}" if namespace else ""
        jobs, version = await self._list(f"{JOBS}{scope}/{names.PLURAL}", self.cache.see_job)
        self.cache.keep_jobs(jobs, version, namespace)
        pods, pods_version = await self._list(f"api/v1{scope}/pods", self.cache.see_pod, OUR_PODS)
        self.cache.keep_pods(pods, pods_version, namespace)
        return version

    async def _list(
        self, path: str, see: Callable[[Mapping[str, Any]], bool], selector: str = ""
    ) -> tuple[set[str], int]:
        """Shows every object to the cache, a page at a time; returns their UIDs and the version of the LIST."""
        there, version = set(), 0
        async for objects, at in self.api.pages(path, selector):
            version = at
            for body in objects:
                see(body)
                there.add(body["metadata"]["uid"])
        return there, version

    def _forget_the_gone(self) -> None:
        living = {seen.job.uid for seen in self.cache.jobs.values()}
        for uid in [uid for uid in self.actor.memories if uid not in living]:
            self.actor.forget(uid)
