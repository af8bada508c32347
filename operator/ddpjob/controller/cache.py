"""Cache the jobs, pods and Kubernetes nodes from the watches, with indices.

The cache holds only the fields needed for decisions, not whole objects. The responses to the
operator's own writes enter it too, so the next look at a job sees them.
"""

import pickle
import sys
import zlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from ddpjob.controller.store import Seen, Store, namespace_of, uid_of, version_of
from ddpjob.core.api import names
from ddpjob.core.api.history import OlderGang
from ddpjob.core.api.job import Job
from ddpjob.core.api.kueue import Workload, job_of, read_workload, workload_of_place
from ddpjob.core.api.names import Identity
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.pod_groups import PodGroup, read_pod_group
from ddpjob.core.api.readers import Dict
from ddpjob.core.decide.gangs import Contests, older_gang, read_gang
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import Node, Nodes, Pod, Refusal
from ddpjob.core.observe.pods import read_pod
from ddpjob.kube.kinds import JOBS, NODES, POD_GROUPS, PODS, Kind

# (namespace, name) of a DDPJob.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A compressed job, in a fifth of the memory of a Job. It is unpacked at each look."""

    key: Key
    phase: str
    packed: bytes

    @classmethod
    def pack(cls, job: Job) -> "KeptJob":
        pickled = pickle.dumps(job.for_decisions())
        return cls(
            key=(job.namespace, job.name),
            phase=sys.intern(job.status.phase),
            packed=zlib.compress(pickled, level=1),
        )

    def unpack(self) -> Job:
        return _unpack(self.packed)


# One look at a job unpacks it several times.
@lru_cache(maxsize=128)
def _unpack(packed: bytes) -> Job:
    # Only `pack` makes these bytes, so loading them is safe.
    pickled = zlib.decompress(packed)
    job: Job = pickle.loads(pickled)
    return job


SeenJob = Seen[KeptJob]


def identity_of(job: SeenJob) -> Identity:
    namespace, name = job.value.key
    return Identity(namespace, name, job.uid)


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """A pod, and the job that controls it."""

    pod: Pod
    owner: Identity

    @property
    def key(self) -> Key:
        return key_of(self.owner)


def key_of(job: Identity) -> Key:
    return job.namespace, job.name


def place_of(namespace: str) -> str:
    """Return the key by which a LIST sorts namespaces: `a-b` comes before `a`, as in etcd's keys.

    No namespace has a place before that of an empty name.
    """
    return f"{namespace}/"


def key_of_job(body: Dict) -> Key:
    name = body["metadata"]["name"]
    return namespace_of(body), str(name)


def key_of_pod(body: Dict) -> Key:
    """Return the key of the job in a pod's label. It is only a hint: any pod can have the label."""
    labels = body["metadata"].get("labels") or {}
    name = labels.get(names.LABEL_JOB, "")
    return namespace_of(body), str(name)


def _read_job(body: Dict) -> KeptJob:
    job = Job.from_dict(body)
    return KeptJob.pack(job)


def _read_owned_pod(body: Dict) -> OwnedPod | None:
    """Return None for a pod without an owner, as after `kubectl delete --cascade=orphan`."""
    owner = owner_of(body)
    if not owner:
        return None
    pod = read_pod(body)
    return OwnedPod(pod, owner) if pod else None


