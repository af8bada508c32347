"""The watch of Kueue's Workloads.

kopf takes the kinds that it watches once, at its start. Kueue may be installed, and removed, at any
time, so its Workloads have a watch of their own.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core.api import names
from ddpjob.core.observe.observation import Kueue
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import WORKLOADS
from ddpjob.kube.request import ReadDocument
from ddpjob.kube.watch import watch

log = logging.getLogger(__name__)

# Seconds between two looks for the API, and before a watch that failed is begun again.
INTERVAL = 10.0

SELECTOR = {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.MANAGER}"}


@dataclass
class Queues:
    """What is known of Kueue, and the watch of the Workloads that the operator has made.

    `namespaces` are those that are watched; without any, all are.
    """

    api: ApiClient
    cache: Cache
    queue: WorkQueue[Key]
    namespaces: Sequence[str] = ()
    state: Kueue = Kueue.UNKNOWN
    _listed: set[str | None] = field(default_factory=set)
    # The version of the last LIST of each namespace.
    _listed_before: dict[str | None, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch Workloads for ever, unless the administrator has decided against it."""
        if self.state in (Kueue.OFF, Kueue.REFUSED):
            await asyncio.Event().wait()
        while True:
            try:
                self._become(await self._follow())
            except CallFailed as error:
                log.warning("cannot read the Workloads of Kueue: %s", error)
                is_forbidden = isinstance(error, ApiError) and error.status in (401, 403)
                self._become(Kueue.UNREADABLE if is_forbidden else Kueue.UNKNOWN)
            await asyncio.sleep(INTERVAL)

    async def _follow(self) -> Kueue:
        """Watch Workloads until that fails. Return ABSENT if the API is not there."""
        if not await self._is_served():
            return Kueue.ABSENT
        self._listed.clear()
        scopes: list[str | None] = [*self.namespaces] or [None]
        watches = [asyncio.create_task(self._watch(scope, len(scopes))) for scope in scopes]
        try:
            await asyncio.gather(*watches)
        except ApiError as error:
            # Kueue was removed.
            if error.status != 404:
                raise
        finally:
            for one in watches:
                one.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        return Kueue.ABSENT

    async def _is_served(self) -> bool:
        found = await self.api.read(ReadDocument(WORKLOADS.api)) or {}
        return any(kind.get("name") == WORKLOADS.plural for kind in found.get("resources", ()))

    async def _watch(self, namespace: str | None, scopes: int) -> None:
        store = self.cache.workloads

        def on_list(listed: set[str], version: str) -> None:
            store.drop_unlisted(listed, int(version), namespace)
            store.prune(self._listed_before.get(namespace, 0))
            self._listed_before[namespace] = int(version)

        async for change in watch(self.api, WORKLOADS, namespace, SELECTOR, on_list):
            if change is None:
                self._listed.add(namespace)
                if len(self._listed) == scopes:
                    self._become(Kueue.SERVED)
                continue
            what, body = change
            key = self.cache.key_of_workload(body)
            is_news = store.forget(body) if what == "DELETED" else store.see(body)
            if key and is_news:
                self.queue.add(key)

    def _become(self, state: Kueue) -> None:
        """Change what is known, and look at all jobs then: some wait for it."""
        if state is self.state:
            return
        self.state = state
        for key in self.cache.jobs.by_key:
            self.queue.add(key)
