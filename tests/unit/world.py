"""A simulated cluster for Hypothesis: one job, its pods, the Kubernetes nodes, and an operator.

The cluster keeps every version of every object. The operator sees each object in a version of its
own. This version may be old: observations are delayed, in part, and in any order. The operator
never goes back to an older version, as the controller's cache does not. It carries its plans out as
the controller does: it writes the status first, then deletes pods, then creates pods.

The events between two turns of the operator are in actions.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from builders.containers import running
from builders.jobs import a_manifest
from builders.nodes import a_node
from builders.pods import an_agents_pod, is_scheduled, read_pods
from builders.times import NOW, at

from ddpjob.core.api.history import OlderGang
from ddpjob.core.api.job import Job
from ddpjob.core.api.kueue import (
    Demand,
    Workload,
    ended,
    given_back,
    new_workload,
    pods_ready,
    read_workload,
)
from ddpjob.core.api.names import (
    ANNOTATION_ASSIGNMENT,
    ANNOTATION_READY_BEFORE,
    LABEL_ATTEMPT,
    pod_name,
)
from ddpjob.core.api.queue import LABEL_QUEUE
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import format_time
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import (
    ApiState,
    ClusterPolicy,
    Node,
    NodeHealth,
    Nodes,
    Observation,
    Pod,
    Refusal,
    TrainerState,
    observe,
)
from ddpjob.core.plan import Assign, PlaceAction, PlaceStep, Plan

# The largest gang. A pod with a greater index was created by hand.
LARGEST_GANG = 4

# Within so many turns, the operator must have come to rest.
MAX_TURNS = 12

# Seconds for a pod to end if the deletion names no grace period.
GRACE = 45

# Seconds until the operator retries after a refusal of the API server.
RETRY_AFTER = 4

# A taint listed by the administrator, and one without a meaning.
SPOT_TAINT = "aws-node-termination-handler/spot-itn"
CORDON = "node.kubernetes.io/unschedulable"
POLICY = ClusterPolicy(gang_timeout=timedelta(seconds=60), disruption_taints=(SPOT_TAINT,))

# Most of the nodes must be able to fail without most of the cluster failing.
NODE_NAMES = tuple(f"node-{number}" for number in range(7))


@dataclass(frozen=True)
class PodVersion:
    """A pod as it was at some time; both fields are None if it did not exist."""

    body: dict[str, Any] | None
    pod: Pod | None


@dataclass
class Turn:
    """One turn of the operator: its observation, its plan, and whether it wrote the status.

    `written`: the status was changed, and the API server accepted it.
    """

    observed: Observation
    plan: Plan
    time: datetime
    written: bool = False

    @cached_property
    def new_status(self) -> dict[str, Any]:
        """Return the status of the plan as it is written."""
        return self.plan.status.to_dict()

    @cached_property
    def changes_the_status(self) -> bool:
        old = self.observed.status
        # Equal statuses need no conversion. It would take longer.
        return self.plan.status != old and self.new_status != old.to_dict()

    def __str__(self) -> str:
        plan = self.plan
        pods = [f"{pod.name}={pod.state}" for pod in self.observed.pods]
        deleted = [f"{delete.name}/{delete.grace}" for delete in plan.delete]
        assigned = [assign.name for assign in plan.assign]
        return (
            f"{self.time:%H:%M:%S} {' '.join(pods)} -> attempt {plan.status.attempt.number} "
            f"{plan.status.phase}/{plan.status.reason} create={plan.new_pods} "
            f"assign={assigned} delete={deleted} "
            f"wake={plan.wake_after}"
        )


class World:
    """The cluster. The last version of each list is the one in the API server.

    `refuse_pods` is the API server's reason to refuse new pods, or None. `older_gang` is an older
    job that fits only in part. `violations` name pods created too early. `turns` are those whose
    invariants are not checked yet. `story` lists the events, for the report of a failed test.
    """

    def __init__(self, manifest: dict[str, Any], reads_nodes: bool = True) -> None:
        self.manifest = manifest
        self.reads_nodes = reads_nodes
        self.now = NOW
        self.jobs = [Job.from_dict(manifest)]
        self.nodes = [Nodes(read_node(a_node(name)) for name in NODE_NAMES)]
        self.pods: dict[str, list[PodVersion]] = {}
        self.queue = Queue(self)
        self.refuse_pods: Reason | None = None
        self.older_gang: OlderGang | None = None
        self.created = 0
        self.meetings = 0
        self.turns: list[Turn] = []
        self.violations: list[str] = []
        self.story: list[str | Turn] = []
        self.operator = Operator(self)
        self.other = Operator(self)

    def __repr__(self) -> str:
        lines = [f"{self.manifest['spec']}, reads_nodes={self.reads_nodes}"]
        lines += [f"    {entry}" if isinstance(entry, Turn) else entry for entry in self.story]
        return "\n".join(lines)

    # The job

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    @property
    def status(self) -> Status:
        return self.job.status

    def changed(self) -> None:
        """Add the manifest as the job's newest version."""
        self.jobs.append(Job.from_dict(self.manifest))

    def change_spec(self, **fields: Any) -> None:
        self.manifest["spec"] = {**self.manifest["spec"], **fields}
        self.manifest["metadata"]["generation"] += 1
        self.changed()

    def set_status(self, status: dict[str, Any]) -> None:
        self.manifest["status"] = status
        # As the operator's cache does, this reads the status alone.
        self.jobs.append(self.job.reread(self.manifest))

    def move_job(self, queue: str) -> None:
        """Give the job the label of a queue, or none."""
        self.manifest["metadata"]["labels"] = {LABEL_QUEUE: queue} if queue else {}
        self.changed()

    def delete_job(self) -> None:
        self.manifest["metadata"]["deletionTimestamp"] = format_time(self.now)
        self.changed()

    # The pods

    def existing(self) -> dict[str, Pod]:
        """Return the pods in the API server by name."""
        return {name: seen[-1].pod for name, seen in self.pods.items() if seen[-1].pod}

    def put_pod(self, body: dict[str, Any]) -> None:
        """Add a version of a pod."""
        (pod,) = read_pods(body)
        self.pods.setdefault(pod.name, []).append(PodVersion(body, pod))

    def remove_pod(self, name: str) -> None:
        self.pods[name].append(PodVersion(None, None))

    def body(self, name: str) -> dict[str, Any]:
        body = self.pods[name][-1].body
        assert body is not None
        return body

    def create_pod(self, attempt: int, index: int) -> None:
        """Create a pod. If the name exists, the operator sees the existing pod instead."""
        name = pod_name("digits", attempt, index)
        existing = self.existing()
        if name in existing:
            return
        members = {pod.name for pod in self.gang()}
        for other in self.of_gangs():
            if other.name not in members and not other.released:
                self.violations.append(f"{name} was created while {other.name} runs")
        if not self.queue.holds_room():
            self.violations.append(f"{name} was created without room in the queue")
        self.created += 1
        body = an_agents_pod(index, attempt=attempt)
        body["metadata"]["uid"] = f"uid-{self.created}"
        self.put_pod(body)

    def of_gangs(self) -> list[Pod]:
        """Return the pods created by the operator."""
        pods = self.existing().values()
        created = [pod for pod in pods if pod.name == pod_name("digits", pod.born, pod.index)]
        return [pod for pod in created if pod.index < LARGEST_GANG]

    def assign_pod(self, assign: Assign, attempt: int) -> None:
        """Patch the label and the assignment of a pod."""
        pod = self.existing().get(assign.name)
        if pod is None or pod.uid != assign.uid:
            return
        body = self.body(assign.name)
        metadata = {
            **body["metadata"],
            "labels": {**body["metadata"]["labels"], LABEL_ATTEMPT: str(attempt)},
            "annotations": {
                ANNOTATION_ASSIGNMENT: json.dumps({"start": assign.start, "dump": assign.dump}),
                ANNOTATION_READY_BEFORE: assign.ready_since,
            },
        }
        self.put_pod({**body, "metadata": metadata})

    def workers_meet(self) -> None:
        """Let the rendezvous of the attempt complete, if every member takes part.

        Each agent has ended the processes of the attempt before. So a pod outside the gang must not
        run any more.
        """
        gang = self.gang()
        present = {pod.index for pod in gang} | set(self.status.attempt.succeeded_nodes)
        if len(present) < self.status.pods.desired:
            return
        members = [pod for pod in gang if pod.state is not TrainerState.SUCCEEDED]
        if not members or not all(self._takes_part(pod) for pod in members):
            return
        for other in self.of_gangs():
            if other not in gang and not other.released:
                self.violations.append(f"the gang met while {other.name} runs")
        for pod in members:
            # One meeting a second, so each pod is ready since another time than before.
            self.meetings += 1
            status = {**running(since=at(self.meetings)), "podIP": pod.address}
            self.put_pod({**self.body(pod.name), "status": status})

    def _takes_part(self, pod: Pod) -> bool:
        is_assigned = (
            pod.attempt == self.status.attempt.number and not pod.held and not pod.deleting
        )
        is_assigned = is_assigned and not pod.dumps
        return pod.state is TrainerState.RUNNING and is_assigned and self.answers(pod)

    def delete_pod(self, name: str, uid: str, grace: int | None) -> None:
        """Delete a pod. If its kubelet still has to end it, it only gets a deletion timestamp."""
        pod = self.existing().get(name)
        if pod is None or pod.uid != uid:
            return
        body = self.body(name)
        has_ended = body["status"].get("phase") in ("Succeeded", "Failed")
        if grace == 0 or not pod.node_name or has_ended:
            self.remove_pod(name)
            return
        seconds = GRACE if grace is None else grace
        deadline = self.now + timedelta(seconds=seconds)
        if pod.deletion_deadline and pod.deletion_deadline <= deadline:
            return
        deletion = {
            "deletionTimestamp": format_time(deadline),
            "deletionGracePeriodSeconds": seconds,
        }
        self.put_pod({**body, "metadata": {**body["metadata"], **deletion}})

    def report(self, name: str, status: dict[str, Any]) -> None:
        """Set the status of a pod, if its kubelet or the scheduler can report it now.

        A kubelet reports nothing after the end of a pod, starts no pod in deletion, reports no
        started pod as waiting, and is silent while its node is unreachable.
        """
        pod = self.existing()[name]
        starts = status.get("phase") == "Running" and not pod.started
        waits = status.get("phase") == "Pending"
        if pod.ended or (pod.deleting and (starts or waits)) or (pod.started and waits):
            return
        node = pod.node_name or self.fitting_node(pod.index)
        if pod.node_name and not self.answers(pod):
            return
        if is_scheduled(status) and not node:
            return
        spec = {"nodeName": node} if is_scheduled(status) or pod.node_name else {}
        spec = {**self.body(name)["spec"], **spec}
        self.put_pod({**self.body(name), "spec": spec, "status": status})

    def gang(self) -> list[Pod]:
        """Return the pods of the current attempt."""
        status = self.status
        names = [pod_name("digits", status.attempt.born(i), i) for i in range(status.pods.desired)]
        existing = self.existing()
        return [existing[name] for name in names if name in existing]

    # The Kubernetes nodes

    def fitting_node(self, index: int) -> str:
        """Return a node for a new pod, or an empty string if none fits."""
        nodes = self.nodes[-1].values()
        fitting = [
            node.name for node in nodes if node.health is NodeHealth.READY and not node.taints
        ]
        return fitting[index % len(fitting)] if fitting else ""

    def change_node(self, name: str, node: Node | None) -> None:
        """Replace a node, or remove it if `node` is None."""
        nodes = Nodes(known for known in self.nodes[-1].values() if known.name != name)
        if node:
            nodes.put(node)
        self.nodes.append(nodes)

    def answers(self, pod: Pod) -> bool:
        """Return True if the kubelet of a pod can report and end it."""
        node = self.nodes[-1].get(pod.node_name)
        return node is not None and node.health is not NodeHealth.UNREACHABLE

    # The operator

    def restart_operator(self) -> None:
        """Replace the operator by a new one. It begins with a LIST and remembers nothing."""
        self.operator = Operator(self)
        self.operator.receive_everything()

    def settle(self) -> None:
        """Show everything to the operator and run it until nothing changes any more."""
        self.operator.throttled = False
        for _ in range(MAX_TURNS):
            self.operator.receive_everything()
            before = self._state()
            turn = self.operator.run()
            if before == self._state() and turn and turn.plan.wake_after != 0:
                return
        raise AssertionError("the operator does not come to rest")

    def act(self, action: Callable[["World", int], None], choice: int) -> None:
        """Let something happen, and note it."""
        self.story.append(f"{action.__name__} {choice}")
        action(self, choice)

    def _state(self) -> object:
        return len(self.jobs), self.existing(), self.queue.workloads, self.operator.refusal


