"""What the watches have shown, corrected by a periodic LIST. It never goes back: a stale answer changes nothing.

kopf does not report deletions that it missed while its stream was down, so a LIST removes what it does not contain,
unless that is newer than the LIST itself. Our own writes' responses enter too: a pass after a write sees the write.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from ddpjob.core import names
from ddpjob.core.job import Job
from ddpjob.core.observe import Pod
from ddpjob.core.pods import owner_uid, read_pod

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
        return self.drop_job(key_of_job(body), body["metadata"]["uid"], version_of(body))

    def drop_job(self, key: Key, uid: str, version: int = 0) -> bool:
        """A job that is known to be gone: of its DELETED event, or since the API server does not find it."""
        seen = self.jobs.get(key)
        ours = seen is not None and seen.job.uid == uid
        self.gone[uid] = max(version, seen.version if seen and ours else 0)
        if ours:
            del self.jobs[key]
        return ours

    def see_pod(self, body: Dict) -> bool:
        owner, uid, version = owner_uid(body), body["metadata"]["uid"], version_of(body)
        if not owner:
            return self._drop_orphan(uid, version)
        old = self.pods.get(owner, {}).get(uid)
        if uid in self.gone or (old and old.version >= version):
            return False
        pod = read_pod(body)
        if pod is None:
            return False
        self.pods.setdefault(owner, {})[uid] = SeenPod(pod, key_of_pod(body), version)
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

    def _drop_orphan(self, uid: str, version: int) -> bool:
        """A pod that lost its job (`kubectl delete --cascade=orphan`) is nobody's any more."""
        owner = next((owner for owner, known in self.pods.items() if uid in known), None)
        return owner is not None and self.drop_pod(owner, uid, version)

    def find_pod(self, body: Dict) -> bool:
        """A pod that was taken for gone, but the API server shows it; whether it is one of ours still."""
        uid = body["metadata"]["uid"]
        self.gone.pop(uid, None)
        self.see_pod(body)
        return uid in self.pods.get(owner_uid(body), {})

    def keep_jobs(self, there: Set[str], version: int, namespace: str | None) -> None:
        """Drops the jobs that a complete LIST showed to be gone; `there` are the UIDs that it contained."""
        for key, seen in list(self.jobs.items()):
            if seen.version <= version and seen.job.uid not in there and _in(key, namespace):
                self.drop_job(key, seen.job.uid, version)

    def keep_pods(self, there: Set[str], version: int, namespace: str | None) -> None:
        """Drops the pods that a complete LIST showed to be gone; `there` are the UIDs that it contained."""
        every = [(owner, seen) for owner, known in self.pods.items() for seen in known.values()]
        for owner, seen in every:
            if seen.version <= version and seen.pod.uid not in there and _in(seen.key, namespace):
                self.drop_pod(owner, seen.pod.uid, version)

    def prune(self, version: int) -> None:
        """Forgets removals up to the version of the LIST before the last: no answer that old is still under way."""
        self.gone = {uid: at for uid, at in self.gone.items() if at > version}

    def job(self, key: Key) -> SeenJob | None:
        return self.jobs.get(key)

    def pods_of(self, uid: str) -> list[Pod]:
        return [seen.pod for seen in self.pods.get(uid, {}).values()]

    def left_by_another(self, key: Key, uid: str) -> Pod | None:
        """A pod of an earlier job of this name that may still train."""
        others = (known for owner, known in self.pods.items() if owner != uid)
        of_this_name = (
            known for known in others if next(iter(known.values())).key == key
        )  # all of an owner have one
        return next(
            (
                seen.pod
                for known in of_this_name
                for seen in known.values()
                if not seen.pod.released
            ),
            None,
        )


def _in(key: Key, namespace: str | None) -> bool:
    return namespace is None or key[0] == namespace
