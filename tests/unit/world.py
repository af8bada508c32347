"""A simulated cluster for Hypothesis: one job, its pods, the operator, kubelets, and users.

The operator carries its plans out as the controller does: it writes the status first, then deletes
pods, then creates pods. A running pod goes on after its deletion until its kubelet has ended it.
What happens between two turns of the operator is drawn at random.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from builders import (
    NOW,
    a_manifest,
    a_pod,
    disruption_target,
    ended,
    evicted,
    follower_summary,
    is_scheduled,
    oom_killed,
    rejected_by_kubelet,
    running,
    succeeded,
    torchrun_summary,
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

# Turns after which the operator must have come to rest.
MAX_TURNS = 8

# Steps after which a cluster without accidents must have ended its job.
MAX_STEPS = 60

# Seconds that a pod may take to end if the deletion names no grace period.
GRACE = 45

# Seconds after which the operator retries what the API server refused.
RETRY_AFTER = 4


@dataclass
class Turn:
    """One turn of the operator: what it observed and what it planned."""

    observed: Observation
    plan: Plan


@dataclass
class World:
    """The state of the cluster.

    `pods` are those in the API server, by name. `refuse_pods` is the reason for which the API
    server refuses new pods, or None. `refusal` is what the operator remembers of that.
    """

    manifest: dict
    now: datetime = NOW
    pods: dict[str, dict] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list, repr=False)
    refusal: Refusal | None = None
    refuse_pods: Reason | None = None
    created: int = 0

    # The operator

    def observe(self) -> Observation:
        pods = [self.read(name) for name in self.pods]
        return observe(Job.from_dict(self.manifest), pods, self.refusal)

    def plan(self) -> Plan:
        return decide(self.observe(), self.now)

    def run_operator(self, stop_after: str = "") -> Plan:
        """Run one turn of the operator.

        It may stop after the write of the "status" or after the "deletions". Then it also forgets
        the refusal.
        """
        observed = self.observe()
        plan = decide(observed, self.now)
        self.turns.append(Turn(observed, plan))
        assert all(name not in self.pods for name in plan.confirm)
        self.manifest["status"] = plan.status.to_dict()
        if stop_after == "status":
            self.refusal = None
            return plan
        for delete in plan.delete:
            self.delete_pod(delete.name, delete.uid, delete.grace)
        if stop_after == "deletions":
            self.refusal = None
            return plan
        if plan.create:
            self.create_pods(plan)
        return plan

    def settle(self) -> None:
        """Run the operator until nothing changes any more."""
        for _ in range(MAX_TURNS):
            before = self.manifest.get("status"), sorted(self.pods), self.refusal
            plan = self.run_operator()
            after = self.manifest["status"], sorted(self.pods), self.refusal
            if plan.wake_after != 0 and before == after:
                return
        raise AssertionError("the operator does not come to rest")

    # The API server

    def create_pods(self, plan: Plan) -> None:
        if self.refuse_pods:
            retry_at = self.now + timedelta(seconds=RETRY_AFTER)
            final = self.refuse_pods is Reason.INVALID_POD
            self.refusal = Refusal(self.refuse_pods, "refused", retry_at, final)
            return
        self.refusal = None
        attempt = plan.status.attempt
        assert attempt is not None
        for index in plan.create:
            name = pod_name("digits", attempt, index)
            assert name not in self.pods
            self.created += 1
            pod = a_pod(index, attempt=attempt)
            pod["metadata"]["uid"] = f"uid-{self.created}"
            self.pods[name] = pod

    def delete_pod(self, name: str, uid: str, grace: int | None) -> None:
        """Delete a pod. One that a kubelet still has to end only gets a deletion timestamp."""
        pod = self.pods.get(name)
        if not pod or pod["metadata"]["uid"] != uid:
            return
        has_ended = pod["status"]["phase"] in ("Succeeded", "Failed")
        if grace == 0 or not pod["spec"] or has_ended:
            del self.pods[name]
            return
        seconds = GRACE if grace is None else grace
        deadline = self.now + timedelta(seconds=seconds)
        pod["metadata"]["deletionTimestamp"] = format_time(deadline)
        pod["metadata"]["deletionGracePeriodSeconds"] = seconds

    # The kubelets

    def report(self, name: str, status: dict) -> None:
        """Set the status of a pod, if a kubelet can report it now.

        A kubelet reports nothing after the end of a pod, starts no pod that is being deleted, and
        reports no pod as waiting that has started.
        """
        pod = self.read(name)
        starts = status["phase"] == "Running" and not pod.started
        waits = status["phase"] == "Pending"
        if pod.ended or (pod.deleting and (starts or waits)) or (pod.started and waits):
            return
        self.pods[name]["spec"] = {"nodeName": f"node-{pod.index}"} if is_scheduled(status) else {}
        self.pods[name]["status"] = status

    # The state

    def read(self, name: str) -> Pod:
        pod = read_pod(self.pods[name])
        assert pod is not None
        return pod

    @property
    def status(self) -> Status:
        return Status.from_dict(self.manifest.get("status"))

    def current_pods(self) -> list[str]:
        """Return the names of the current attempt's pods."""
        return [name for name in self.pods if self.read(name).attempt == self.status.attempt]


