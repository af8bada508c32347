"""The namespaces of this installation.

Two installations may watch the same namespace by mistake, each with a leader of its own. So each
installation marks its namespaces: it writes a Lease into each namespace with jobs. The first
installation serves the namespace. Another one does nothing there, until the mark has not been
renewed for a while.

A rolling upgrade has one installation with several processes. All of them have the same mark.

An installation may exclude namespaces. It marks none of them, and does nothing there. It only reads
their marks: a job in a namespace without any installation gets an event about it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.controller.clock import wall_time
from ddpjob.controller.writer import Writer
from ddpjob.core.api import names
from ddpjob.core.api.times import format_time
from ddpjob.kube.errors import ApiError, CallFailed, Unreachable
from ddpjob.kube.kinds import LEASES
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)

MARK = names.INSTALLATION_LEASE

# Seconds until a mark is renewed, until it is read again, and until it no longer counts.
RENEW_AFTER = 60.0
CHECK_AFTER = 20.0
DURATION = 180.0

# Seconds until an excluded namespace counts as unserved: without a mark, and with an old mark.
# Another installation that serves it has written its mark by then.
UNSERVED_WITHOUT_MARK = CHECK_AFTER
UNSERVED_AFTER_MARK = DURATION + 2 * CHECK_AFTER


@dataclass
class Mark:
    """The mark of one namespace as far as it is known, with monotonic times.

    - `uid`: the UID of the Lease; empty if there is no mark.
    - `holder`: the serving installation; empty if there is no mark.
    - `changed`: when the mark was first seen in this version.
    - `checked`: when it was last read or written.
    """

    uid: str
    holder: str
    version: str
    changed: float
    checked: float


@dataclass
class Territory:
    """The marks of namespaces.

    `installation` names this installation, by the namespace and the name of its leader's Lease.
    `excluded` are the namespaces in which it does nothing. `clock` gives monotonic seconds, `now`
    the time of day.
    """

    writer: Writer
    installation: str
    clock: Callable[[], float]
    excluded: Set[str] = frozenset()
    now: Callable[[], datetime] = wall_time
    marks: dict[str, Mark] = field(default_factory=dict)
    # The end of the pause before the mark of a namespace is tried again, in monotonic seconds.
    _unmarkable_until: dict[str, float] = field(default_factory=dict)
    # The namespaces whose marks are being read or written, each with the end of that.
    _claiming: dict[str, asyncio.Event] = field(default_factory=dict)

    async def serves(self, namespace: str) -> bool | None:
        """Return True if this installation serves the namespace. Raises LeaseLost.

        Returns None as long as the answer is unknown: the mark cannot be read, or another call is
        reading or writing it. The looks at several jobs of a namespace write its mark only once.
        They do not wait for it, because a webhook may hang.
        """
        if namespace in self.excluded:
            return False
        # A mark without a holder does not count.
        mark = self.marks.get(namespace) if self.holder_of(namespace) else None
        age = self.clock() - mark.checked if mark else float("inf")
        is_own = self.has_mark(namespace)
        if age < (RENEW_AFTER if is_own else CHECK_AFTER):
            return is_own
        if self.clock() < self._unmarkable_until.get(namespace, 0.0):
            return True
        known = is_own if mark is not None and age < DURATION else None
        if namespace in self._claiming:
            return known
        ended = self._claiming[namespace] = asyncio.Event()
        try:
            return await self._claim(namespace)
        except Unreachable as error:
            # The mark may be that of another installation.
            log.debug("cannot read the mark of namespace %s: %s", namespace, error)
            return known
        except ApiError as error:
            return self._serve_without_mark(namespace, error)
        finally:
            del self._claiming[namespace]
            ended.set()

    async def why_not(self, namespace: str) -> str:
        """Return why this installation does not serve a namespace.

        Returns an empty text for an excluded namespace if another installation serves it, or may
        begin to. Raises LeaseLost.
        """
        if namespace in self.excluded:
            return await self._why_excluded(namespace)
        mark = self.marks.get(namespace)
        if mark is None:
            # It was forgotten with the last job of the namespace. The next look claims it.
            return ""
        wait = max(0.0, mark.changed + DURATION - self.clock())
        end = format_time(self.now() + timedelta(seconds=wait))
        return (
            f"the Lease {MARK} of this namespace names another installation of the operator, "
            f"{mark.holder}: {self.installation} does nothing here, and takes over "
            f"{DURATION:.0f} s after that Lease was last renewed, which is after {end}. If that "
            "installation does not exist any more, nothing else is to be done; else give each "
            "installation its own watchNamespaces, or uninstall one"
        )

    def holder_of(self, namespace: str) -> str:
        """Return the installation in the mark of a namespace; empty if there is none."""
        mark = self.marks.get(namespace)
        return mark.holder if mark else ""

    def has_mark(self, namespace: str) -> bool:
        """Return True if this installation has marked the namespace, as far as is known."""
        return self.holder_of(namespace) == self.installation

    async def mark_anew(self, namespace: str) -> None:
        """Read and write the mark at once, after the other look at it, if any. Raises LeaseLost.

        Until then the mark keeps its UID: an object created meanwhile must have an owner.
        """
        while namespace in self._claiming:
            await self._claiming[namespace].wait()
        mark = self.marks.get(namespace)
        if mark:
            mark.checked = float("-inf")
        self._unmarkable_until.pop(namespace, None)
        await self.serves(namespace)

    def uid_of_mark(self, namespace: str) -> str:
        """Return the UID of the Lease of a namespace; empty if it cannot be read or written."""
        mark = self.marks.get(namespace)
        return mark.uid if mark else ""

    def forget_others(self, namespaces: Set[str]) -> None:
        """Forget the marks of all other namespaces. `namespaces` are those with jobs."""
        self.marks = {name: mark for name, mark in self.marks.items() if name in namespaces}
        self._unmarkable_until = {
            name: until for name, until in self._unmarkable_until.items() if name in namespaces
        }

    async def _why_excluded(self, namespace: str) -> str:
        mark = self.marks.get(namespace)
        if mark is None or self.clock() - mark.checked >= CHECK_AFTER:
            try:
                found = await self._read(namespace)
            except CallFailed as error:
                log.debug("cannot read the mark of namespace %s: %s", namespace, error)
                return ""
            mark = self._note(namespace, found)
        wait = UNSERVED_AFTER_MARK if mark.holder else UNSERVED_WITHOUT_MARK
        if self.clock() - mark.changed < wait:
            return ""
        return (
            f"the operator {self.installation} excludes the namespace {namespace}, and no other "
            "installation of the operator serves it: create the job in another namespace, or ask "
            "the administrator to remove this one from excludedNamespaces"
        )

    async def _claim(self, namespace: str) -> bool | None:
        """Write the mark if it is this installation's or has no holder any more.

        Return whether the namespace is served; None if it is not known. Raises CallFailed if the
        mark cannot be read.
        """
        found = await self._read(namespace)
        try:
            await self._write(namespace, found)
        except CallFailed as error:
            if found is None:
                self.marks.pop(namespace, None)
            if isinstance(error, ApiError) and error.status == 409:
                return await self._compare(namespace, error)
            return self._serve_without_mark(namespace, error)
        return self.has_mark(namespace)

    async def _read(self, namespace: str) -> Mapping[str, Any] | None:
        return await self.writer.read(Request(Verb.GET, LEASES, namespace, MARK))

    async def _write(self, namespace: str, found: Mapping[str, Any] | None) -> None:
        """Write the mark, unless another installation holds it. `found` was just read."""
        if found is None:
            body = self._body(namespace)
            made = await self.writer.write(Request(Verb.CREATE, LEASES, namespace, body=body))
            self._see(namespace, made)
        elif self._see(namespace, found).holder == self.installation:
            await self._renew(namespace, found)
        elif self._is_abandoned(namespace):
            log.info("serving namespace %s, which %s has left", namespace, _holder(found))
            await self._renew(namespace, found)

    async def _compare(self, namespace: str, conflict: ApiError) -> bool | None:
        """Return True if the mark is this installation's, although it could not be written.

        Another writer was faster: another installation, another process of this one, or someone who
        has only changed an annotation. Returns None if the mark has no holder or cannot be read.
        """
        try:
            found = await self._read(namespace)
        except CallFailed as error:
            log.debug("cannot read the mark of namespace %s: %s", namespace, error)
            return None
        if found is None:
            return self._serve_without_mark(namespace, conflict)
        if not _holder(found):
            return None
        self._see(namespace, found)
        return self.has_mark(namespace)

    def _serve_without_mark(self, namespace: str, error: CallFailed) -> bool:
        """Return True if the namespace is served although its mark cannot be read or written.

        There may be no right to mark, the namespace may be ending, or a webhook may refuse the
        mark. Then another installation cannot be detected, and the jobs must not wait for it.
        """
        if self.holder_of(namespace) not in ("", self.installation):
            return False
        log.debug("cannot mark namespace %s: %s", namespace, error)
        self._unmarkable_until[namespace] = self.clock() + RENEW_AFTER
        return True

    async def _renew(self, namespace: str, found: Mapping[str, Any]) -> None:
        body = self._body(namespace, str(found["metadata"]["resourceVersion"]))
        request = Request(Verb.UPDATE, LEASES, namespace, MARK, body=body)
        written = await self.writer.write(request)
        self._see(namespace, written)

    def _note(self, namespace: str, lease: Mapping[str, Any] | None) -> Mark:
        """Remember the mark as it was just read or written. `lease` is None if there is none."""
        now = self.clock()
        old = self.marks.get(namespace)
        version = str(lease["metadata"]["resourceVersion"]) if lease else ""
        changed = old.changed if old and old.version == version else now
        uid = str(lease["metadata"]["uid"]) if lease else ""
        mark = Mark(uid, _holder(lease or {}), version, changed, now)
        self.marks[namespace] = mark
        return mark

    def _see(self, namespace: str, lease: Mapping[str, Any]) -> Mark:
        """Remember a mark, and log the name of a new holder if it is another installation."""
        old = self.marks.get(namespace)
        mark = self._note(namespace, lease)
        is_news = old is None or old.holder != mark.holder
        if is_news and mark.holder != self.installation:
            log.warning(
                "namespace %s is served by another installation of the operator, %s: this one, %s, "
                "does nothing there. Give each installation its own watchNamespaces, or uninstall "
                "one.",
                namespace,
                mark.holder,
                self.installation,
            )
        return mark

    def _is_abandoned(self, namespace: str) -> bool:
        mark = self.marks[namespace]
        return not mark.holder or self.clock() - mark.changed > DURATION

    def _body(self, namespace: str, version: str = "") -> dict[str, Any]:
        metadata = {"name": MARK, "namespace": namespace}
        if version:
            metadata["resourceVersion"] = version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.installation,
                "leaseDurationSeconds": int(DURATION),
                "renewTime": datetime.now(UTC).isoformat(timespec="microseconds"),
            },
        }


def _holder(lease: Mapping[str, Any]) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")
