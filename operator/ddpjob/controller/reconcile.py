"""Reconcile jobs: each worker takes the key of a job, observes the cache, decides and acts."""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key, identity_of
from ddpjob.controller.errors import GaveWay, LeaseLost, MustStop
from ddpjob.controller.extension import Extensions
from ddpjob.controller.inquiries import Inquiries
from ddpjob.controller.lister import Lister
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.territory import CHECK_AFTER, Territory
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.controller.writer import run_all
from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import ClusterPolicy, Observation, observe
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import CallFailed

log = logging.getLogger(__name__)

# Seconds before the next look at a job while it is not known whether its namespace is served.
CLAIM_INTERVAL = 0.5

# The reason of the event of a job in a namespace that this installation does not serve.
NOT_SERVED = "NotServed"

# Seconds before the next look for the Workloads of removed jobs.
ORPHAN_INTERVAL = 3.0

# Seconds before the next look at a job if one of its requests gave way to others. If many such jobs
# wait, each waits longer to save CPU: so many looks a second.
GAVE_WAY_INTERVAL = 2.0
GAVE_WAY_RATE = 20


@dataclass
class Reconciler:
    """Works through the queue of one operator."""

    api: ApiClient
    cache: Cache
    lister: Lister
    actor: Actor
    queue: WorkQueue[Key]
    metrics: Metrics
    policy: ClusterPolicy
    territory: Territory
    inquiries: Inquiries
    extensions: Extensions
    # Keys of jobs with a request that gave way at their last look.
    gave_way: set[Key] = field(default_factory=set)

    async def work(self) -> None:
        """Look at jobs for ever. Raises LeaseLost."""
        while True:
            await self._reconcile(await self.queue.get())

    async def keep_marks(self) -> None:
        """Renew the marks of the namespaces with jobs for ever. Raises LeaseLost.

        This includes namespaces with finished jobs only: another installation would take them over.
        """
        while True:
            await asyncio.sleep(CHECK_AFTER)
            namespaces = sorted(self.cache.jobs.namespaces)
            await run_all(self._keep_mark(namespace) for namespace in namespaces)

    async def _keep_mark(self, namespace: str) -> None:
        """Renew one mark. If it is lost, look at the jobs: each then gets an event."""
        had_mark = self.territory.has_mark(namespace)
        try:
            is_served = await self.territory.serves(namespace)
        except MustStop:
            raise
        except CallFailed as error:
            log.debug("cannot renew the mark of namespace %s: %s", namespace, error)
        except Exception:
            # One odd answer must not stop the operator.
            log.exception("cannot renew the mark of namespace %s", namespace)
        else:
            if had_mark and is_served is False:
                self._look_at_all(namespace)

    def _look_at_all(self, namespace: str) -> None:
        for key in self.cache.jobs.keys_in(namespace):
            self.queue.add(key)

    async def _reconcile(self, key: Key) -> None:
        """Look at one job, and give its key back. Raises LeaseLost."""
        started = time.monotonic()
        failed = False
        self.gave_way.discard(key)
        try:
            await self.api.wait_until_allowed()
            await self.look_at(key)
        except LeaseLost:
            raise
        except GaveWay as error:
            # Nothing failed. A longer and longer delay would let the job wait for no reason.
            self.gave_way.add(key)
            self.queue.add(key, max(GAVE_WAY_INTERVAL, len(self.gave_way) / GAVE_WAY_RATE))
            log.info("%s/%s: %s", *key, error, extra={"job": "/".join(key)})
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
        has_orphans = bool(self.cache.orphans_of(key))
        if has_orphans:
            # Without a job, not every change of its pods leads here.
            self.queue.add(key, ORPHAN_INTERVAL)
        if not self.lister.knows_pods_of(key[0]) or (seen is None and not has_orphans):
            return
        is_served = await self.territory.serves(key[0])
        if is_served and has_orphans:
            await self.actor.places.let_orphans_go(key)
        # The job may have changed or gone meanwhile.
        seen = self.cache.job(key)
        if seen is None:
            return
        if not is_served:
            self.cache.jobs.contests.forget(identity_of(seen))
            if is_served is False and not await self._say_why_not_served(seen.value.unpack()):
                return
            self.queue.add(key, CLAIM_INTERVAL if is_served is None else CHECK_AFTER)
            return
        self.actor.reporter.forget(seen.uid, NOT_SERVED)
        observation = self._observe(seen.value.unpack())
        if observation.status_is_behind:
            # A newer status exists, or a user has changed the status.
            if not await self.actor.read_if_current(seen):
                self.queue.add(key)
                return
            observation = replace(observation, is_current=True)
        plan = decide(observation, self.actor.now())
        self.inquiries.ask(key, plan.ask)
        wake_after = await self.actor.apply(seen, plan)
        if wake_after is not None:
            self.queue.add(key, wake_after)

    async def _say_why_not_served(self, job: Job) -> bool:
        """Say in an event why nothing happens. The status belongs to the other installation.

        Return False if nothing has to happen: the job has finished or has another controller.
        """
        if job.status.finished or job.managed_by != names.CONTROLLER:
            return False
        message = await self.territory.why_not(job.namespace)
        if message:
            # The time in the message changes whenever the other installation renews its mark.
            obstacle = self.territory.holder_of(job.namespace) or message
            await self.actor.reporter.post_once(job, NOT_SERVED, message, obstacle)
        return True

    def _observe(self, job: Job) -> Observation:
        nodes = self.cache.nodes.by_name if self.lister.reads_nodes else None
        pods = self.cache.pods_of(job.identity)
        memory = self.actor.memory_of(job.uid)
        return observe(
            job,
            pods,
            memory.refusal,
            nodes=nodes,
            policy=self.policy,
            leftovers=tuple(self.cache.pods_of_earlier_jobs(job.identity)),
            older_gang=self.cache.older_gang_of(job, memory.refusal),
            answers=self.inquiries.answers(pod.uid for pod in pods),
            waits_for_nodes=self.actor.pod_groups.why_it_waits(job, pods),
            refused_orders=memory.refused_orders,
            kueue=self.extensions.queues.state_in(job.namespace),
            has_default_queue=self.extensions.has_default_queue(job.namespace),
            workloads=self.cache.workloads_of(job.identity),
        )
