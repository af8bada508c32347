"""The Observation of a job: its manifest, its pods and their nodes, as the cluster shows them.

Pods are split by attempt and by the state of their container `trainer`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.history import OlderGang, Steps
from ddpjob.core.api.job import Job
from ddpjob.core.api.kueue import Workload, workload_of_place
from ddpjob.core.api.pod_groups import GroupName
from ddpjob.core.api.queue import Queue
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.observe.agent_state import AgentState
from ddpjob.core.observe.order import Order
from ddpjob.core.observe.torchrun_log import Summary

# The status keeps attempts as int32.
MAX_ATTEMPT = 2_147_483_646

# Longest time between two tries to create a refused object.
LONGEST_RETRY = timedelta(seconds=60)


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
    """What happened to a pod: one word, one sentence, and the time if it is known."""

    reason: str
    message: str
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """One node of an attempt, with what the decisions need of its pod.

    - `attempt`: the attempt assigned to the pod. `born`: the attempt of its creation.
    - `index`: the node's index in the gang. `node_name`: the Kubernetes node of the pod.
    - `address`: the pod's IP address. `agent`: the ConfigMap with its agent.
    - `held`: the pod knows its attempt, and must not start it yet. `dumps`: it was told to write
      the stacks of its ranks, and to end.
    - `order`: the last assignment of a kept pod.
    - `ready`: the workers of its attempt have met. `ready_since`: since when, or an empty string.
    - `sets_up`: the agent runs the setup of the job: its startup probe has not succeeded. Such a
      pod is pending.
    - `creating_since`: the pod has had a node since then, and no container yet.
    - `released`: no container of the pod runs any more. A kubelet reports the end of the containers
      before the pod's phase.
    - `started`: the trainer's container was started at some time. `running_since`: it runs since
      then, if the kubelet says it.
    - `disruption`: why the pod was deleted, evicted or lost, whatever its trainer did.
    - `blocked`: what keeps a pending pod from starting. `gated`: a scheduling gate does.
    - `own_limit`: the kubelet evicted the pod because it exceeded a limit of its own.
    - `grace`: the pod's own grace period in seconds.
    - `deletion_deadline`: the end of the grace period, if the pod is being deleted.
    - `looks_lost`: the control plane set the pod to not ready, and the kubelet did not.
    - `has_claims`: the pod mounts a PersistentVolumeClaim.
    - `tolerated`: keys of the tolerated taints; an empty key stands for every taint.
    - `requests`: names of resources. `placement`: a digest of what decides about nodes. `priority`.
    - `group`: the pod's PodGroup, for scheduling its gang whole.
    - `place`: the pod's node selector, if a queue has chosen its nodes by a topology.
    - `message`: the last words of the trainer. `follower`, `timed_out`: what they say about a peer.
    - `summary`: the first failure of a rank of the node.
    - `result`: what the trainer wrote to $DDP_RESULT_FILE.
    - `reported`: the attempt in the agent's report. `hang`: this attempt hung.
    - `steps`: the first and the last step of each attempt of the pod.
    - `trained`: the time of the first step or heartbeat of each attempt of the pod.
    """

    name: str
    uid: str
    attempt: int
    born: int
    index: int
    state: TrainerState
    node_name: str
    address: str
    agent: str
    held: bool
    dumps: bool
    order: Order | None
    ready: bool
    ready_since: str
    sets_up: bool
    creating_since: datetime | None
    released: bool
    grace: int
    deletion_deadline: datetime | None
    started: bool
    running_since: datetime | None
    looks_lost: bool
    gated: bool
    has_claims: bool
    tolerated: tuple[str, ...]
    requests: frozenset[str]
    placement: str
    priority: int
    group: GroupName | None
    place: Mapping[str, str]
    disruption: Finding | None
    own_limit: Finding | None
    blocked: Finding | None
    exit_code: int | None
    exit_reason: str
    message: str
    follower: bool
    timed_out: bool
    summary: Summary | None
    result: Mapping[str, str]
    reported: int | None
    hang: bool
    steps: Mapping[int, Steps]
    total_steps: int | None
    trained: Mapping[int, datetime]
    finished: datetime | None

    @property
    def running(self) -> bool:
        return self.state is TrainerState.RUNNING

    @property
    def failed(self) -> bool:
        return self.state is TrainerState.FAILED

    @property
    def ended(self) -> bool:
        return self.state in (TrainerState.SUCCEEDED, TrainerState.FAILED)

    @property
    def active(self) -> bool:
        """True if the trainer of the pod may still run, or run later."""
        return not self.ended and not self.released

    @property
    def deleting(self) -> bool:
        return self.deletion_deadline is not None


class NodeHealth(StrEnum):
    """The condition Ready of a Kubernetes node. Unknown: its kubelet does not report any more."""

    READY = "True"
    NOT_READY = "False"
    UNREACHABLE = "Unknown"


@dataclass(frozen=True, slots=True)
class Node:
    """A Kubernetes node. `taints` are the keys of its taints against new pods."""

    name: str
    health: NodeHealth = NodeHealth.READY
    taints: tuple[str, ...] = ()
    uid: str = ""


class Nodes(Mapping[str, Node]):
    """Kubernetes nodes by name. `unready` has the names of those that are not ready."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._by_name: dict[str, Node] = {}
        self.unready: set[str] = set()
        for node in nodes:
            self.put(node)

    def put(self, node: Node) -> None:
        self._by_name[node.name] = node
        if node.health is NodeHealth.READY:
            self.unready.discard(node.name)
        else:
            self.unready.add(node.name)

    def pop(self, name: str) -> Node:
        self.unready.discard(name)
        return self._by_name.pop(name)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """The administrator's choices about nodes and about gangs waiting for each other.

    - `dead_node_time`: a pod is force-deleted after its node was unreachable for so long; None
      never.
    - `gang_timeout`: an incomplete gang gives way to an older one after this time.
    - `disruption_taints`: keys of taints that announce the end of a node.
    """

    dead_node_time: timedelta | None = timedelta(seconds=30)
    gang_timeout: timedelta = timedelta(seconds=600)
    disruption_taints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's last refusal to create a pod or Service of a job.

    - `retry_at`: the earliest time of the next try.
    - `final`: the same request can never succeed, because the object is invalid.
    - `counts_ended_pods`: the refusal is by a quota that counts ended pods too.
    """

    reason: str
    message: str
    retry_at: datetime
    final: bool = False
    counts_ended_pods: bool = False

    def is_too_early(self, now: datetime) -> bool:
        """Return True before the next try.

        A time further away than the longest delay was set before the clock was set back.
        """
        return timedelta(0) < self.retry_at - now <= LONGEST_RETRY


class ApiState(StrEnum):
    """What the operator knows of an optional API of a cluster, such as Kueue's.

    - OFF, REFUSED: the administrator has switched its use off, or has not given the rights for it.
    - UNKNOWN: not read yet. ABSENT: the cluster does not serve it. UNREADABLE: its log says why.
    """

    OFF = "off"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    ABSENT = "absent"
    UNREADABLE = "unreadable"
    SERVED = "served"


@dataclass(frozen=True)
class Observation:
    """A job and every pod of its gangs, sorted by attempt and index, and their surroundings.

    - `strays`: names of pods with the job's labels, but outside of its gangs.
    - `leftovers`: unfinished pods of earlier jobs of the same name.
    - `nodes`: the Kubernetes nodes; None if the operator must not read them.
    - `older_gang`: an older job that needs the room held, or given back, by this one.
    - `answers`: the answers of agents, by the UIDs of their pods.
    - `waits_for_nodes`: why the scheduler has no nodes for the whole gang, in its words, or empty.
    - `has_default_queue`: a LocalQueue takes the namespace's jobs without a queue; None before it
      is read.
    - `kueue`: whether queues are known. `workloads`: the Workloads of the job, of all numbers.
    - `is_current`: the API server has confirmed the status as the newest.
    - `refused_orders`: how often in a row the API server has refused orders to write stacks.
    """

    job: Job
    pods: tuple[Pod, ...] = ()
    refusal: Refusal | None = None
    strays: tuple[str, ...] = ()
    leftovers: tuple[Pod, ...] = ()
    nodes: Nodes | None = None
    policy: ClusterPolicy = field(default_factory=ClusterPolicy)
    older_gang: OlderGang | None = None
    answers: Mapping[str, AgentState] = field(default_factory=dict)
    waits_for_nodes: str = ""
    kueue: ApiState = ApiState.OFF
    has_default_queue: bool | None = False
    workloads: tuple[Workload, ...] = ()
    is_current: bool = False
    refused_orders: int = 0

    @property
    def status(self) -> Status:
        return self.job.status

    @property
    def queue(self) -> Queue | None:
        """Return the queue of the job, unless queues are switched off."""
        return None if self.kueue is ApiState.OFF else self.job.queue

    @cached_property
    def workload(self) -> Workload | None:
        """Return the Workload of the job's present place, or None."""
        place = self.status.place
        return workload_of_place(self.workloads, self.job.identity, place.number, place.uid)

    @cached_property
    def unreleased(self) -> tuple[Pod, ...]:
        """Return the pods of any attempt with containers that have not ended."""
        return tuple(pod for pod in self.pods if not pod.released)

    @property
    def attempt(self) -> int:
        return self.status.attempt.number or 0

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        """Return the pods of the current attempt, including those not assigned to it yet."""
        return tuple(pod for pod in self.pods if self._takes_part(pod))

    @cached_property
    def older(self) -> tuple[Pod, ...]:
        """Return the pods of earlier attempts that take no part in the current one."""
        return tuple(
            pod for pod in self.pods if pod.attempt <= self.attempt and not self._takes_part(pod)
        )

    def _takes_part(self, pod: Pod) -> bool:
        attempt = self.status.attempt
        return attempt.number is not None and pod.born == attempt.born(pod.index)

    @property
    def unassigned(self) -> tuple[Pod, ...]:
        """Return the kept pods without an order to start the current attempt."""
        return tuple(
            pod for pod in self.current if pod.active and (pod.attempt < self.attempt or pod.held)
        )

    @property
    def status_is_behind(self) -> bool:
        """Return True if a pod belongs to a later attempt than the status knows.

        The API server then holds a newer status, unless a user has changed the status.
        """
        newest = -1 if self.status.attempt.number is None else self.status.attempt.number
        return any(pod.attempt > newest for pod in self.pods)

    @cached_property
    def unreachable_since(self) -> Mapping[str, datetime]:
        """Return when each unreachable Kubernetes node was first seen as unreachable."""
        return {node.name: node.since for node in self.status.unreachable_nodes}

    def node(self, name: str) -> Node | None:
        """Return a Kubernetes node, or None if it is not known."""
        return self.nodes.get(name) if self.nodes else None

    @property
    def unready_nodes(self) -> int:
        """Return the number of unready Kubernetes nodes in the cluster."""
        return len(self.nodes.unready) if self.nodes else 0

    @property
    def is_under_quota(self) -> bool:
        """Return True if a quota refuses pods of the attempt."""
        return self.refusal is not None and self.refusal.reason == Reason.QUOTA

    def answer_of(self, pod: Pod) -> AgentState | None:
        """Return the answer of a pod's agent about the current attempt, or None."""
        answer = self.answers.get(pod.uid)
        return answer if answer and answer.attempt == self.attempt else None

    @property
    def latched(self) -> bool:
        """Return True if every pod of the current attempt was seen at some time."""
        return self.status.attempt.latched

    @cached_property
    def succeeded(self) -> frozenset[int]:
        """Return the indices of the succeeded nodes of the attempt, even if their pods are gone."""
        seen = {
            pod.index
            for pod in self.current
            if pod.state is TrainerState.SUCCEEDED and not self.has_missed_attempt(pod)
        }
        kept = self.status.attempt.succeeded_nodes
        return frozenset(seen | {index for index in kept if index < self.status.pods.desired})

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the indices of the current attempt that need a pod and have none."""
        present = {pod.index for pod in self.current} | self.succeeded
        return tuple(index for index in range(self.status.pods.desired) if index not in present)

    def has_missed_attempt(self, pod: Pod) -> bool:
        """Return True if a kept pod ended before it took part in this attempt.

        Its end belongs to an attempt before, already judged. A killed pod has left no report: it
        took part if the gang has run.
        """
        if pod.born == self.attempt or not pod.ended:
            return False
        if pod.reported is None:
            return self.status.attempt.running_time is None
        return pod.reported < self.attempt

    def pod_name(self, index: int) -> str:
        """Return the name of a node's pod in the current attempt, also if it does not exist."""
        return names.pod_name(self.job.name, self.status.attempt.born(index), index)

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the indices of pods that had been seen and are gone.

        Before the latch, only kept pods had been seen.
        """
        if self.latched:
            return self.missing
        born = self.status.attempt.born
        return tuple(index for index in self.missing if born(index) < self.attempt)

    def is_ready(self, pod: Pod) -> bool:
        """Return True if the workers of a pod have met in the current attempt."""
        has_begun = pod.running and pod.attempt == self.attempt
        return has_begun and pod.ready and not pod.held

    @property
    def ready(self) -> int:
        """Return the number of ready nodes: their workers have met in the current attempt."""
        return sum(map(self.is_ready, self.current))

    @property
    def has_failed_pod(self) -> bool:
        return any(pod.failed for pod in self.current)

    @property
    def all_run(self) -> bool:
        """Return True if every node of the attempt has met the others or has succeeded."""
        return len(self.succeeded) + self.ready == self.status.pods.desired

    @property
    def must_be_ready(self) -> bool:
        """Return True if an unready pod is silent: the gang has met, or has kept pods.

        A new attempt without kept pods has the time of startupDeadlineSeconds.
        """
        return bool(self.status.attempt.running_time or self.status.attempt.births)

    @property
    def silent(self) -> tuple[Pod, ...]:
        """Return the running but unready pods, if nothing else in the gang explains the delay.

        There are none if a pod is missing, pending, being deleted, or has failed.
        """
        running = [pod for pod in self.current if pod.running]
        is_complete = len(running) + len(self.succeeded) == self.status.pods.desired
        if not is_complete or any(pod.deleting or pod.looks_lost for pod in running):
            return ()
        return tuple(pod for pod in running if not self.is_ready(pod))


def observe(
    job: Job, pods: Iterable[Pod], refusal: Refusal | None = None, **surroundings: Any
) -> Observation:
    """Return the Observation of a job and its pods: those with its labels and owned by it.

    `surroundings` are the other fields of Observation.
    """
    gang = []
    strays = []
    for pod in pods:
        if is_of_gang(pod, job):
            gang.append(_with_setup(pod, job) if pod.sets_up else pod)
        else:
            strays.append(pod.name)
    gang.sort(key=lambda pod: (pod.attempt, pod.index, pod.born))
    return Observation(job, tuple(gang), refusal, tuple(sorted(strays)), **surroundings)


def _with_setup(pod: Pod, job: Job) -> Pod:
    """Return a pod as pending, because its startup probe has not succeeded.

    There are two exceptions. If the job has no setup, the probe is the user's own. If the gang has
    met, only the kubelet has started anew.
    """
    if not (job.spec and job.spec.setup) or job.status.attempt.running_time:
        return replace(pod, sets_up=False)
    return replace(pod, state=TrainerState.PENDING, started=False)


def is_of_gang(pod: Pod, job: Job) -> bool:
    """Return False if the operator cannot have created the pod, as with a copy made by hand."""
    if pod.name != names.pod_name(job.name, pod.born, pod.index):
        return False
    if not pod.born <= pod.attempt <= MAX_ATTEMPT:
        return False
    is_current = pod.attempt == job.status.attempt.number
    return pod.index < (job.status.pods.desired if is_current else names.MAX_NODES)