def a_world(nodes: int, max_restarts: int, max_disruptions: int) -> World:
    policy = {"maxRestarts": max_restarts, "maxDisruptions": max_disruptions}
    return World(a_manifest(nodes=nodes, failurePolicy=policy))


# What may happen. Each action takes the world and a number that chooses a pod, a size or a time.

Action = Callable[[World, int], None]


def on_a_pod(action: Callable[[World, str], None]) -> Action:
    """Turn an action on a pod into one that chooses the pod by its number."""

    def act(world: World, choice: int) -> None:
        if world.pods:
            action(world, sorted(world.pods)[choice % len(world.pods)])

    return act


def kubelet_reports(make_status: Callable[[datetime, int], dict]) -> Action:
    """Return the action that a kubelet reports a status.

    `make_status` takes the time and the index of the node.
    """

    def action(world: World, name: str) -> None:
        world.report(name, make_status(world.now, world.read(name).index))

    return on_a_pod(action)


@on_a_pod
def kubelet_removes_a_deleted_pod(world: World, name: str) -> None:
    if world.read(name).deleting:
        del world.pods[name]


@on_a_pod
def kubelet_reports_sigterm(world: World, name: str) -> None:
    if world.read(name).deleting:
        summary = torchrun_summary(0, -15, "", world.now)
        world.report(name, ended(1, summary, when=world.now))


@on_a_pod
def kubelet_starts_a_pod(world: World, name: str) -> None:
    if world.read(name).state is TrainerState.PENDING:
        world.report(name, running())


@on_a_pod
def user_deletes_a_pod(world: World, name: str) -> None:
    world.delete_pod(name, world.pods[name]["metadata"]["uid"], None)


@on_a_pod
def user_deletes_a_pod_without_grace(world: World, name: str) -> None:
    world.delete_pod(name, world.pods[name]["metadata"]["uid"], 0)


def api_server_begins_to_refuse_pods(world: World, choice: int) -> None:
    reasons = (Reason.QUOTA, Reason.POD_SECURITY, Reason.NAME_IN_USE)
    world.refuse_pods = reasons[choice % len(reasons)]


def api_server_accepts_pods_again(world: World, choice: int) -> None:
    world.refuse_pods = None


def api_server_finds_the_pods_invalid(world: World, choice: int) -> None:
    world.refuse_pods = Reason.INVALID_POD


def user_changes_the_number_of_nodes(world: World, choice: int) -> None:
    world.manifest["spec"]["nodes"] = 1 + choice % 4
    world.manifest["metadata"]["generation"] += 1


def user_deletes_the_job(world: World, choice: int) -> None:
    world.manifest["metadata"]["deletionTimestamp"] = format_time(world.now)


