"""The jobs, pods and Kubernetes nodes that the watches have shown, with their indices.

The cache holds what decisions need, not whole objects. The responses to the operator's own writes
enter it too, so the next look at a job sees them.
"""

import pickle
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ddpjob.controller.store import Seen, Store, namespace_of, uid_of, version_of
from ddpjob.core import names
from ddpjob.core.gangs import holds_room
from ddpjob.core.job import Job
from ddpjob.core.names import Phase, Reason
from ddpjob.core.nodes import read_node
from ddpjob.core.observe import Node, Pod
from ddpjob.core.pods import owner_uid, read_pod
from ddpjob.core.readers import Dict
from ddpjob.kube.kinds import JOBS, NODES, PODS, Kind

# (namespace, name) of a DDPJob.
Key = tuple[str, str]

# The reasons of gangs that may wait for each other.
CONTESTED = (Reason.QUOTA, Reason.UNSCHEDULABLE)


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job in a form that takes a fifth of the memory of a Job. It is unpacked at each look."""

    key: Key
    phase: str
    packed: bytes

    @classmethod
    def pack(cls, job: Job) -> "KeptJob":
        text = zlib.compress(pickle.dumps(job.for_decisions()), level=1)
        return cls((job.namespace, job.name), sys.intern(job.status.phase), text)

    def unpack(self) -> Job:
        return _unpack(self.packed)


# One look at a job unpacks it several times.
@lru_cache(maxsize=128)
def _unpack(packed: bytes) -> Job:
    # Only `pack` makes these bytes, so nobody else decides what is loaded.
    job: Job = pickle.loads(zlib.decompress(packed))
    return job


SeenJob = Seen[KeptJob]


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """A pod, the UID of its job, and the job's key."""

    pod: Pod
    owner: str
    key: Key


def key_of_job(body: Dict) -> Key:
    return namespace_of(body), str(body["metadata"]["name"])


def key_of_pod(body: Dict) -> Key:
    labels = body["metadata"].get("labels") or {}
    return namespace_of(body), str(labels.get(names.LABEL_JOB, ""))


def _read_job(body: Dict) -> KeptJob:
    return KeptJob.pack(Job.from_dict(body))


def _read_owned_pod(body: Dict) -> OwnedPod | None:
    """Return None for a pod without an owner, as after `kubectl delete --cascade=orphan`."""
    owner = owner_uid(body)
    pod = read_pod(body) if owner else None
    return OwnedPod(pod, owner, key_of_pod(body)) if pod else None


@dataclass
class Jobs(Store[KeptJob]):
    """Jobs, and an index by key. `incomplete` are the gangs that fit only in part."""

    by_key: dict[Key, SeenJob] = field(default_factory=dict)
    incomplete: dict[Key, Job] = field(default_factory=dict)

    def see(self, body: Dict) -> bool:
        known = self.by_key.get(key_of_job(body))
        if known and known.uid != uid_of(body):
            # Another job with this name. The newer one exists.
            if known.version >= version_of(body):
                return False
            self.drop(known.uid)
        return super().see(body)

    def _add(self, seen: SeenJob) -> None:
        kept = seen.value
        self.by_key[kept.key] = seen
        # Such a job is Pending. The others need not be unpacked.
        if kept.phase == Phase.PENDING:
            job = kept.unpack()
            if job.status.reason in CONTESTED:
                self.incomplete[kept.key] = job

    def _remove(self, seen: SeenJob) -> None:
        self.by_key.pop(seen.value.key, None)
        self.incomplete.pop(seen.value.key, None)


@dataclass
class Pods(Store[OwnedPod]):
    """Pods, with indices by their owner's UID and by their job's key."""

    by_owner: dict[str, dict[str, Pod]] = field(default_factory=dict)
    owners: dict[Key, set[str]] = field(default_factory=lambda: defaultdict(set))

    def _add(self, seen: Seen[OwnedPod]) -> None:
        owned = seen.value
        self.by_owner.setdefault(owned.owner, {})[seen.uid] = owned.pod
        self.owners[owned.key].add(owned.owner)

    def _remove(self, seen: Seen[OwnedPod]) -> None:
        owned = seen.value
        siblings = self.by_owner[owned.owner]
        del siblings[seen.uid]
        if not siblings:
            del self.by_owner[owned.owner]
            self.owners[owned.key].discard(owned.owner)
            if not self.owners[owned.key]:
                del self.owners[owned.key]


@dataclass
class Nodes(Store[Node]):
    """Kubernetes nodes, and an index by name."""

    by_name: dict[str, Node] = field(default_factory=dict)

    def _add(self, seen: Seen[Node]) -> None:
        self.by_name[seen.value.name] = seen.value

    def _remove(self, seen: Seen[Node]) -> None:
        self.by_name.pop(seen.value.name, None)


@dataclass
class Cache:
    """A store for each kind that is watched."""

    jobs: Jobs = field(default_factory=lambda: Jobs(_read_job))
    pods: Pods = field(default_factory=lambda: Pods(_read_owned_pod))
    nodes: Nodes = field(default_factory=lambda: Nodes(read_node))

    @property
    def stores(self) -> Mapping[Kind, Store[Any]]:
        return {JOBS: self.jobs, PODS: self.pods, NODES: self.nodes}

    def keys_of(self, kind: Kind, body: Dict) -> Iterable[Key]:
        """Return the keys of the jobs that an object concerns."""
        if kind == JOBS:
            return (key_of_job(body),)
        if kind == PODS:
            return (key_of_pod(body),)
        return self._keys_on_node(str(body["metadata"]["name"]))

    def _keys_on_node(self, name: str) -> set[Key]:
        owned = (seen.value for seen in self.pods.objects.values())
        return {pod.key for pod in owned if pod.pod.node_name == name}

    def job(self, key: Key) -> SeenJob | None:
        return self.jobs.by_key.get(key)

    def rivals_of(self, job: Job) -> Iterator[Job]:
        """Yield the jobs that may need the same room, and the one that `job` gives way to."""
        yielding = job.status.yielding
        if yielding:
            namespace, _, name = yielding.to.partition("/")
            older = self.job((namespace, name))
            if older:
                yield older.value.unpack()
        if yielding or job.status.reason in CONTESTED:
            for rival in self.jobs.incomplete.values():
                if holds_room(rival, self.pods_of(rival.uid)):
                    yield rival

    def pods_of(self, uid: str) -> list[Pod]:
        """Return the pods of the job with this UID."""
        return list(self.pods.by_owner.get(uid, {}).values())

    def pods_of_other_jobs(self, key: Key, uid: str) -> list[Pod]:
        """Return the pods that still run and belong to earlier jobs of the same name."""
        owners = self.pods.owners.get(key, set()) - {uid}
        return [pod for owner in owners for pod in self.pods_of(owner) if not pod.released]
