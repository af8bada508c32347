"""The jobs and pods that the watches have shown, corrected by a periodic LIST.

The cache ignores an answer that is older than its own version of an object. kopf does not report
deletions that it missed while its stream was down. So after a LIST, the cache removes objects that
the LIST does not contain, except objects that are newer than the LIST. The responses to the
operator's own writes enter the cache too, so the next look at a job sees them.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from ddpjob.core import names
from ddpjob.core.job import Job
from ddpjob.core.observe import Pod
from ddpjob.core.pods import owner_uid, read_pod
from ddpjob.core.readers import Dict

# (namespace, name) of a DDPJob.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A job and the resourceVersion at which it was seen."""

    job: Job
    version: int


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A pod, the key of its job, and the resourceVersion at which it was seen."""

    pod: Pod
    key: Key
    version: int


def version_of(body: Dict) -> int:
    """Return a resourceVersion, which compares as a number within one API server."""
    return int(body["metadata"]["resourceVersion"])


def uid_of(body: Dict) -> str:
    return str(body["metadata"]["uid"])


def key_of_job(job: Dict) -> Key:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def key_of_pod(pod: Dict) -> Key:
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    return metadata["namespace"], labels.get(names.LABEL_JOB, "")


@dataclass
class Cache:
    """Jobs by key, and pods by the UID of their owner and their own UID.

    `gone` has the UIDs of removed objects, with the version at which each was removed.
    """

    jobs: dict[Key, SeenJob] = field(default_factory=dict)
    pods: dict[str, dict[str, SeenPod]] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)

    # Jobs

    def job(self, key: Key) -> SeenJob | None:
        return self.jobs.get(key)

    def see_job(self, body: Dict) -> bool:
        """Take in a job. Return True if it is newer than what was known."""
        key = key_of_job(body)
        version = version_of(body)
        old = self.jobs.get(key)
        if uid_of(body) in self.gone or (old and old.version >= version):
            return False
        self.jobs[key] = SeenJob(Job.from_dict(body), version)
        return True

    def forget_job(self, body: Dict) -> bool:
        """Remove a job after its DELETED event. Return True if it was known."""
        return self.drop_job(key_of_job(body), uid_of(body), version_of(body))

    def drop_job(self, key: Key, uid: str, version: int = 0) -> bool:
        """Remove a job that does not exist any more. Return True if it was known."""
        seen = self.jobs.get(key)
        if seen is None or seen.job.uid != uid:
            self.gone[uid] = version
            return False
        self.gone[uid] = max(version, seen.version)
        del self.jobs[key]
        return True

    def drop_unlisted_jobs(self, listed: Set[str], version: int, namespace: str | None) -> None:
        """Remove the jobs that a complete LIST at `version` does not contain.

        `listed` are the UIDs in the LIST. `namespace` is None for a LIST of all namespaces.
        """
        for key, seen in list(self.jobs.items()):
            is_older = seen.version <= version
            if is_older and seen.job.uid not in listed and _is_in(key, namespace):
                self.drop_job(key, seen.job.uid, version)

    # Pods

    def pods_of(self, uid: str) -> list[Pod]:
        """Return the pods of the job with this UID."""
        return [seen.pod for seen in self.pods.get(uid, {}).values()]

    def pod_of_another_job(self, key: Key, uid: str) -> Pod | None:
        """Return a pod that still runs and belongs to an earlier job of the same name."""
        for owner, owned in self.pods.items():
            # All pods of an owner have the same key.
            first = next(iter(owned.values()))
            if owner == uid or first.key != key:
                continue
            for seen in owned.values():
                if not seen.pod.released:
                    return seen.pod
        return None

    def see_pod(self, body: Dict) -> bool:
        """Take in a pod. Return True if that changes what is known of it."""
        owner = owner_uid(body)
        uid = uid_of(body)
        version = version_of(body)
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

    def restore_pod(self, body: Dict) -> bool:
        """Take in a pod that was thought to be gone. Return True if it belongs to a job."""
        uid = uid_of(body)
        self.gone.pop(uid, None)
        self.see_pod(body)
        return uid in self.pods.get(owner_uid(body), {})

    def forget_pod(self, body: Dict) -> bool:
        """Remove a pod after its DELETED event. Return True if it was known."""
        return self.drop_pod(owner_uid(body), uid_of(body), version_of(body))

    def drop_pod(self, owner: str, uid: str, version: int = 0) -> bool:
        """Remove a pod that does not exist any more. Return True if it was known."""
        owned = self.pods.get(owner, {})
        seen = owned.pop(uid, None)
        self.gone[uid] = max(version, seen.version if seen else 0)
        if not owned:
            self.pods.pop(owner, None)
        return seen is not None

    def drop_unlisted_pods(self, listed: Set[str], version: int, namespace: str | None) -> None:
        """Remove the pods that a complete LIST at `version` does not contain."""
        unlisted = []
        for owner, owned in self.pods.items():
            for uid, seen in owned.items():
                is_older = seen.version <= version
                if is_older and uid not in listed and _is_in(seen.key, namespace):
                    unlisted.append((owner, uid))
        for owner, uid in unlisted:
            self.drop_pod(owner, uid, version)

    def _drop_orphan(self, uid: str, version: int) -> bool:
        """Remove a pod that lost its owner, as by `kubectl delete --cascade=orphan`."""
        for owner, owned in self.pods.items():
            if uid in owned:
                return self.drop_pod(owner, uid, version)
        return False

    def prune(self, version: int) -> None:
        """Forget removals up to the version of the LIST before the last.

        Answers of that age can no longer arrive.
        """
        self.gone = {uid: at for uid, at in self.gone.items() if at > version}


def _is_in(key: Key, namespace: str | None) -> bool:
    return namespace is None or key[0] == namespace
