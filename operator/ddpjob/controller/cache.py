"""What the watches have shown, corrected by a periodic LIST. It never goes back: a stale answer changes nothing.

kopf does not report deletions that it missed while its stream was down, so a LIST removes what it does not contain,
unless that is newer than the LIST itself. Our own writes' responses enter too: a pass after a write sees the write.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob.core import names
from ddpjob.core.api import Job
from ddpjob.core.observe import Pod, owner_uid, read_pod

Dict = Mapping[str, Any]
Key = tuple[str, str]
"""(namespace, name) of a DDPJob."""


@dataclass(frozen=True, slots=True)
class SeenJob:
    job: Job
    version: int


@dataclass(frozen=True, slots=True)
class SeenPod:
    pod: Pod
    key: Key
    version: int


def version_of(obj: Dict) -> int:
    """resourceVersions of one API server compare as numbers."""
    return int(obj["metadata"]["resourceVersion"])


def key_of_job(job: Dict) -> Key:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def key_of_pod(pod: Dict) -> Key:
    metadata = pod["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(names.LABEL_JOB, "")


@dataclass
class Cache:
    """Jobs by key, pods by their owner's UID and own UID; `gone` remembers removed UIDs and the version they went at."""

    jobs: dict[Key, SeenJob] = field(default_factory=dict)
    pods: dict[str, dict[str, SeenPod]] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)

    def see_job(self, body: Dict) -> bool:
        """Whether that was news."""
        key, version, uid = key_of_job(body), version_of(body), body["metadata"]["uid"]
        old = self.jobs.get(key)
        if uid in self.gone or (old and old.version >= version):
            return False
        self.jobs[key] = SeenJob(Job.from_dict(body), version)
        return True

    def forget_job(self, body: Dict) -> bool:
        """A job's DELETED event."""
        key, uid = key_of_job(body), body["metadata"]["uid"]
        self.gone[uid] = version_of(body)
        old = self.jobs.get(key)
        if old is None or old.job.uid != uid:
            return False
        del self.jobs[key]
        return True

    def see_pod(self, body: Dict) -> bool:
        owner, pod, version = owner_uid(body), read_pod(body), version_of(body)
        if not owner or pod is None or pod.uid in self.gone:
            return False
        known = self.pods.setdefault(owner, {})
        old = known.get(pod.uid)
        if old and old.version >= version:
            return False
        known[pod.uid] = SeenPod(pod, key_of_pod(body), version)
        return old is None or old.pod != pod

    def forget_pod(self, body: Dict) -> bool:
        """A pod's DELETED event."""
        return self.drop_pod(owner_uid(body), body["metadata"]["uid"], version_of(body))

    def drop_pod(self, owner: str, uid: str, version: int = 0) -> bool:
        """A pod that is known to be gone: of its DELETED event, or since the API server does not find it."""
        known = self.pods.get(owner, {})
        seen = known.pop(uid, None)
        self.gone[uid] = max(version, seen.version if seen else 0)
        if not known:
            self.pods.pop(owner, None)
        return seen is not None

    def listed_jobs(self, bodies: Iterable[Dict], version: int, namespace: str | None) -> set[Key]:
        """What a LIST of jobs changes; returns the keys of the jobs that it showed to be gone."""
        there = set()
        for body in bodies:
            there.add(body["metadata"]["uid"])
            self.see_job(body)
        lost = {
            k for k, s in self.jobs.items() if s.version <= version and s.job.uid not in there and _in(k, namespace)
        }
        for key in lost:
            del self.jobs[key]
        return lost

    def listed_pods(self, bodies: Iterable[Dict], version: int, namespace: str | None) -> set[Key]:
        """What a LIST of pods changes; returns the keys of the jobs that lost a pod by it."""
        there = set()
        for body in bodies:
            there.add(body["metadata"]["uid"])
            self.see_pod(body)
        lost = [
            (owner, uid, seen)
            for owner, known in self.pods.items()
            for uid, seen in known.items()
            if seen.version <= version and uid not in there and _in(seen.key, namespace)
        ]
        for owner, uid, _ in lost:
            self.drop_pod(owner, uid, version)
        return {seen.key for _, _, seen in lost}

    def prune(self, version: int) -> None:
        """Forget removals older than a completed LIST of before: no answer that old is still under way."""
        self.gone = {uid: at for uid, at in self.gone.items() if at > version}

    def job(self, key: Key) -> SeenJob | None:
        return self.jobs.get(key)

    def pods_of(self, uid: str) -> list[Pod]:
        return [seen.pod for seen in self.pods.get(uid, {}).values()]


def _in(key: Key, namespace: str | None) -> bool:
    return namespace is None or key[0] == namespace
