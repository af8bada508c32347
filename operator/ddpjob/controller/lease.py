"""One leader: a coordination.k8s.io Lease, held by compare-and-swap, judged by this process's monotonic clock.

Times follow client-go's leader election: a candidate takes over when the Lease has not moved for DURATION as it saw it;
the holder itself stops writing DEADLINE after the start of its last renewal that succeeded, which is sooner.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ddpjob.controller.client import Api, ApiError, Unreachable

log = logging.getLogger(__name__)

DURATION, DEADLINE, RETRY, TIMEOUT = 15.0, 10.0, 2.0, 5.0
"""Seconds."""


class LeaseLost(Exception):
    """Another operator may lead by now: nothing may be written any more."""


class Lease:
    """The Lease `namespace`/`name` in the hands of `identity`."""

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, clock: Callable[[], float]
    ) -> None:
        self._api, self._identity, self._clock = api, identity, clock
        self._folder = f"apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self._version: str | None = None
        self._transitions = 0
        self._acquired = ""
        self._deadline = float("-inf")
        self.readable = False  # whether it was read once, or found not to be there yet

    @property
    def remaining(self) -> float:
        """Seconds in which this process may still write; not positive when it may not."""
        return self._deadline - self._clock()

    def check(self) -> None:
        """Raises LeaseLost when writing is over."""
        if self.remaining <= 0:
            raise LeaseLost("the Lease could not be renewed in time; another operator may lead")

    async def acquire(self) -> None:
        """Returns as its holder; waits while somebody else is."""
        seen, since = "", self._clock()
        while True:
            started = self._clock()
            try:
                lease = await self._get()
                self.readable = True
                version = lease["metadata"]["resourceVersion"] if lease else ""
                if version != seen:
                    seen, since = version, started
                if self._is_free(lease, started - since) and await self._take(lease, started):
                    return
            except (ApiError, Unreachable) as error:
                log.warning("cannot read the Lease %s yet: %s", self._name, error)
            await asyncio.sleep(RETRY)

    async def keep(self) -> None:
        """Renews until it cannot; raises LeaseLost then."""
        while True:
            await asyncio.sleep(RETRY)
            try:
                await self._renew()
            except (ApiError, Unreachable) as error:
                log.warning("cannot renew the Lease: %s", error)
            self.check()

    async def release(self) -> None:
        """Gives the Lease back at once, so that a successor need not wait."""
        if self.remaining <= 0:
            return
        self._deadline = float("-inf")
        try:
            await self._swap("")
        except (ApiError, Unreachable) as error:
            log.warning("cannot release the Lease; a successor waits %.0f s: %s", DURATION, error)

    async def _renew(self) -> None:
        started = self._clock()
        lease = await self._swap(self._identity)
        if lease is None:
            self._deadline = float("-inf")
        else:
            self._remember(lease, started)

    async def _swap(self, holder: str) -> dict[str, Any] | None:
        """Puts our Lease into the hands of `holder`; None where it is not ours any more, or gone.

        After a conflict it is tried once more: our own last write may have arrived though its answer got lost.
        """
        try:
            return await self._put(self._body(holder))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        lease = await self._get()
        if lease is None or lease["spec"].get("holderIdentity") != self._identity:
            return None
        self._version = lease["metadata"]["resourceVersion"]
        return await self._put(self._body(holder))

    def _is_free(self, lease: Mapping[str, Any] | None, unchanged: float) -> bool:
        holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
        return not holder or holder == self._identity or unchanged > DURATION

    async def _take(self, lease: Mapping[str, Any] | None, started: float) -> bool:
        self._acquired = _now()
        self._version = lease["metadata"]["resourceVersion"] if lease else None
        try:
            if lease is None:
                taken = await self._api.call("POST", self._folder, self._body(self._identity))
            else:
                self._transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0) + 1
                taken = await self._put(self._body(self._identity))
        except ApiError as error:
            if error.status == 409:  # somebody was faster
                return False
            raise
        self._remember(taken, started)
        return True

    def _remember(self, lease: Mapping[str, Any], started: float) -> None:
        self._version, self._deadline = lease["metadata"]["resourceVersion"], started + DEADLINE

    def _body(self, holder: str) -> dict[str, Any]:
        metadata = {"name": self._name, "namespace": self._namespace}
        if self._version:
            metadata["resourceVersion"] = self._version
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(DURATION),
            "acquireTime": self._acquired,
            "renewTime": _now(),
            "leaseTransitions": self._transitions,
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    async def _get(self) -> dict[str, Any] | None:
        try:
            return await self._api.call("GET", f"{self._folder}/{self._name}", timeout=TIMEOUT)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _put(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._api.call("PUT", f"{self._folder}/{self._name}", body, timeout=TIMEOUT)


def _now() -> str:
    """MicroTime, for people: no decision depends on a wall clock."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