@dataclass
class Jobs(Store[KeptJob]):
    """Jobs, and an index by key.

    `contests` has the jobs that fit only in part, as of their last look.
    """

    by_key: dict[Key, SeenJob] = field(default_factory=dict)
    contests: Contests = field(default_factory=Contests)
    # The places of the namespaces with jobs, sorted.
    _places: list[str] = field(default_factory=list)

    def see(self, body: Dict) -> bool:
        known = self.by_key.get(key_of_job(body))
        if known and known.uid != uid_of(body):
            # Another job with this name. The newer one exists.
            if known.version >= version_of(body):
                return False
            self.drop(known.uid)
        return super().see(body)

    def _read_again(self, body: Dict, old: KeptJob) -> KeptJob:
        known = old.unpack()
        job = known.reread(body)
        return old if job == known else KeptJob.pack(job)

    def _add(self, seen: SeenJob) -> None:
        self.by_key[seen.value.key] = seen
        place = place_of(seen.namespace)
        number = bisect_left(self._places, place)
        if self._places[number : number + 1] != [place]:
            insort(self._places, place)

    def _remove(self, seen: SeenJob) -> None:
        if seen.namespace not in self.namespaces:
            del self._places[bisect_left(self._places, place_of(seen.namespace))]
        key = seen.value.key
        # Another job may have the name by now.
        if self.by_key.get(key) is seen:
            del self.by_key[key]

    def drop(self, uid: str, version: int = 0) -> bool:
        seen = self.objects.get(uid)
        if seen:
            self.contests.forget(identity_of(seen))
        return super().drop(uid, version)

    def keys_in(self, namespace: str | None) -> list[Key]:
        """Return the keys of the jobs of a namespace, or of all."""
        return [self.objects[uid].value.key for uid in self._uids(namespace)]

    def keys_between(self, first: str, last: str) -> list[Key]:
        """Return the keys of the jobs of the namespaces from `first` on and before `last`.

        The order is that of a LIST.
        """
        begin, end = (bisect_left(self._places, place_of(name)) for name in (first, last))
        keys = []
        for place in self._places[begin:end]:
            keys += self.keys_in(place.rstrip("/"))
        return keys


@dataclass
class Pods(Store[OwnedPod]):
    """Pods, with indices by their owner, by their owner's key, and by Kubernetes node."""

    by_owner: dict[Identity, dict[str, Pod]] = field(default_factory=dict)
    owners: dict[Key, set[Identity]] = field(default_factory=lambda: defaultdict(set))
    by_node: dict[str, dict[str, Key]] = field(default_factory=lambda: defaultdict(dict))

    def _add(self, seen: Seen[OwnedPod]) -> None:
        owned = seen.value
        siblings = self.by_owner.setdefault(owned.owner, {})
        siblings[seen.uid] = owned.pod
        self.owners[owned.key].add(owned.owner)
        node_name = owned.pod.node_name
        if node_name:
            self.by_node[node_name][seen.uid] = owned.key

    def _remove(self, seen: Seen[OwnedPod]) -> None:
        owned = seen.value
        node_name = owned.pod.node_name
        on_node = self.by_node.get(node_name, {})
        on_node.pop(seen.uid, None)
        if not on_node:
            self.by_node.pop(node_name, None)
        siblings = self.by_owner[owned.owner]
        del siblings[seen.uid]
        if not siblings:
            self._remove_owner(owned)

    def _remove_owner(self, owned: OwnedPod) -> None:
        del self.by_owner[owned.owner]
        owners = self.owners[owned.key]
        owners.discard(owned.owner)
        if not owners:
            del self.owners[owned.key]


Owned = TypeVar("Owned", Workload, PodGroup)


@dataclass
class OfJobs(Store[Owned]):
    """Objects owned by jobs, with an index by the key of the job."""

    by_key: dict[Key, dict[str, Owned]] = field(default_factory=lambda: defaultdict(dict))

    def _add(self, seen: Seen[Owned]) -> None:
        key = _key_of_owner(seen.value)
        self.by_key[key][seen.uid] = seen.value

    def _remove(self, seen: Seen[Owned]) -> None:
        key = _key_of_owner(seen.value)
        siblings = self.by_key[key]
        del siblings[seen.uid]
        if not siblings:
            del self.by_key[key]

    def of(self, job: Identity) -> tuple[Owned, ...]:
        """Return the objects of a job, without those of another job of the same name."""
        by_uid = self.by_key.get(key_of(job), {})
        return tuple(one for one in by_uid.values() if one.job_uid == job.uid)


def _is_there(body: Dict) -> bool | None:
    is_deleting = bool(body["metadata"].get("deletionTimestamp"))
    return None if is_deleting else True


def _key_of_owner(owned: Workload | PodGroup) -> Key:
    return owned.namespace, owned.job_name


@dataclass
class NodeStore(Store[Node]):
    """Kubernetes nodes, and an index by name."""

    by_name: Nodes = field(default_factory=Nodes)

    def _add(self, seen: Seen[Node]) -> None:
        self.by_name.put(seen.value)

    def _remove(self, seen: Seen[Node]) -> None:
        name = seen.value.name
        known = self.by_name.get(name)
        # Another node may have registered under the name by now.
        if known and known.uid == seen.uid:
            self.by_name.pop(name)

    def correct(self, name: str, body: Dict | None) -> Node | None:
        """Store the node of a name as it was just read, or its absence, and return it.

        `by_name` then leads to this node, even if the watch has reported only an earlier one.
        """
        if body is not None:
            self.restore(body)
            seen = self.objects[uid_of(body)]
            self.by_name.put(seen.value)
        elif name in self.by_name:
            gone = self.by_name.pop(name)
            self.drop(gone.uid)
        return self.by_name.get(name)