class Queue:
    """Kueue, with the Workloads of the job.

    `versions` are what the API server had, by their names, the newest last. `state` is what the
    operator knows of Kueue. `takes_all`: it knows of a LocalQueue `default`, which takes the jobs
    without a queue; None before it knows.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.versions: list[dict[str, dict[str, Any]]] = [{}]
        self.made = 0
        self.state = ApiState.SERVED
        self.takes_all: bool | None = False

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return self.seen_at(-1)

    def seen_at(self, version: int) -> tuple[Workload, ...]:
        found = map(read_workload, self.versions[version].values())
        return tuple(workload for workload in found if workload)

    def unfinished(self) -> list[Workload]:
        return [one for one in self.workloads if not one.finished]

    def holds_room(self) -> bool:
        """Return True if the job needs no room of a queue, or has it."""
        return self.world.job.queue is None or any(one.has_quota for one in self.unfinished())

    def _put(self, name: str, body: dict[str, Any]) -> None:
        metadata = {**body["metadata"], "resourceVersion": str(len(self.versions))}
        others = {key: one for key, one in self.versions[-1].items() if key != name}
        is_gone = metadata.get("deletionTimestamp") and not metadata["finalizers"]
        here = {} if is_gone else {name: {**body, "metadata": metadata}}
        self.versions.append({**others, **here})

    def set_conditions(self, name: str, admission: Any, **conditions: tuple[bool, str]) -> None:
        """Change a status, as Kueue does."""
        body = self.versions[-1][name]
        found = {one["type"]: one for one in body.get("status", {}).get("conditions", ())}
        for kind, (holds, reason) in conditions.items():
            found[kind] = {
                "type": kind,
                "status": str(holds),
                "reason": reason,
                "message": reason,
                "lastTransitionTime": format_time(self.world.now),
            }
        status = {**body.get("status", {}), "conditions": list(found.values())}
        if admission is not None:
            status["admission"] = admission
        self._put(name, {**body, "status": status})

    def delete(self, name: str) -> None:
        """Delete a Workload. Its finalizer may hold it."""
        body = self.versions[-1][name]
        deletion = {"deletionTimestamp": format_time(self.world.now)}
        self._put(name, {**body, "metadata": {**body["metadata"], **deletion}})

    def forget(self, name: str) -> None:
        """Remove a Workload at once, as an administrator who takes its finalizer off."""
        others = {key: one for key, one in self.versions[-1].items() if key != name}
        self.versions.append(others)

    def take(self, step: PlaceStep) -> None:
        """Carry out a step of the operator, unless the Workload has changed since it was seen."""
        if step.action is PlaceAction.CREATE:
            self._create(self.world.job)
            return
        assert step.workload is not None
        name, now = step.workload.name, self.world.now
        if step.workload not in self.workloads:
            return
        if step.action is PlaceAction.REMOVE:
            self.delete(name)
            self._let_go(name)
        elif step.action is PlaceAction.FINISH:
            self._merge(name, ended(step.workload, succeeded=True, message="", now=now))
            self._let_go(name)
        elif step.action is PlaceAction.GIVE_BACK:
            self._merge(name, given_back(step.workload, now))
        else:
            is_ready = step.action is PlaceAction.READY
            self._merge(name, pods_ready(step.workload, is_ready, now))

    def _create(self, job: Job) -> None:
        demand = Demand(job.queue, job.spec.nodes, {})
        body = new_workload(job.identity, job.status.place.number, demand)
        name = body["metadata"]["name"]
        if name in self.versions[-1]:
            return
        self.made += 1
        body["metadata"]["uid"] = f"uid-of-workload-{self.made}"
        self._put(name, body)

    def _merge(self, name: str, change: dict[str, Any]) -> None:
        body = self.versions[-1][name]
        status = {**body.get("status", {}), **change}
        present = {key: value for key, value in status.items() if value is not None}
        self._put(name, {**body, "status": present})

    def _let_go(self, name: str) -> None:
        """Remove the finalizer. A finished Workload had none, so its deletion removed it."""
        body = self.versions[-1].get(name)
        if body:
            self._put(name, {**body, "metadata": {**body["metadata"], "finalizers": []}})


@dataclass
class Operator:
    """An operator, with the versions of the objects seen by it.

    `refusal` is its memory of the API server's refusals. `throttled`: it does not write mere
    progress yet.
    """

    world: World
    job_version: int = 0
    node_version: int = 0
    queue_version: int = 0
    pod_versions: dict[str, int] = field(default_factory=dict)
    refusal: Refusal | None = None
    throttled: bool = False

    # What it sees

    def receive_everything(self) -> None:
        world = self.world
        self.job_version = len(world.jobs) - 1
        self.node_version = len(world.nodes) - 1
        self.receive_queue()
        self.pod_versions = {name: len(seen) - 1 for name, seen in world.pods.items()}

    def receive_job(self) -> None:
        """Receive the next version of the job."""
        self.job_version = min(self.job_version + 1, len(self.world.jobs) - 1)

    def receive_nodes(self) -> None:
        self.node_version = len(self.world.nodes) - 1

    def receive_queue(self) -> None:
        self.queue_version = len(self.world.queue.versions) - 1

    def receive_pod(self, name: str) -> None:
        """Receive the next version of a pod."""
        known = self.pod_versions.get(name, -1)
        self.pod_versions[name] = min(known + 1, len(self.world.pods[name]) - 1)

    def receive_answer(self, name: str) -> None:
        """Receive the newest version of a pod, as the answer to a request."""
        self.pod_versions[name] = len(self.world.pods[name]) - 1

    def observe(self) -> Observation:
        world = self.world
        versions = [world.pods[name][at] for name, at in self.pod_versions.items()]
        return observe(
            world.jobs[self.job_version],
            [version.pod for version in versions if version.pod],
            self.refusal,
            nodes=world.nodes[self.node_version] if world.reads_nodes else None,
            policy=POLICY,
            older_gang=world.older_gang,
            kueue=world.queue.state,
            workloads=world.queue.seen_at(self.queue_version),
            has_default_queue=world.queue.takes_all,
        )

    # What it does

    def plan(self) -> Plan:
        return decide(replace(self.observe(), is_current=True), self.world.now)

    def run(self, stop_after: str = "") -> Turn | None:
        """Run one turn.

        It may stop after the write of the "status", after the "assignments" or after the
        "deletions". Then it also forgets the refusal. Return None if it has to look again.
        """
        observed = self.observe()
        if observed.status_is_behind:
            if not self._read_job():
                return None
            observed = replace(observed, is_current=True)
        turn = Turn(observed, decide(observed, self.world.now), self.world.now)
        self.world.turns.append(turn)
        self.world.story.append(turn)
        if self._finds(turn.plan.confirm) or not self._write(turn):
            return None
        if stop_after == "status":
            self.refusal = None
            return turn
        if turn.plan.join_queue:
            self.world.move_job(turn.plan.join_queue)
            self._read_job()
            return turn
        self._take_step(turn.plan.place)
        self._assign(turn.plan)
        if stop_after == "assignments":
            self.refusal = None
            return turn
        self._delete(turn.plan)
        if stop_after == "deletions":
            self.refusal = None
            return turn
        self._create(turn.plan)
        return turn

    def _read_job(self) -> bool:
        """Receive the newest version of the job. Return True if it was known already."""
        newest = len(self.world.jobs) - 1
        was_known = self.job_version == newest
        self.job_version = newest
        return was_known

    def _finds(self, confirm: tuple[str, ...]) -> bool:
        """Return True if the API server has a pod that seemed to be gone."""
        found = [name for name in confirm if name in self.world.existing()]
        for name in found:
            self.receive_answer(name)
        return bool(found)

    def _write(self, turn: Turn) -> bool:
        """Write the status under the version used to compute it.

        Return False if the API server has a newer version, or if the write has to wait.
        """
        plan = turn.plan
        if not turn.changes_the_status:
            acts = plan.new_pods or plan.assign or plan.delete_job or plan.place or plan.join_queue
            return self._read_job() if acts else True
        if self.throttled and plan.only_reports_progress(turn.observed.status):
            return False
        if not self._read_job():
            return False
        turn.written = True
        self.world.set_status(turn.new_status)
        self.job_version += 1
        return True

    def _take_step(self, step: PlaceStep | None) -> None:
        """Do what a plan does with the Workload. A LIST shows whether a pod uses its room."""
        if step is None:
            return
        in_use = [pod for pod in self.world.of_gangs() if not pod.released]
        if step.action.frees_room and in_use:
            for pod in in_use:
                self.receive_answer(pod.name)
            return
        self.world.queue.take(step)
        self.receive_queue()

    def _assign(self, plan: Plan) -> None:
        for assign in plan.assign:
            self.world.assign_pod(assign, plan.status.attempt.number or 0)
            self.receive_answer(assign.name)

    def _delete(self, plan: Plan) -> None:
        for delete in plan.delete:
            self.world.delete_pod(delete.name, delete.uid, delete.grace)
            self.receive_answer(delete.name)
        if plan.delete_job:
            self.world.delete_job()

    def _create(self, plan: Plan) -> None:
        if not plan.new_pods:
            return
        world = self.world
        if world.refuse_pods:
            retry_at = world.now + timedelta(seconds=RETRY_AFTER)
            final = world.refuse_pods is Reason.INVALID_POD
            self.refusal = Refusal(world.refuse_pods, "refused", retry_at, final)
            return
        self.refusal = None
        assert plan.status.attempt.number is not None
        for index in plan.new_pods:
            world.create_pod(plan.status.attempt.number, index)
            self.receive_answer(pod_name("digits", plan.status.attempt.number, index))


def a_world(spec: dict[str, Any] | None = None, reads_nodes: bool = True, queue: str = "") -> World:
    manifest = a_manifest(**(spec or {}))
    if queue:
        manifest["metadata"]["labels"] = {LABEL_QUEUE: queue}
    return World(manifest, reads_nodes)
