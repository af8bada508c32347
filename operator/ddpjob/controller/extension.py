"""Watch an optional kind of a cluster, such as Kueue's Workloads.

kopf chooses its kinds once, at its start. An extension of Kubernetes may be installed and removed
at any time, so its kinds have watches of their own.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.store import Store
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core.api import names
from ddpjob.core.api.queue import DEFAULT_QUEUE
from ddpjob.core.observe.observation import ApiState
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import LOCAL_QUEUES, POD_GROUPS, WORKLOADS, Kind
from ddpjob.kube.request import ReadDocument
from ddpjob.kube.watch import watch

log = logging.getLogger(__name__)

# Seconds between two looks for the API, and before a failed watch is begun again.
INTERVAL = 10.0

# Seconds for the first look at the API.
FIRST_LOOK = 2.0

# After so many failed looks, jobs without a queue no longer wait: a broken extension must not stop
# those that do not use it. Seconds between these looks.
FAILED_LOOKS = 3
FIRST_RETRY = 1.0

# The operator's own objects.
OWN = {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.MANAGER}"}


@dataclass
class Extension:
    """The watch of a kind's objects, and the state of the kind.

    - `store`: has the objects. `query` selects them.
    - `namespaces`: the watched namespaces; empty for all.
    - `unreadable`: those of them in which the objects cannot be read.
    """

    api: ApiClient
    cache: Cache
    queue: WorkQueue[Key]
    kind: Kind
    store: Store[Any]
    namespaces: Sequence[str] = ()
    state: ApiState = ApiState.UNKNOWN
    query: Mapping[str, str] = field(default_factory=lambda: OWN)
    unreadable: set[str] = field(default_factory=set)
    _has_looked: asyncio.Event = field(default_factory=asyncio.Event)
    _failed_looks: int = 0
    _listed: set[str | None] = field(default_factory=set)
    # The version of the last LIST of each namespace.
    _listed_before: dict[str | None, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch the objects for ever, unless the administrator has decided against it."""
        if self.state in (ApiState.OFF, ApiState.REFUSED):
            await asyncio.Event().wait()
        while True:
            try:
                self._become(await self._follow())
            except CallFailed as error:
                log.warning("cannot read the %s of %s: %s", self.kind.plural, self.kind.api, error)
                is_forbidden = isinstance(error, ApiError) and error.status in (401, 403)
                self._failed_looks += 1
                self._become(ApiState.UNREADABLE if is_forbidden else ApiState.UNKNOWN)
            await asyncio.sleep(INTERVAL if self.has_looked else FIRST_RETRY)

    def state_in(self, namespace: str) -> ApiState:
        """Return the state of the kind in a namespace."""
        is_served = self.state is ApiState.SERVED
        return ApiState.UNREADABLE if is_served and namespace in self.unreadable else self.state

    @property
    def has_looked(self) -> bool:
        """Return True after the first look with an answer, or FAILED_LOOKS without."""
        return self._has_looked.is_set()

    async def wait_for_first_look(self) -> None:
        """Wait for the first look at the API, for FIRST_LOOK seconds at most."""
        try:
            async with asyncio.timeout(FIRST_LOOK):
                await self._has_looked.wait()
        except TimeoutError:
            return

    async def _follow(self) -> ApiState:
        """Watch the objects until the watch fails. Return ABSENT if the API is not there."""
        if not await self._is_served():
            return ApiState.ABSENT
        self._listed.clear()
        self.unreadable.clear()
        scopes: list[str | None] = [*self.namespaces] or [None]
        watches = [asyncio.create_task(self._keep_watch(scope)) for scope in scopes]
        try:
            await asyncio.gather(*watches)
        except ApiError as error:
            # The extension was removed.
            if not error.is_unserved:
                raise
        finally:
            for one in watches:
                one.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        return ApiState.ABSENT

    async def _is_served(self) -> bool:
        found = await self.api.read(ReadDocument(self.kind.api)) or {}
        return any(kind.get("name") == self.kind.plural for kind in found.get("resources", ()))

    async def _keep_watch(self, namespace: str | None) -> None:
        """Watch a namespace, or all. If one of several is unreadable, try it again later.

        It does not stop the watches of the others.
        """
        while True:
            try:
                await self._watch(namespace)
            except ApiError as error:
                if namespace is None or error.status not in (401, 403):
                    raise
                log.warning("cannot read the %s of %s: %s", self.kind.plural, namespace, error)
                self._note_unreadable(namespace)
            await asyncio.sleep(INTERVAL)

    def _note_unreadable(self, namespace: str) -> None:
        """Note a namespace as unreadable. If that is news, look at its jobs."""
        is_news = namespace not in self.unreadable
        self.unreadable.add(namespace)
        self._note_list(namespace)
        if is_news:
            self._look_at_jobs(namespace)

    async def _watch(self, namespace: str | None) -> None:
        def on_list(listed: set[str], version: str) -> None:
            self.store.drop_unlisted(listed, int(version), namespace)
            self.store.prune(self._listed_before.get(namespace, 0))
            self._listed_before[namespace] = int(version)

        async for change in watch(self.api, self.kind, namespace, self.query, on_list):
            if change is None:
                if namespace in self.unreadable:
                    self.unreadable.discard(namespace)
                    self._look_at_jobs(namespace)
                self._note_list(namespace)
                continue
            what, body = change
            key = self.cache.key_of_owned(body)
            is_news = self.store.forget(body) if what == "DELETED" else self.store.see(body)
            if key and is_news:
                self.queue.add(key)

    def _become(self, state: ApiState) -> None:
        """Set the state. After a change, look at all jobs: some wait for it."""
        if state is not ApiState.UNKNOWN or self._failed_looks >= FAILED_LOOKS:
            self._has_looked.set()
        if state is self.state:
            return
        self.state = state
        self._look_at_jobs()

    def _note_list(self, namespace: str | None) -> None:
        """Note a namespace after its LIST, or as unreadable."""
        self._listed.add(namespace)
        if len(self._listed) >= max(1, len(self.namespaces)):
            self._become(ApiState.SERVED)

    def _look_at_jobs(self, namespace: str | None = None) -> None:
        for key in self.cache.jobs.keys_in(namespace):
            self.queue.add(key)


