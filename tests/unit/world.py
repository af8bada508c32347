"""A world in which plans are carried out, for Hypothesis: one job, its pods, a kubelet, a scheduler, users and accidents.

It does what the controller and Kubernetes do together: the status is written first, then pods are deleted (with their
grace: a running pod goes on until its kubelet has ended it), then created. What happens in between is drawn at random.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from builders import (
    NOW,
    a_follower,
    a_manifest,
    a_pod,
    a_summary,
    disruption_target,
    ended,
    evicted,
    oom_killed,
    refused_by_kubelet,
    running,
    succeeded,
    unschedulable,
    waiting,
)

from ddpjob.core.decide import decide
from ddpjob.core.job import Job
from ddpjob.core.names import Reason, pod_name
from ddpjob.core.observe import Observation, Pod, Refusal, TrainerState, observe
from ddpjob.core.plan import Plan
from ddpjob.core.pods import read_pod
from ddpjob.core.status import Status
from ddpjob.core.times import format_time


@dataclass
class Look:
    """One turn of the operator: what it saw and what it planned."""

    seen: Observation
    plan: Plan


@dataclass
class World:
    """`pods` by name, as the API server holds them. `made` is every pod ever created, as (attempt, index)."""

    manifest: dict
    now: datetime = NOW
    pods: dict[str, dict] = field(default_factory=dict)
    made: list[tuple[int, int]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list, repr=False)
    refusal: Refusal | None = None
    quota: str | None = None
    uids: int = 0

    # --- the operator

    def observe(self) -> Observation:
        pods = [pod for pod in map(read_pod, self.pods.values()) if pod]
        return observe(Job.from_dict(self.manifest), pods, self.refusal)

    def plan(self) -> Plan:
        return decide(self.observe(), self.now)

    def look(self, dies_after: str = "") -> Plan:
        """One turn of the operator, which may die after its "status" or its "deletes"; its memory dies with it."""
        self.looks.append(Look(seen := self.observe(), plan := decide(seen, self.now)))
        assert all(name not in self.pods for name in plan.confirm)
        self.manifest["status"] = plan.status.to_dict()
        if dies_after == "status":
            self.refusal = None
            return plan
        for delete in plan.delete:
            self.ask_to_delete(delete.name, delete.uid, delete.grace)
        if dies_after == "deletes":
            self.refusal = None
            return plan
        if plan.create:
            self._create(plan)
        return plan

    def settle(self) -> None:
        """Turns until nothing changes any more; the operator wakes itself at once where it asked for that."""
        for _ in range(8):
            before = self.manifest.get("status"), sorted(self.pods)
            plan = self.look()
            if plan.wake_after != 0 and before == (self.manifest["status"], sorted(self.pods)):
                return
        raise AssertionError("the operator never comes to rest")

    def _create(self, plan: Plan) -> None:
        if self.quota:
            self.refusal = Refusal(
                self.quota, "refused", self.now + timedelta(seconds=4), self.quota == "InvalidPod"
            )
            return
        self.refusal = None
        for index in plan.create:
            assert plan.status.attempt is not None
            name = pod_name("digits", plan.status.attempt, index)
            assert name not in self.pods
            self.uids += 1
            pod = a_pod(index, attempt=plan.status.attempt)
            pod["metadata"]["uid"] = f"uid-{self.uids}"
            self.pods[name] = pod
            self.made.append((plan.status.attempt, index))

    # --- the API server and the kubelets

    def ask_to_delete(self, name: str, uid: str, grace: int | None) -> None:
        """Ended and unplaced pods go at once; others when their kubelet has ended them."""
        pod = self.pods.get(name)
        if not pod or pod["metadata"]["uid"] != uid:
            return
        if grace == 0 or not pod["spec"] or pod["status"]["phase"] in ("Succeeded", "Failed"):
            del self.pods[name]
            return
        seconds = 45 if grace is None else grace
        pod["metadata"]["deletionTimestamp"] = format_time(self.now + timedelta(seconds=seconds))
        pod["metadata"]["deletionGracePeriodSeconds"] = seconds

    def read(self, name: str) -> Pod:
        pod = read_pod(self.pods[name])
        assert pod is not None
        return pod

    def happens(self, name: str, status: dict) -> None:
        """What a kubelet reports: nothing after the end, no start while being deleted, no waiting once started."""
        pod, seen = self.pods[name], self.read(name)
        starts, waits = (
            status["phase"] == "Running" and not seen.started,
            status["phase"] == "Pending",
        )
        if seen.ended or (seen.deleting and (starts or waits)) or (seen.started and waits):
            return
        pod["spec"] = {} if status.get("unplaced") else {"nodeName": f"node-{name[-1]}"}
        pod["status"] = {key: value for key, value in status.items() if key != "unplaced"}

    @property
    def status(self) -> Status:
        return Status.from_dict(self.manifest.get("status"))

    def current(self) -> list[str]:
        return [name for name in self.pods if self.read(name).attempt == self.status.attempt]


def a_world(nodes: int, max_restarts: int, max_disruptions: int) -> World:
    policy = {"maxRestarts": max_restarts, "maxDisruptions": max_disruptions}
    return World(a_manifest(nodes=nodes, failurePolicy=policy))


# --- what may happen; each takes the world and a number that chooses among pods or sizes


def on_a_pod(action):
    def happen(world: World, choice: int) -> None:
        if world.pods:
            action(world, sorted(world.pods)[choice % len(world.pods)])

    return happen


def reports(status):
    """A kubelet reports what `status` (given time and index of the node) makes."""

    def action(world: World, name: str) -> None:
        world.happens(name, status(world.now, int(name[-1])))

    return on_a_pod(action)


@on_a_pod
def kubelet_ends_a_deleted_pod(world: World, name: str) -> None:
    if world.read(name).deleting:
        del world.pods[name]


@on_a_pod
def is_seen_ended_while_deleting(world: World, name: str) -> None:
    if world.read(name).deleting:
        world.happens(name, ended(1, a_summary(0, -15, "", world.now), when=world.now))


@on_a_pod
def user_deletes_a_pod(world: World, name: str) -> None:
    world.ask_to_delete(name, world.pods[name]["metadata"]["uid"], None)


@on_a_pod
def user_deletes_a_pod_by_force(world: World, name: str) -> None:
    world.ask_to_delete(name, world.pods[name]["metadata"]["uid"], 0)


@on_a_pod
def starts(world: World, name: str) -> None:
    if world.read(name).state is TrainerState.PENDING:
        world.happens(name, running())


def quota_comes(world: World, choice: int) -> None:
    world.quota = (Reason.QUOTA, Reason.POD_SECURITY, Reason.NAME_IN_USE)[choice % 3]


def quota_goes(world: World, choice: int) -> None:
    world.quota = None


def api_server_calls_pods_invalid(world: World, choice: int) -> None:
    world.quota = Reason.INVALID_POD


def user_resizes(world: World, choice: int) -> None:
    world.manifest["spec"]["nodes"] = 1 + choice % 4
    world.manifest["metadata"]["generation"] += 1


def user_deletes_the_job(world: World, choice: int) -> None:
    world.manifest["metadata"]["deletionTimestamp"] = format_time(world.now)


def time_passes(world: World, choice: int) -> None:
    world.now += timedelta(seconds=(1, 5, 30, 200, 400)[choice % 5])


def operator_looks(world: World, choice: int) -> None:
    world.look()


def operator_dies_after_the_status(world: World, choice: int) -> None:
    world.look(dies_after="status")


def operator_dies_after_the_deletes(world: World, choice: int) -> None:
    world.look(dies_after="deletes")


def everybody_starts(world: World, choice: int) -> None:
    for name in sorted(world.pods):
        if world.read(name).state is TrainerState.PENDING:
            world.happens(name, running())


def every_old_pod_ends(world: World, choice: int) -> None:
    for name in sorted(world.pods):
        if world.read(name).deleting:
            del world.pods[name]


def everybody_succeeds(world: World, choice: int) -> None:
    for name in world.current():
        if world.read(name).state is TrainerState.RUNNING:
            world.happens(name, succeeded('{"loss": 1}', when=world.now))


ACCIDENTS = (
    reports(lambda now, index: ended(1, a_summary(index, when=now), when=now)),
    reports(lambda now, index: ended(1, a_follower(index, when=now), when=now)),
    reports(lambda now, index: ended(1, "", when=now)),
    reports(lambda now, index: oom_killed(when=now)),
    reports(lambda now, index: evicted(when=now)),
    reports(lambda now, index: refused_by_kubelet()),
    reports(lambda now, index: ended(137, when=now, conditions=[disruption_target(when=now)])),
    reports(lambda now, index: unschedulable()),
    reports(lambda now, index: waiting("ImagePullBackOff", "no such image")),
    reports(lambda now, index: succeeded(when=now)),
    reports(lambda now, index: succeeded(when=now, phase="Running")),
    is_seen_ended_while_deleting,
    user_deletes_a_pod,
    user_deletes_a_pod_by_force,
    user_resizes,
    quota_comes,
    quota_goes,
    operator_dies_after_the_status,
    operator_dies_after_the_deletes,
)

ORDINARY = (
    operator_looks,
    everybody_starts,
    every_old_pod_ends,
    starts,
    kubelet_ends_a_deleted_pod,
    time_passes,
    everybody_succeeds,
)

LAST = (user_deletes_the_job, api_server_calls_pods_invalid)
"""Seldom: after them not much can happen."""


def behave(world: World) -> None:
    """The world stops misbehaving: pods start, run to their end and succeed; what is deleted ends.

    The operator looks again only where a pod has changed or it asked to be woken; where neither is so, nothing more
    will ever happen.
    """
    world.quota = None
    world.settle()
    for _ in range(60):
        before = str(world.pods)
        every_old_pod_ends(world, 0)
        _gang_makes_progress(world)
        wake = world.plan().wake_after
        if world.status.finished or (before == str(world.pods) and wake is None):
            return
        world.now += timedelta(seconds=wake or 1)
        world.settle()


def _gang_makes_progress(world: World) -> None:
    """Let every pod start; once every node has started or succeeded, let all end well."""
    gang = [world.read(name) for name in world.current()]
    # The pod of a node that has succeeded may be gone.
    present = {pod.index for pod in gang} | set(world.status.succeeded_nodes)
    if len(present) == world.status.pods.desired and all(pod.started for pod in gang):
        everybody_succeeds(world, 0)
    everybody_starts(world, 0)
