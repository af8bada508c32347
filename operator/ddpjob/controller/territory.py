"""Which namespaces this installation serves.

Two installations may watch the same namespace by mistake, each with a leader of its own. So each
installation marks the namespaces in which it finds jobs by a Lease there. The first one serves the
namespace. Another one does nothing there, until the mark has not been renewed for a while.

A rolling upgrade has one installation with several processes, which have the same mark.
"""

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ddpjob.controller.writer import Writer
from ddpjob.core import names
from ddpjob.kube.errors import ApiError, CallFailed, Unreachable
from ddpjob.kube.kinds import LEASES

log = logging.getLogger(__name__)

MARK = names.INSTALLATION_LEASE

# Seconds after which a mark is renewed, or read again, and after which it no longer counts.
RENEW_AFTER = 60.0
CHECK_AFTER = 20.0
DURATION = 180.0


@dataclass
class Mark:
    """What is known of the mark of one namespace, with monotonic times.

    - `uid`: the UID of the Lease.
    - `holder`: the installation that serves the namespace.
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
    """

    writer: Writer
    installation: str
    clock: Callable[[], float]
    marks: dict[str, Mark] = field(default_factory=dict)
    # Until when the mark of a namespace is not tried again, in monotonic seconds.
    _unmarkable_until: dict[str, float] = field(default_factory=dict)
    _claiming: set[str] = field(default_factory=set)

    async def serves(self, namespace: str) -> bool | None:
        """Return True if this installation serves the namespace. Raises LeaseLost.

        Returns None while that is not known, because the mark cannot be read, or while another look
        finds it out: the looks at several jobs of a namespace write its mark only once. They do not
        wait for it, because a webhook may hang.
        """
        mark = self.marks.get(namespace)
        age = self.clock() - mark.checked if mark else float("inf")
        is_own = mark is not None and mark.holder == self.installation
        if age < (RENEW_AFTER if is_own else CHECK_AFTER):
            return is_own
        if self.clock() < self._unmarkable_until.get(namespace, 0.0):
            return True
        known = is_own if mark is not None and age < DURATION else None
        if namespace in self._claiming:
            return known
        self._claiming.add(namespace)
        try:
            found = await self.writer.get(LEASES.path(namespace, MARK))
        except Unreachable as error:
            # The mark may be that of another installation.
            log.debug("cannot read the mark of namespace %s: %s", namespace, error)
            return known
        except ApiError as error:
            return self._serve_without_mark(namespace, error)
        else:
            return await self._claim(namespace, found)
        finally:
            self._claiming.discard(namespace)

    def why_not(self, namespace: str) -> str:
        """Return why this installation does nothing in a namespace that it does not serve."""
        mark = self.marks.get(namespace)
        return (
            f"the Lease {MARK} of this namespace names another installation of the operator, "
            f"{mark.holder if mark else 'which has just written it'}: {self.installation} does "
            f"nothing here, and takes over {DURATION:.0f} s after that Lease was last renewed. If "
            "that installation does not exist any more, nothing else is to be done; else give each "
            "installation its own watchNamespaces, or uninstall one"
        )

    def uid_of_mark(self, namespace: str) -> str:
        """Return the UID of the Lease of a namespace; empty if it cannot be read or written."""
        mark = self.marks.get(namespace)
        return mark.uid if mark else ""

    def forget_others(self, namespaces: Set[str]) -> None:
        """Forget the marks of all namespaces but these, which have jobs."""
        self.marks = {name: mark for name, mark in self.marks.items() if name in namespaces}
        self._unmarkable_until = {
            name: until for name, until in self._unmarkable_until.items() if name in namespaces
        }

    async def _claim(self, namespace: str, found: Mapping[str, Any] | None) -> bool:
        """Write the mark that was read if it is this installation's or nobody's any more."""
        try:
            if found is None:
                made = await self.writer.write(
                    "POST", LEASES.collection(namespace), self._body(namespace)
                )
                self._see(namespace, made)
            elif self._see(namespace, found).holder == self.installation:
                await self._renew(namespace, found)
            elif self._is_abandoned(namespace):
                log.info("serving namespace %s, which %s has left", namespace, _holder(found))
                await self._renew(namespace, found)
        except CallFailed as error:
            return self._serve_without_mark(namespace, error)
        return self.marks[namespace].holder == self.installation

    def _serve_without_mark(self, namespace: str, error: CallFailed) -> bool:
        """Return True if the namespace is served although its mark cannot be read or written.

        Without the right to mark, in a namespace that ends, or if a webhook refuses the mark,
        nothing can be detected. The jobs must not wait for that.
        """
        if isinstance(error, ApiError) and error.status == 409:
            # Another installation was faster.
            return False
        mark = self.marks.get(namespace)
        if mark and mark.holder not in ("", self.installation):
            return False
        log.debug("cannot mark namespace %s: %s", namespace, error)
        self._unmarkable_until[namespace] = self.clock() + RENEW_AFTER
        return True

    async def _renew(self, namespace: str, found: Mapping[str, Any]) -> None:
        body = self._body(namespace, str(found["metadata"]["resourceVersion"]))
        written = await self.writer.write("PUT", LEASES.path(namespace, MARK), body)
        self._see(namespace, written)

    def _see(self, namespace: str, lease: Mapping[str, Any]) -> Mark:
        now = self.clock()
        old = self.marks.get(namespace)
        version = str(lease["metadata"]["resourceVersion"])
        changed = old.changed if old and old.version == version else now
        mark = Mark(str(lease["metadata"]["uid"]), _holder(lease), version, changed, now)
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
        self.marks[namespace] = mark
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