@dataclass(frozen=True)
class Extensions:
    """The optional kinds of a cluster.

    `pod_groups` has each kind of PodGroups by the name of its backend.
    """

    queues: Extension
    default_queues: Extension
    pod_groups: Mapping[str, Extension]

    def has_default_queue(self, namespace: str) -> bool | None:
        """Return True if a namespace has a LocalQueue for jobs without a queue.

        Returns None if this is not known yet.
        """
        if self.queues.state in (ApiState.OFF, ApiState.REFUSED):
            return False
        if not (self.queues.has_looked and self.default_queues.has_looked):
            return None
        # After a failed look, what was known before counts.
        may_exist = self.queues.state_in(namespace) in (ApiState.SERVED, ApiState.UNKNOWN)
        return may_exist and self.queues.cache.default_queues.count(namespace) > 0

    @property
    def all(self) -> tuple[Extension, ...]:
        return self.queues, self.default_queues, *self.pod_groups.values()


def extensions(
    api: ApiClient,
    cache: Cache,
    queue: WorkQueue[Key],
    namespaces: Sequence[str],
    of_queues: ApiState,
) -> Extensions:
    """Return the watches of an operator. `of_queues` is the administrator's choice about queues."""

    def watched(kind: Kind, store: Store[Any], **more: Any) -> Extension:
        return Extension(api, cache, queue, kind, store, namespaces, **more)

    by_name = {"fieldSelector": f"metadata.name={DEFAULT_QUEUE}"}
    return Extensions(
        watched(WORKLOADS, cache.workloads, state=of_queues),
        watched(LOCAL_QUEUES, cache.default_queues, state=of_queues, query=by_name),
        {name: watched(kind, cache.pod_groups[name]) for name, kind in POD_GROUPS.items()},
    )
