"""The workers of the queue. Each takes the key of a job, observes the cache, decides and acts."""

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.client import ApiClient
from ddpjob.controller.errors import CallFailed, LeaseLost
from ddpjob.controller.lister import Lister
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core.decide import decide
from ddpjob.core.observe import observe

log = logging.getLogger(__name__)

# Number of jobs that are reconciled at the same time.
WORKERS = 16


@dataclass
class Reconciler:
    """Works through the queue of one operator."""

    api: ApiClient
    cache: Cache
    lister: Lister
    actor: Actor
    queue: WorkQueue[Key]
    metrics: Metrics

    async def work(self) -> None:
        """Look at jobs for ever. Raises LeaseLost."""
        while True:
            key = await self.queue.get()
            started = time.monotonic()
            failed = False
            try:
                await self.api.wait_until_allowed()
                await self.look_at(key)
            except LeaseLost:
                raise
            except CallFailed as error:
                failed = True
                log.warning("%s/%s: %s", *key, error, extra={"job": "/".join(key)})
            except Exception:
                # A bug in one reconcile must not stop the other jobs.
                failed = True
                log.exception("%s/%s: cannot reconcile the job", *key, extra={"job": "/".join(key)})
            finally:
                self.metrics.reconciles.labels("error" if failed else "ok").inc()
                self.metrics.latency.observe(time.monotonic() - started)
                self.queue.done(key, failed)

    async def look_at(self, key: Key) -> None:
        """Observe one job, decide and act. Raises CallFailed or LeaseLost."""
        seen = self.cache.job(key)
        # Before the first LIST, pods of an older attempt may be unknown.
        if seen is None or not self.lister.synced:
            return
        uid = seen.job.uid
        observation = observe(seen.job, self.cache.pods_of(uid), self.actor.refusal_of(uid))
        if observation.job_is_stale and not await self.actor.is_current(seen):
            self.queue.add(key)
            return
        plan = decide(observation, datetime.now(UTC))
        outcome = await self.actor.apply(seen, plan)
        if outcome.wake_after is not None:
            self.queue.add(key, outcome.wake_after)
