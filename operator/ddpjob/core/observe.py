"""What a cluster shows of a job: pods as dicts in, an Observation out. Total: any pod state that exists can be read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any

from ddpjob.core import names
from ddpjob.core.api import Job, time_from_text

Dict = Mapping[str, Any]


class Fate(StrEnum):
    """How far the container `trainer` came; the pod's own phase may lag behind it for ever (a sidecar that never ends)."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that happened to a pod: one word, a sentence, and since when if that is known."""

    reason: str
    message: str
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """One node of an attempt, as far as deciding needs it.

    `released`: nothing of the pod runs any more. A kubelet reports the containers' ends before the pod's phase.
    `disruption`: a sign that somebody or something took the pod away, whatever its trainer did.
    `blocked`: what keeps a pending pod from starting.
    """

    name: str
    uid: str
    attempt: int
    index: int
    fate: Fate
    node: str = ""
    released: bool = False
    deleting: bool = False
    started: bool = False
    disruption: Sign | None = None
    blocked: Sign | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    message: str = ""
    finished: datetime | None = None

    @property
    def ended(self) -> bool:
        return self.fate in (Fate.SUCCEEDED, Fate.FAILED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's answer to the last attempt at creating something: why, and when to try again.

    `final`: the same request can never succeed (it was invalid).
    """

    reason: str
    message: str
    retry_at: datetime
    final: bool = False


@dataclass(frozen=True)
class Observation:
    """A job and every pod it owns, in the order of attempt and index."""

    job: Job
    pods: tuple[Pod, ...] = ()
    refusal: Refusal | None = None

    @property
    def attempt(self) -> int:
        return self.job.status.attempt or 0

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        return tuple(p for p in self.pods if p.attempt == self.attempt)

    @cached_property
    def older(self) -> tuple[Pod, ...]:
        return tuple(p for p in self.pods if p.attempt < self.attempt)

    @property
    def job_is_stale(self) -> bool:
        """Pods of an attempt that the job's status does not know yet: a newer status must exist."""
        newest = self.job.status.attempt if self.job.status.attempt is not None else -1
        return any(p.attempt > newest for p in self.pods)

    @property
    def latched(self) -> bool:
        started = self.job.status.attempt_started
        return started is not None and started >= self.attempt

    @cached_property
    def succeeded(self) -> frozenset[int]:
        """Indices of the current attempt whose trainer ended well, also where the pod is gone since."""
        return frozenset(self.job.status.succeeded_nodes) | {
            p.index for p in self.current if p.fate is Fate.SUCCEEDED
        }

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the current attempt without a pod, though they still need one."""
        there = {p.index for p in self.current} | self.succeeded
        return tuple(i for i in range(self.job.status.nodes.desired) if i not in there)


def observe(job: Job, pods: Iterable[Pod], refusal: Refusal | None = None) -> Observation:
    return Observation(job, tuple(sorted(pods, key=lambda p: (p.attempt, p.index))), refusal)


def owner_uid(pod: Dict) -> str:
    """The UID of the DDPJob that controls a pod (or Service), or an empty text."""
    for owner in _items(_map(pod, "metadata"), "ownerReferences"):
        if owner.get("controller") and owner.get("kind") == names.KIND:
            return str(owner.get("uid", ""))
    return ""


def read_pod(pod: Dict) -> Pod | None:
    """A pod of ours; None where its labels say neither attempt nor index."""
    metadata, spec, status = _map(pod, "metadata"), _map(pod, "spec"), _map(pod, "status")
    labels = _map(metadata, "labels")
    attempt, index = (
        str(labels.get(names.LABEL_ATTEMPT, "")),
        str(labels.get(names.LABEL_INDEX, "")),
    )
    if not attempt.isdecimal() or not index.isdecimal():
        return None
    state = _trainer_state(status)
    terminated = _map(state, "terminated") if "terminated" in state else _failed_init(status)
    phase = status.get("phase")
    fate = Fate.FAILED if terminated and "terminated" not in state else _fate(phase, state)
    return Pod(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        attempt=int(attempt),
        index=int(index),
        fate=fate,
        node=str(spec.get("nodeName") or ""),
        released=phase in ("Succeeded", "Failed")
        or (terminated is not None and not _others_left(status)),
        deleting=bool(metadata.get("deletionTimestamp")),
        started="terminated" in state or "running" in state,
        disruption=None if fate is Fate.SUCCEEDED else _disruption(metadata, status, terminated),
        blocked=_blocked(status, state) if fate is Fate.PENDING else None,
        exit_code=_exit_code(terminated),
        exit_reason=str((terminated or {}).get("reason") or ""),
        message=str((terminated or {}).get("message") or ""),
        finished=time_from_text((terminated or {}).get("finishedAt")),
    )


def _map(data: Any, key: str) -> Dict:
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _items(data: Dict, key: str) -> Sequence[Dict]:
    value = data.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _exit_code(terminated: Dict | None) -> int | None:
    code = (terminated or {}).get("exitCode")
    return code if isinstance(code, int) else None


def _others_left(status: Dict) -> bool:
    """Whether a container beside the trainer (a sidecar) has not ended. A kubelet ends those of initContainers itself."""
    others = [c for c in _items(status, "containerStatuses") if c.get("name") != names.TRAINER]
    return any("terminated" not in _map(c, "state") for c in others)


def _failed_init(status: Dict) -> Dict | None:
    """The end of an init container that failed: the trainer will never start, by nobody's fault but the job's."""
    for container in _items(status, "initContainerStatuses"):
        terminated = _map(_map(container, "state"), "terminated")
        if status.get("phase") == "Failed" and terminated.get("exitCode"):
            said = str(terminated.get("message") or "")
            return {
                **terminated,
                "reason": "InitFailed",
                "message": f"init container {container.get('name')}: {said}",
            }
    return None


def _trainer_state(status: Dict) -> Dict:
    containers = _items(status, "containerStatuses")
    return next((_map(c, "state") for c in containers if c.get("name") == names.TRAINER), {})


def _fate(phase: Any, state: Dict) -> Fate:
    if "terminated" in state:
        return Fate.SUCCEEDED if _map(state, "terminated").get("exitCode") == 0 else Fate.FAILED
    if phase in (
        "Failed",
        "Succeeded",
    ):  # the trainer's own end was never reported: refused, evicted or lost
        return Fate.FAILED
    return Fate.RUNNING if "running" in state else Fate.PENDING


def _disruption(metadata: Dict, status: Dict, terminated: Dict | None) -> Sign | None:
    name = metadata.get("name")
    for condition in _items(status, "conditions"):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = (
                str(condition.get("reason") or "Disrupted"),
                str(condition.get("message") or ""),
            )
            return Sign(
                reason,
                message or f"pod {name} was disrupted",
                time_from_text(condition.get("lastTransitionTime")),
            )
    if terminated is not None and terminated.get("reason") == "ContainerStatusUnknown":
        return Sign(
            "NodeRestarted",
            f"the kubelet lost the container of pod {name}",
            time_from_text(terminated.get("finishedAt")),
        )
    if metadata.get("deletionTimestamp"):
        return Sign("PodDeleted", f"pod {name} was deleted", _deletion_asked(metadata))
    if status.get("phase") == "Failed" and (status.get("reason") or terminated is None):
        # a kubelet that refuses or evicts a pod says so on the pod; a container's own failure is said on the container
        return Sign(
            str(status.get("reason") or "PodLost"),
            str(status.get("message") or f"pod {name} ended without its trainer"),
        )
    return None


def _deletion_asked(metadata: Dict) -> datetime | None:
    """deletionTimestamp is the end of the grace period; what counts is when somebody asked."""
    deadline, grace = (
        time_from_text(metadata.get("deletionTimestamp")),
        metadata.get("deletionGracePeriodSeconds"),
    )
    try:
        return (
            deadline - timedelta(seconds=grace) if deadline and isinstance(grace, int) else deadline
        )
    except OverflowError:  # a grace period may be any 64-bit number
        return deadline


def _blocked(status: Dict, state: Dict) -> Sign | None:
    for condition in _items(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Sign(
                names.Reason.UNSCHEDULABLE, str(condition.get("message") or "no node fits yet")
            )
    for container in _items(status, "initContainerStatuses"):
        if sign := _waits_for(_map(container, "state")):
            return Sign(sign.reason, f"init container {container.get('name')}: {sign.message}")
    return _waits_for(state)


def _waits_for(state: Dict) -> Sign | None:
    waiting = _map(state, "waiting")
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in (
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
    ):
        return Sign(names.Reason.IMAGE_PULL, message or reason)
    if reason and reason not in ("ContainerCreating", "PodInitializing"):
        return Sign(reason, message or reason)
    return None
