"""Elect a leader: one operator works, the others wait for its Lease.

A coordination.k8s.io Lease is held by compare-and-swap. The times follow client-go's leader
election. A candidate takes over if it has not seen the Lease change for DURATION. The holder itself
stops writing sooner: when DEADLINE has passed since its last successful renewal began. Only the
monotonic clock of each process counts.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from ddpjob.controller.errors import LeaseLost
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import LEASES
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# Seconds.
DURATION = 15.0
DEADLINE = 10.0
RETRY = 2.0
TIMEOUT = 5.0


class Lease:
    """The Lease `namespace`/`name`, held by `identity`. `clock` gives monotonic seconds."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._identity = identity
        self._clock = clock
        self._namespace = namespace
        self._name = name
        self._version: str | None = None
        self._transitions = 0
        self._acquired = ""
        self._deadline = float("-inf")
        # True once the Lease was read, or found not to exist yet.
        self.readable = False

    @property
    def remaining(self) -> float:
        """Seconds in which this process may still write; not positive if it may not."""
        return self._deadline - self._clock()

    def check(self) -> None:
        """Raise LeaseLost if this process may not write any more."""
        if self.remaining <= 0:
            raise LeaseLost("the Lease was not renewed in time; another operator may lead")

    async def while_held(self, request: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the answer of `request`. When the Lease ends, cancel it and raise LeaseLost."""
        task = asyncio.create_task(request)
        try:
            while not task.done():
                self.check()
                # Each renewal moves the end. If a renewal finds another holder, that is the end.
                await asyncio.wait([task], timeout=min(self.remaining, RETRY))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        seen = ""
        since = self._clock()
        while True:
            started = self._clock()
            try:
                lease = await self._get()
                self.readable = True
                # Measure by the own clock how long the holder has not renewed the Lease.
                version = lease["metadata"]["resourceVersion"] if lease else ""
                if version != seen:
                    seen = version
                    since = started
                if self._is_free(lease, started - since) and await self._take(lease, started):
                    return
            except CallFailed as error:
                log.warning("cannot read the Lease %s: %s", self._name, error)
            await asyncio.sleep(RETRY)

    async def keep(self) -> None:
        """Renew the Lease for ever. Raises LeaseLost if it fails for too long."""
        while True:
            await asyncio.sleep(RETRY)
            try:
                await self._renew()
            except CallFailed as error:
                log.warning("cannot renew the Lease %s: %s", self._name, error)
            self.check()

    async def release(self) -> None:
        """Give the Lease back. The next leader then need not wait."""
        if self.remaining <= 0:
            return
        self._deadline = float("-inf")
        try:
            await self._swap("")
        except CallFailed as error:
            log.warning(
                "cannot release the Lease %s, so the next leader waits %.0f s: %s",
                self._name,
                DURATION,
                error,
            )

    async def _renew(self) -> None:
        # The deadline counts from the start of the request, because its answer may be late.
        started = self._clock()
        lease = await self._swap(self._identity)
        if lease is None:
            self._deadline = float("-inf")
        else:
            self._remember(lease, started)

    async def _swap(self, holder: str) -> dict[str, Any] | None:
        """Write the Lease with `holder`. Return None if it is gone or belongs to another process.

        After a conflict, try once more: the last write may have arrived although its answer was
        lost.
        """
        try:
            return await self._put(holder)
        except ApiError as error:
            if error.status != 409 and not error.is_absent:
                raise
        lease = await self._get()
        if lease is None or lease["spec"].get("holderIdentity") != self._identity:
            return None
        self._version = lease["metadata"]["resourceVersion"]
        return await self._put(holder)

    def _is_free(self, lease: Mapping[str, Any] | None, unchanged: float) -> bool:
        spec = (lease or {}).get("spec") or {}
        holder = spec.get("holderIdentity")
        return not holder or holder == self._identity or unchanged > DURATION

    async def _take(self, lease: Mapping[str, Any] | None, started: float) -> bool:
        """Write the Lease in this process's name. Return False if another one was faster."""
        self._acquired = _now()
        self._version = None
        try:
            if lease is None:
                body = self._body(self._identity)
                request = Request(Verb.CREATE, LEASES, self._namespace, body=body)
                taken = await self._api.call(request)
            else:
                spec = lease.get("spec") or {}
                self._version = lease["metadata"]["resourceVersion"]
                self._transitions = int(spec.get("leaseTransitions") or 0) + 1
                taken = await self._put(self._identity)
        except ApiError as error:
            # Another candidate has written the Lease since it was read.
            if error.status == 409:
                return False
            raise
        self._remember(taken, started)
        return True

    def _remember(self, lease: Mapping[str, Any], started: float) -> None:
        self._version = lease["metadata"]["resourceVersion"]
        self._deadline = started + DEADLINE

    def _body(self, holder: str) -> dict[str, Any]:
        metadata = {"name": self._name, "namespace": self._namespace}
        if self._version:
            metadata["resourceVersion"] = self._version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": int(DURATION),
                "acquireTime": self._acquired,
                "renewTime": _now(),
                "leaseTransitions": self._transitions,
            },
        }

    async def _get(self) -> dict[str, Any] | None:
        request = Request(Verb.GET, LEASES, self._namespace, self._name)
        return await self._api.read(request, TIMEOUT)

    async def _put(self, holder: str) -> dict[str, Any]:
        body = self._body(holder)
        request = Request(Verb.UPDATE, LEASES, self._namespace, self._name, body=body)
        return await self._api.call(request, TIMEOUT)


def _now() -> str:
    """Return the wall clock as a MicroTime, for people. No decision depends on it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
