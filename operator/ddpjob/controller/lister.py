"""The periodic LIST, which corrects the cache.

It finds the deletions that a watch missed, and the namespaces that cannot be read.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.controller.cache import Cache, Key, uid_of
from ddpjob.controller.client import JOBS, OUR_PODS, ApiClient
from ddpjob.controller.errors import ApiError, CallFailed, NamespaceAppeared
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core import names

log = logging.getLogger(__name__)

# Seconds between two LISTs.
INTERVAL = 60.0

# Seconds between the first LISTs. kopf makes its own first LIST after ours, and no watch reports a
# deletion between the two.
EARLY_INTERVALS = (2.0, 10.0)

# Seconds before a failed LIST is tried again, until the first LIST has succeeded.
RETRY_INTERVAL = 1.0


@dataclass
class Lister:
    """Lists the jobs and pods of the watched namespaces, or of all if there are none.

    - `after_list`: called after each complete LIST.
    - `last_turn`: monotonic time at which the last LIST began.
    - `listed`: resourceVersion of the last complete LIST.
    - `unreadable`: watched namespaces that the last LIST was not allowed to read.
    - `unwatched`: watched namespaces that were unreadable when the watches began.
    """

    api: ApiClient
    cache: Cache
    queue: WorkQueue[Key]
    after_list: Callable[[], None]
    namespaces: Sequence[str] = ()
    last_turn: float = 0.0
    listed: int = 0
    unreadable: frozenset[str] = frozenset()
    unwatched: frozenset[str] = frozenset()

    @property
    def synced(self) -> bool:
        """True once a LIST has succeeded."""
        return self.listed > 0

    @property
    def readable(self) -> list[str]:
        """Watched namespaces that the last LIST could read."""
        return [name for name in self.namespaces if name not in self.unreadable]

    async def run(self) -> None:
        """List at once, again after a few seconds, and then every minute.

        Raises NamespaceAppeared if a namespace can be read that is not watched: kopf takes its
        namespaces only once.
        """
        early = iter(EARLY_INTERVALS)
        while True:
            self.last_turn = time.monotonic()
            try:
                await self.list_once()
            except CallFailed as error:
                log.warning("cannot list jobs and pods: %s", error)
            appeared = self.unwatched - self.unreadable
            if appeared:
                found = ", ".join(sorted(appeared))
                raise NamespaceAppeared(f"{found} can be read now; the next start watches it")
            await asyncio.sleep(next(early, INTERVAL) if self.synced else RETRY_INTERVAL)

    async def list_once(self) -> None:
        """List every namespace that can be read. Raises ApiError if there is none."""
        versions = []
        refused: dict[str, ApiError] = {}
        for namespace in self.namespaces or (None,):
            try:
                versions.append(await self._list_namespace(namespace))
            except ApiError as error:
                if namespace is None or error.status != 403:
                    raise
                refused[namespace] = error
        self._report_unreadable(refused)
        if not versions:
            raise next(iter(refused.values()))

        # Every job gets a look, whatever the watches have missed.
        for key in self.cache.jobs:
            self.queue.add(key)
        self.cache.prune(self.listed)
        self.listed = min(versions)
        self.after_list()

    def _report_unreadable(self, refused: Mapping[str, ApiError]) -> None:
        for namespace in refused.keys() - self.unreadable:
            log.warning(
                "cannot read namespace %s: %s. Give the operator its Role there, or remove the "
                "namespace from watchNamespaces.",
                namespace,
                refused[namespace],
            )
        self.unreadable = frozenset(refused)

    async def _list_namespace(self, namespace: str | None) -> int:
        """List jobs, then pods, and return the resourceVersion of the first LIST.

        If a job and its pods appear in between, the pods wait for the job's own event.
        """
        scope = f"/namespaces/{namespace}" if namespace else ""
        jobs, version = await self._list(f"{JOBS}{scope}/{names.PLURAL}", self.cache.see_job)
        self.cache.drop_unlisted_jobs(jobs, version, namespace)
        pods, pods_version = await self._list(f"api/v1{scope}/pods", self.cache.see_pod, OUR_PODS)
        self.cache.drop_unlisted_pods(pods, pods_version, namespace)
        return version

    async def _list(
        self, path: str, see: Callable[[Mapping[str, Any]], bool], selector: str = ""
    ) -> tuple[set[str], int]:
        """Show every object to the cache. Return (UIDs, resourceVersion of the LIST)."""
        listed = set()
        version = 0
        async for objects, page_version in self.api.pages(path, selector):
            version = page_version
            for body in objects:
                see(body)
                listed.add(uid_of(body))
        return listed, version
