"""Store the objects of one kind, from watches and corrected by LISTs.

A store ignores an answer that is older than its own version of an object. kopf does not report
deletions during a gap of its stream. So after a LIST, the store removes the unlisted objects,
except those newer than the LIST.

Versions are compared only within one kind: an API server may keep each kind in another etcd.
"""

from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ddpjob.core.api.readers import Dict

Value = TypeVar("Value")


def version_of(body: Dict) -> int:
    """Return a resourceVersion. Within one kind, it compares as a number."""
    return int(body["metadata"]["resourceVersion"])


def uid_of(body: Dict) -> str:
    return str(body["metadata"]["uid"])


def namespace_of(body: Dict) -> str:
    """Return the namespace of an object; empty for an object of the whole cluster."""
    return str(body["metadata"].get("namespace", ""))


@dataclass(frozen=True, slots=True)
class Seen(Generic[Value]):
    """The fields of an object needed for decisions, and its resourceVersion."""

    value: Value
    uid: str
    namespace: str
    version: int


@dataclass
class Store(Generic[Value]):
    """Objects by UID. `read` returns the value to keep of one, or None if it is of no interest.

    `gone` has the UIDs of removed objects, with the version at which each was removed. A subclass
    keeps its indices in `_add` and `_remove`. In `_read_again`, it may read a newer version of an
    object with the help of the old value.
    """

    read: Callable[[Dict], Value | None]
    objects: dict[str, Seen[Value]] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    # The UIDs of the objects of each namespace. Those without objects are left out.
    _of_namespace: dict[str, set[str]] = field(
        init=False, repr=False, default_factory=lambda: defaultdict(set)
    )

    def see(self, body: Dict) -> bool:
        """Store an object. Return True if its known value changes."""
        uid = uid_of(body)
        version = version_of(body)
        old = self.objects.get(uid)
        if uid in self.gone or (old and old.version >= version):
            return False
        value = self._read_again(body, old.value) if old else self.read(body)
        if value is None:
            return self.drop(uid, version) if old else False
        seen = Seen(value, uid, namespace_of(body), version)
        if old:
            self._remove(old)
        self.objects[uid] = seen
        self._of_namespace[seen.namespace].add(uid)
        self._add(seen)
        return old is None or old.value != value

    def forget(self, body: Dict) -> bool:
        """Remove an object after its DELETED event. Return True if it was known."""
        return self.drop(uid_of(body), version_of(body))

    def drop(self, uid: str, version: int = 0) -> bool:
        """Remove an object that no longer exists. Return True if it was known."""
        seen = self.objects.pop(uid, None)
        self.gone[uid] = max(version, seen.version if seen else 0)
        if seen is None:
            return False
        uids = self._of_namespace[seen.namespace]
        uids.discard(uid)
        if not uids:
            del self._of_namespace[seen.namespace]
        self._remove(seen)
        return True

    def restore(self, body: Dict) -> bool:
        """Store an object even if it was removed before. Return True if it is of interest."""
        uid = uid_of(body)
        self.gone.pop(uid, None)
        self.see(body)
        return uid in self.objects

    @property
    def namespaces(self) -> Set[str]:
        """Return the namespaces with objects."""
        return self._of_namespace.keys()

    def count(self, namespace: str | None) -> int:
        """Return how many objects a namespace has, or all namespaces together."""
        return len(self._uids(namespace))

    def drop_unlisted(self, listed: Set[str], version: int, namespace: str | None) -> int:
        """Remove the objects that a complete LIST at `version` does not contain.

        Return the number of removed objects. `listed` are the UIDs in the LIST. `namespace` is None
        for a LIST of all namespaces.
        """
        gone = [
            uid
            for uid in self._uids(namespace)
            if uid not in listed and self.objects[uid].version <= version
        ]
        for uid in gone:
            self.drop(uid, version)
        return len(gone)

    def prune(self, version: int) -> None:
        """Forget removals up to the version of the LIST before the last.

        Answers of that age can no longer arrive.
        """
        self.gone = {uid: at for uid, at in self.gone.items() if at > version}

    def _uids(self, namespace: str | None) -> Set[str]:
        """Return the UIDs of the objects of a namespace, or of all."""
        if namespace is None:
            return self.objects.keys()
        return self._of_namespace.get(namespace, frozenset())

    def _read_again(self, body: Dict, old: Value) -> Value | None:
        return self.read(body)

    def _add(self, seen: Seen[Value]) -> None: ...

    def _remove(self, seen: Seen[Value]) -> None: ...
