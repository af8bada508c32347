"""Fill and correct the cache by LISTs.

A complete LIST finds the deletions missed by a watch. It is needed after a gap of a watch, and once
an hour. Every minute, a LIST of one object of each kind, or of all if there are few, checks three
things: the API server still answers, the operator may still read, and the API server has not gone
back in time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob.controller.cache import Cache, Key, place_of
from ddpjob.controller.errors import CannotRun, MoreIsReadable
from ddpjob.controller.store import namespace_of, uid_of
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.kube.api import FIRST_PAGE, PAGE_TRIES, ApiClient, may_succeed_later
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import NODES, PODS, WATCHED, Kind

log = logging.getLogger(__name__)

# Seconds between two turns, and between two complete LISTs without a gap.
INTERVAL = 60.0
COMPLETE_INTERVAL = 3600.0

# Seconds between the first turns. kopf makes its own first LIST after ours, and no watch reports a
# deletion between the two.
EARLY_INTERVALS = (2.0, 10.0)

# Seconds before a failed LIST is tried again, until the first LIST has succeeded.
RETRY_INTERVAL = 1.0

# Longest time in seconds by which a replica of the API server may lag behind the others.
LONGEST_LAG = 50.0

NO_NODES = (
    "cannot read Kubernetes nodes (%s). Pods on a crashed node are deleted by force only after "
    "Kubernetes itself has evicted them, which takes 5 minutes, and spot notices are not seen."
)

# A function to read the objects of a kind, in a namespace or in all, with so many tries for a page.
Read = Callable[[Kind, str | None, int], Awaitable[object]]

NO_ROLE = "Give the operator its Role there, or remove the namespace from watchNamespaces."


@dataclass
class Lister:
    """Lists the watched kinds, in the watched namespaces, or in all if there are none.

    - `after_turn`: called after each turn.
    - `last_request`: monotonic time of the last request for a page of a LIST.
    - `versions`: resourceVersion of the last LIST of each kind and namespace.
    - `unreadable`: watched namespaces that the last LIST could not read.
    - `unwatched`: watched namespaces that were unreadable when the watches began.
    - `reads_nodes`: whether Kubernetes nodes can be read; None before the first LIST of them.
    """

    api: ApiClient
    cache: Cache
    queue: WorkQueue[Key]
    after_turn: Callable[[], None]
    namespaces: Sequence[str] = ()
    last_request: float = 0.0
    versions: dict[tuple[Kind, str | None], int] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    unwatched: frozenset[str] = frozenset()
    reads_nodes: bool | None = None
    # All pods of the namespaces before this one, in the order of a LIST, are in the cache.
    _passed: str = ""
    # Watched namespaces with at least one LIST.
    _listed: set[str] = field(default_factory=set)
    _complete: bool = False
    # The kinds with at least one event of a watch.
    _heard: set[Kind] = field(default_factory=set)
    # Whether a watch may have missed a deletion since the last complete LIST began, and when that
    # was, in monotonic seconds.
    _has_gap: bool = True
    _last_complete: float = 0.0
    # For each kind whose LISTs are older than an earlier one: the monotonic time since then.
    _back_since: dict[Kind, float] = field(default_factory=dict)

    @property
    def synced(self) -> bool:
        """True once a LIST has succeeded."""
        return self._complete

    def knows_pods_of(self, namespace: str) -> bool:
        """Return True once all pods of a namespace are in the cache."""
        if self.namespaces:
            # The pods of a namespace may be unreadable although the LIST is complete.
            return namespace in self._listed
        if self._complete:
            return True
        return place_of(namespace) < place_of(self._passed)

    @property
    def readable(self) -> list[str]:
        """Return the watched namespaces that the last LIST could read."""
        return [name for name in self.namespaces if name not in self.unreadable]

    async def run(self) -> None:
        """List everything at once and again after a few seconds, then take a turn every minute.

        Raises MoreIsReadable if unwatched nodes or an unwatched namespace can be read now: kopf
        chooses its watches only once. Raises CannotRun if the API server has gone back in time.
        """
        early = iter(EARLY_INTERVALS)
        while True:
            self._note_request()
            try:
                await self.take_turn()
            except CallFailed as error:
                log.warning("cannot list jobs and pods: %s", error)
            appeared = self.unwatched - self.unreadable
            if appeared:
                found = ", ".join(sorted(appeared))
                raise MoreIsReadable(f"{found} can be read now; the next start watches it")
            await asyncio.sleep(next(early, INTERVAL) if self.synced else RETRY_INTERVAL)

    def note_event(self, kind: Kind, *, is_listed: bool) -> None:
        """Note an event of a watch. `is_listed`: kopf lists the objects, and watches from there on.

        It does so at the start, and when it cannot go on where its watch has ended.
        """
        self._heard.add(kind)
        if is_listed:
            self.note_gap()

    def note_gap(self) -> None:
        """Let the next turn list everything, because a watch may have missed a deletion."""
        self._has_gap = True

    async def take_turn(self) -> None:
        """List everything if necessary, or one object of each kind. Raises CallFailed."""
        is_due = time.monotonic() - self._last_complete >= COMPLETE_INTERVAL
        if not (self._has_gap or is_due):
            await self._read_all(self._check)
        # The check may have found a gap.
        if self._has_gap or is_due:
            await self.list_once()
        self.after_turn()

    async def list_once(self) -> None:
        """List every readable namespace. Raises CallFailed if none can be read.

        An unreadable namespace does not stop the LISTs of the others.
        """
        self._has_gap = False
        self._last_complete = time.monotonic()
        try:
            await self._read_all(self._list)
        except CallFailed:
            self._has_gap = True
            raise
        # Look at every job, because the watches may have missed something.
        self._complete = True
        for key in self.cache.jobs.by_key:
            self.queue.add(key)

    async def _read_all(self, read: Read) -> None:
        kinds = await self._readable_kinds(read)
        if self.namespaces:
            await self._read_namespaces(kinds, read)
        else:
            for kind in kinds:
                await read(kind, None, PAGE_TRIES)

    async def _read_namespaces(self, kinds: Sequence[Kind], read: Read) -> None:
        """Read the watched namespaces. Raises CallFailed if none can be read.

        A failed one is read again after all others, with several tries for each page.
        """
        failed: dict[str, CallFailed] = {}
        for namespace in self.namespaces:
            error = await self._read_namespace(namespace, kinds, read, tries=1)
            if error:
                failed[namespace] = error
        for namespace, first in list(failed.items()):
            if may_succeed_later(first):
                error = await self._read_namespace(namespace, kinds, read, tries=PAGE_TRIES)
                if error is None:
                    del failed[namespace]
        self._report_unreadable(failed)
        if len(failed) == len(self.namespaces):
            raise next(iter(failed.values()))

    async def _read_namespace(
        self, namespace: str, kinds: Sequence[Kind], read: Read, tries: int
    ) -> CallFailed | None:
        if namespace in self.unreadable or namespace not in self._listed:
            # The changes there since then are unknown.
            read = self._list
        try:
            for kind in kinds:
                await read(kind, namespace, tries)
        except CallFailed as error:
            return error
        self._note_listed(namespace)
        return None

    async def _readable_kinds(self, read: Read) -> list[Kind]:
        """Read the nodes, and return the other kinds. With Roles only, nodes cannot be read."""
        if self.namespaces:
            error: ApiError | str = "watchNamespaces is set, so the operator has Roles only"
        else:
            try:
                await read(NODES, None, PAGE_TRIES)
            except ApiError as refusal:
                if refusal.status != 403:
                    raise
                error = refusal
            else:
                if self.reads_nodes is False:
                    raise MoreIsReadable("nodes can be read now; the next start watches them")
                self.reads_nodes = True
                return [kind for kind in WATCHED if kind is not NODES]
        if self.reads_nodes is None:
            log.warning(NO_NODES, error)
        self.reads_nodes = False
        return [kind for kind in WATCHED if kind is not NODES]

    def _report_unreadable(self, failed: Mapping[str, CallFailed]) -> None:
        for namespace in failed.keys() - self.unreadable:
            error = failed[namespace]
            is_forbidden = isinstance(error, ApiError) and error.status == 403
            advice = NO_ROLE if is_forbidden else "It is tried again."
            log.warning("cannot read namespace %s: %s. %s", namespace, error, advice)
        self.unreadable = frozenset(failed)

    async def _check(self, kind: Kind, namespace: str | None, tries: int) -> None:
        """Read one object of a kind, and note a gap if objects are known but no watch reported one.

        If there are only a few objects, all are read. kopf reports nothing about an empty LIST, so
        an empty answer is a gap too.
        """
        store = self.cache.stores[kind]
        was_gap = bool(store.objects) and kind not in self._heard
        if store.count(namespace) <= FIRST_PAGE:
            gone = await self._list(kind, namespace, tries)
            was_gap = was_gap or gone > 0
        else:
            version, exists = await self.api.list_version(
                kind, namespace, self._note_request, tries
            )
            self._note_version(kind, namespace, version)
            was_gap = was_gap or not exists
        if was_gap:
            self.note_gap()

    async def _list(self, kind: Kind, namespace: str | None, tries: int) -> int:
        """Add every object of a kind to the cache, and remove the others from it.

        Return the number of removed ones.
        """
        store = self.cache.stores[kind]
        listed = set()
        version = 0
        async for objects, page_version in self.api.pages(
            kind, namespace, self._note_request, tries
        ):
            version = page_version
            for body in objects:
                store.see(body)
                listed.add(uid_of(body))
            if kind == PODS and objects:
                self._pass(namespace_of(objects[-1]))
        gone = store.drop_unlisted(listed, version, namespace)
        self._note_version(kind, namespace, version)
        return gone

    def _note_version(self, kind: Kind, namespace: str | None, version: int) -> None:
        before = self.versions.get((kind, namespace), 0)
        if self._went_back(kind, before, version):
            return
        self.cache.stores[kind].prune(before)
        self.versions[kind, namespace] = version

    def _note_request(self) -> None:
        self.last_request = time.monotonic()

    def _went_back(self, kind: Kind, before: int, version: int) -> bool:
        """Return True if a LIST is older than the one before it.

        One replica of the API server may lag behind for a moment. Raises CannotRun if this lasts:
        then the cache would ignore every change.
        """
        if version >= before:
            self._back_since.pop(kind, None)
            return False
        now = time.monotonic()
        if now - self._back_since.setdefault(kind, now) < LONGEST_LAG:
            return True
        raise CannotRun(
            f"the resourceVersion of {kind.plural} went back from {before} to {version}, as after "
            "etcd was restored from a backup. The next start begins with an empty cache."
        )

    def _note_listed(self, namespace: str) -> None:
        """Look at the jobs of a watched namespace as soon as it can be read."""
        if namespace in self._listed and namespace not in self.unreadable:
            return
        self._listed.add(namespace)
        for key in self.cache.jobs.keys_in(namespace):
            self.queue.add(key)

    def _pass(self, namespace: str) -> None:
        """Look at the jobs of namespaces before this one in a LIST: all their pods are known."""
        if self._complete or self.namespaces or place_of(namespace) <= place_of(self._passed):
            return
        for key in self.cache.jobs.keys_between(self._passed, namespace):
            self.queue.add(key)
        self._passed = namespace
