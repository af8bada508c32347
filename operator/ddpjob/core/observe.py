"""The Observation of a job: its manifest and its pods, as the cluster shows them.

Pods are split by attempt and by the state of their container `trainer`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from ddpjob.core.job import Job
from ddpjob.core.status import Status


class TrainerState(StrEnum):
    """The state of the container `trainer` of a pod.

    The pod's own phase may never show it, for example if a sidecar never ends.
    """

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that happened to a pod: one word, one sentence, and the time if it is known."""

    reason: str
    message: str
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """One node of an attempt, with what the decisions need of its pod.

    - `index`: the node's index in the gang. `node_name`: the Kubernetes node that the pod runs on.
    - `released`: no container of the pod runs any more. A kubelet reports the end of the containers
      before the pod's phase.
    - `started`: the trainer's container was started at some time.
    - `disruption`: why the pod was deleted, evicted or lost, whatever its trainer did.
    - `blocked`: what keeps a pending pod from starting.
    """

    name: str
    uid: str
    attempt: int
    index: int
    state: TrainerState
    node_name: str = ""
    released: bool = False
    deleting: bool = False
    started: bool = False
    disruption: Finding | None = None
    blocked: Finding | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    message: str = ""
    finished: datetime | None = None

    @property
    def ended(self) -> bool:
        return self.state in (TrainerState.SUCCEEDED, TrainerState.FAILED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's last refusal to create a pod or Service of a job.

    - `retry_at`: the earliest time of the next try.
    - `final`: the same request can never succeed, because the object is invalid.
    - `counts_ended_pods`: a quota refused that counts pods which have ended too.
    """

    reason: str
    message: str
    retry_at: datetime
    final: bool = False
    counts_ended_pods: bool = False


@dataclass(frozen=True)
class Observation:
    """A job and every pod that it owns, sorted by attempt and index."""

    job: Job
    pods: tuple[Pod, ...] = ()
    refusal: Refusal | None = None

    @property
    def status(self) -> Status:
        return self.job.status

    @property
    def attempt(self) -> int:
        return self.status.attempt or 0

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        """Pods of the current attempt."""
        return tuple(pod for pod in self.pods if pod.attempt == self.attempt)

    @cached_property
    def older(self) -> tuple[Pod, ...]:
        """Pods of earlier attempts."""
        return tuple(pod for pod in self.pods if pod.attempt < self.attempt)

    @property
    def job_is_stale(self) -> bool:
        """True if there is a pod of an attempt that the status does not know yet.

        The API server then holds a newer status.
        """
        newest = -1 if self.status.attempt is None else self.status.attempt
        return any(pod.attempt > newest for pod in self.pods)

    @property
    def latched(self) -> bool:
        """True if every pod of the current attempt was seen at some time."""
        started = self.status.attempt_started
        return started is not None and started >= self.attempt

    @cached_property
    def succeeded(self) -> frozenset[int]:
        """Indices of the current attempt whose trainer succeeded, even if the pod is gone."""
        seen = {pod.index for pod in self.current if pod.state is TrainerState.SUCCEEDED}
        return frozenset(seen) | frozenset(self.status.succeeded_nodes)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the current attempt that need a pod and have none."""
        present = {pod.index for pod in self.current} | self.succeeded
        return tuple(index for index in range(self.status.pods.desired) if index not in present)


def observe(job: Job, pods: Iterable[Pod], refusal: Refusal | None = None) -> Observation:
    ordered = sorted(pods, key=lambda pod: (pod.attempt, pod.index))
    return Observation(job, tuple(ordered), refusal)