def crd_gets_a_new_field(world: World, choice: int) -> None:
    """Give the job a field that the operator does not know, by its default."""
    world.manifest["spec"][f"field{choice % 2}"] = True


def time_passes(world: World, choice: int) -> None:
    seconds = (1, 5, 30, 200, 400)
    world.now += timedelta(seconds=seconds[choice % len(seconds)])


def operator_runs(world: World, choice: int) -> None:
    world.run_operator()


def operator_stops_after_the_status(world: World, choice: int) -> None:
    world.run_operator(stop_after="status")


def operator_stops_after_the_deletions(world: World, choice: int) -> None:
    world.run_operator(stop_after="deletions")


def all_pods_start(world: World, choice: int) -> None:
    for name in sorted(world.pods):
        if world.read(name).state is TrainerState.PENDING:
            world.report(name, running())


def all_deleted_pods_end(world: World, choice: int) -> None:
    for name in sorted(world.pods):
        if world.read(name).deleting:
            del world.pods[name]


def all_running_nodes_succeed(world: World, choice: int) -> None:
    for name in world.current_pods():
        if world.read(name).state is TrainerState.RUNNING:
            world.report(name, succeeded('{"loss": 1}', when=world.now))


ACCIDENTS = (
    kubelet_reports(lambda now, index: ended(1, torchrun_summary(index, when=now), when=now)),
    kubelet_reports(lambda now, index: ended(1, follower_summary(index, when=now), when=now)),
    kubelet_reports(lambda now, index: ended(1, "", when=now)),
    kubelet_reports(lambda now, index: oom_killed(when=now)),
    kubelet_reports(lambda now, index: evicted(when=now)),
    kubelet_reports(lambda now, index: rejected_by_kubelet()),
    kubelet_reports(
        lambda now, index: ended(137, when=now, conditions=[disruption_target(when=now)])
    ),
    kubelet_reports(lambda now, index: unschedulable()),
    kubelet_reports(lambda now, index: waiting("ImagePullBackOff", "no such image")),
    kubelet_reports(lambda now, index: succeeded(when=now)),
    kubelet_reports(lambda now, index: succeeded(when=now, phase="Running")),
    kubelet_reports_sigterm,
    user_deletes_a_pod,
    user_deletes_a_pod_without_grace,
    user_changes_the_number_of_nodes,
    crd_gets_a_new_field,
    api_server_begins_to_refuse_pods,
    api_server_accepts_pods_again,
    operator_stops_after_the_status,
    operator_stops_after_the_deletions,
)

ORDINARY = (
    operator_runs,
    all_pods_start,
    all_deleted_pods_end,
    kubelet_starts_a_pod,
    kubelet_removes_a_deleted_pod,
    time_passes,
    all_running_nodes_succeed,
)

# Rarely drawn, because not much can happen after them.
FINAL = (user_deletes_the_job, api_server_finds_the_pods_invalid)


def run_without_accidents(world: World) -> None:
    """Let pods start, run and succeed, and deleted pods end, until the job ends.

    The operator runs only if a pod has changed or if it asked to be woken. Without either, nothing
    more can happen.
    """
    world.refuse_pods = None
    world.settle()
    for _ in range(MAX_STEPS):
        before = str(world.pods)
        all_deleted_pods_end(world, 0)
        _advance_gang(world)
        wake = world.plan().wake_after
        if world.status.finished or (before == str(world.pods) and wake is None):
            return
        world.now += timedelta(seconds=wake or 1)
        world.settle()


def _advance_gang(world: World) -> None:
    """Let every pod start, and once every node has started or succeeded, let all succeed."""
    gang = [world.read(name) for name in world.current_pods()]
    # The pod of a node that has succeeded may be gone.
    present = {pod.index for pod in gang} | set(world.status.succeeded_nodes)
    if len(present) == world.status.pods.desired and all(pod.started for pod in gang):
        all_running_nodes_succeed(world, 0)
    all_pods_start(world, 0)