def _pod_group_stores() -> Mapping[str, OfJobs[PodGroup]]:
    return {backend: OfJobs(read_pod_group) for backend in POD_GROUPS}


@dataclass
class Cache:
    """A store for each watched kind."""

    jobs: Jobs = field(default_factory=lambda: Jobs(_read_job))
    pods: Pods = field(default_factory=lambda: Pods(_read_owned_pod))
    nodes: NodeStore = field(default_factory=lambda: NodeStore(read_node))
    workloads: OfJobs[Workload] = field(default_factory=lambda: OfJobs(read_workload))
    # Of each LocalQueue for jobs without a queue, only its existence is kept.
    default_queues: Store[bool] = field(default_factory=lambda: Store(_is_there))
    # By the names of their backends. Each kind has versions of its own.
    pod_groups: Mapping[str, OfJobs[PodGroup]] = field(default_factory=_pod_group_stores)

    @property
    def stores(self) -> Mapping[Kind, Store[Any]]:
        return {
            JOBS: self.jobs,
            PODS: self.pods,
            NODES: self.nodes,
        }

    def keys_of(self, kind: Kind, body: Dict) -> Iterable[Key]:
        """Return the keys of the jobs to look at after a change of an object."""
        if kind == JOBS:
            return (key_of_job(body),)
        if kind == PODS:
            keys = {key_of_pod(body)}
            owner = owner_of(body)
            if owner:
                keys.add(key_of(owner))
            return keys
        node_name = body["metadata"]["name"]
        on_node = self.pods.by_node.get(node_name, {})
        return set(on_node.values())

    @staticmethod
    def key_of_owned(body: Dict) -> Key | None:
        """Return the key of the job that owns an object of an extension, or None."""
        owner = job_of(body)
        return key_of(owner) if owner else None

    def workloads_of(self, job: Identity) -> tuple[Workload, ...]:
        return self.workloads.of(job)

    def pod_groups_of(self, job: Identity) -> tuple[PodGroup, ...]:
        groups: list[PodGroup] = []
        for store in self.pod_groups.values():
            groups += store.of(job)
        return tuple(groups)

    def workload_of(self, job: Job) -> Workload | None:
        """Return the Workload of the job's present place, or None."""
        place = job.status.place
        found = self.workloads_of(job.identity)
        return workload_of_place(found, job.identity, place.number, place.uid)

    def orphans_of(self, key: Key) -> list[Workload]:
        """Return the Workloads of removed jobs of this name, with the operator's finalizer."""
        seen = self.job(key)
        uid = seen.uid if seen else ""
        by_uid = self.workloads.by_key.get(key, {})
        others = [one for one in by_uid.values() if one.job_uid != uid]
        return [one for one in others if one.held]

    def job(self, key: Key) -> SeenJob | None:
        return self.jobs.by_key.get(key)

    def older_gang_of(self, job: Job, refusal: Refusal | None) -> OlderGang | None:
        """Return the older job to give way to, if any, and remember what `job` lacks."""
        contests = self.jobs.contests
        pods = self.pods_of(job.identity)
        gang = read_gang(job, pods, refusal)
        contests.see(gang)
        contender = contests.in_the_way_of(gang)
        return older_gang(job, contender, self._yielded_to(job))

    def _yielded_to(self, job: Job) -> Job | None:
        """Return the job for which `job` has given its pods back, or None."""
        yielding = job.status.attempt.yielding
        if not yielding:
            return None
        older = self.jobs.objects.get(yielding.to)
        return older.value.unpack() if older else None

    def pods_of(self, job: Identity) -> list[Pod]:
        by_uid = self.pods.by_owner.get(job, {})
        return list(by_uid.values())

    def pods_of_earlier_jobs(self, job: Identity) -> list[Pod]:
        """Return the running pods of other jobs of the same name."""
        owners = self.pods.owners.get(key_of(job), set())
        running = []
        for owner in owners - {job}:
            for pod in self.pods_of(owner):
                if not pod.released:
                    running.append(pod)
        return running
