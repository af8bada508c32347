"""The possible events in the simulated cluster of world.py, one small function each.

An action takes the world and a number. The number chooses a pod, a node, a size or a time.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from builders.containers import (
    ended,
    oom_killed,
    running,
    starting,
    succeeded,
    waiting,
    without_end_time,
)
from builders.messages import agent_report, follower_summary, torchrun_summary, torchrun_tail
from builders.nodes import a_node
from builders.pods import a_stray
from builders.surroundings import (
    disruption_target,
    evicted,
    not_ready,
    over_own_limit,
    rejected_by_kubelet,
    scheduling_gated,
    shut_down,
    unschedulable,
)
from world import CORDON, SPOT_TAINT, World

from ddpjob.core.api.history import OlderGang
from ddpjob.core.api.queue import DEFAULT_QUEUE
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.dead_nodes import OUT_OF_SERVICE
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import ApiState, Pod, TrainerState

Action = Callable[[World, int], None]
PodAction = Callable[[World, Pod], None]

# Differences between the clocks of the kubelets and the operator's, in seconds.
SKEWS = (0, 0, 0, -3600, 3600)

# Seconds of waiting, and seconds by which the operator's clock is set forward or back.
WAITS = (1, 5, 12, 31, 70, 200, 400)
JUMPS = (-7200, -90, -5, 40, 900)

RENDEZVOUS_TIMEOUT = torchrun_tail("rendezvous-timeout")

# Within so many steps, a cluster without accidents must have ended its job.
MAX_STEPS = 80


def on_a_pod(action: PodAction) -> Action:
    """Turn an action on a pod into one that chooses the pod by its number."""

    def act(world: World, choice: int) -> None:
        existing = world.existing()
        if existing:
            action(world, existing[sorted(existing)[choice % len(existing)]])

    act.__name__ = action.__name__
    return act


def kubelet_reports(name: str, make_status: Callable[[datetime, int], dict[str, Any]]) -> Action:
    """Return the action of a kubelet that reports a status.

    `make_status` takes the kubelet's time and the index of the node.
    """

    def act(world: World, pod: Pod) -> None:
        skew = SKEWS[world.created % len(SKEWS)]
        world.report(pod.name, make_status(world.now + timedelta(seconds=skew), pod.index))

    act.__name__ = f"kubelet_reports_{name}"
    return on_a_pod(act)


def name_of_node(choice: int) -> str:
    """Return one of the usual nodes of the gang's pods."""
    return f"node-{choice % 4}"


# The observation


def operator_sees_everything_and_runs(world: World, choice: int) -> None:
    world.operator.receive_everything()
    world.operator.run()


def operator_runs_with_what_it_has_seen(world: World, choice: int) -> None:
    world.operator.run()


def operator_sees_the_next_version_of_the_job(world: World, choice: int) -> None:
    world.operator.receive_job()


def operator_sees_the_nodes(world: World, choice: int) -> None:
    world.operator.receive_nodes()


def operator_sees_the_next_version_of_a_pod(world: World, choice: int) -> None:
    if world.pods:
        world.operator.receive_pod(sorted(world.pods)[choice % len(world.pods)])


def operator_writes_progress_late(world: World, choice: int) -> None:
    world.operator.throttled = choice % 2 == 0


def operator_sees_the_queue(world: World, choice: int) -> None:
    world.operator.receive_queue()


# The queue


def queue_admits_the_job(world: World, choice: int) -> None:
    """Give the job room, unless its Workload still has the room taken away."""
    for workload in world.queue.unfinished():
        if not workload.deleting and not workload.has_quota:
            granted = {"QuotaReserved": (True, "QuotaReserved"), "Admitted": (True, "Admitted")}
            flavors = [{"name": "main", "flavors": {"cpu": "workers"}, "count": workload.count}]
            world.queue.set_conditions(
                workload.name,
                {"podSetAssignments": flavors},
                **granted,
                Evicted=(False, "QuotaReserved"),
            )


def queue_evicts_the_job(world: World, choice: int) -> None:
    for workload in world.queue.unfinished():
        if workload.has_quota:
            reason = ("Preempted", "ClusterQueueStopped", "PodsReadyTimeout")[choice % 3]
            world.queue.set_conditions(workload.name, None, Evicted=(True, reason))


def queue_has_no_room(world: World, choice: int) -> None:
    for workload in world.queue.unfinished():
        if not workload.has_quota:
            world.queue.set_conditions(workload.name, None, QuotaReserved=(False, "Pending"))


def administrator_deletes_the_workloads(world: World, choice: int) -> None:
    for workload in world.queue.workloads:
        world.queue.delete(workload.name)


def administrator_removes_the_workloads_at_once(world: World, choice: int) -> None:
    for workload in world.queue.workloads:
        world.queue.forget(workload.name)


def user_chooses_another_queue(world: World, choice: int) -> None:
    if world.job.queue:
        world.move_job(f"team-{choice % 2}")


def user_loses_the_label_of_the_default_queue(world: World, choice: int) -> None:
    """Replace the job by a manifest without a queue, as `kubectl replace` does."""
    queue = world.job.queue
    if queue and queue.name == DEFAULT_QUEUE:
        world.move_job("")


def administrator_makes_a_default_queue(world: World, choice: int) -> None:
    world.queue.takes_all = True


def administrator_removes_the_default_queue(world: World, choice: int) -> None:
    world.queue.takes_all = False


def operator_does_not_know_the_default_queue(world: World, choice: int) -> None:
    world.queue.takes_all = None


def queue_cannot_be_read(world: World, choice: int) -> None:
    world.queue.state = (ApiState.ABSENT, ApiState.UNREADABLE, ApiState.UNKNOWN)[choice % 3]


def queue_can_be_read_again(world: World, choice: int) -> None:
    world.queue.state = ApiState.SERVED


# The operator


def operator_stops_after_the_status(world: World, choice: int) -> None:
    world.operator.run(stop_after="status")


def operator_stops_after_the_assignments(world: World, choice: int) -> None:
    world.operator.run(stop_after="assignments")


def operator_stops_after_the_deletions(world: World, choice: int) -> None:
    world.operator.run(stop_after="deletions")


def operator_restarts(world: World, choice: int) -> None:
    world.restart_operator()


def another_operator_writes_a_status(world: World, choice: int) -> None:
    """Let an operator without its Lease write a status, from whatever it has seen."""
    if choice % 2:
        world.other.receive_job()
    elif choice % 3 == 0:
        world.other.receive_everything()
    world.other.run(stop_after="status")


# Time


def time_passes(world: World, choice: int) -> None:
    world.now += timedelta(seconds=WAITS[choice % len(WAITS)])


def clock_jumps(world: World, choice: int) -> None:
    world.now += timedelta(seconds=JUMPS[choice % len(JUMPS)])


# Kubelets


def all_pods_start(world: World, choice: int) -> None:
    for name, pod in sorted(world.existing().items()):
        if pod.state is TrainerState.PENDING:
            world.report(name, starting())
    world.workers_meet()


def all_deleted_pods_end(world: World, choice: int) -> None:
    for name, pod in sorted(world.existing().items()):
        if pod.deleting and world.answers(pod):
            world.remove_pod(name)


def all_running_nodes_succeed(world: World, choice: int) -> None:
    for pod in world.gang():
        if pod.state is TrainerState.RUNNING:
            world.report(pod.name, succeeded('{"loss": 1}', when=world.now))


def the_gang_starts(world: World, choice: int) -> None:
    """Let the cluster do, in the usual order, what brings the attempt to run."""
    all_deleted_pods_end(world, choice)
    for _ in range(3):
        operator_sees_everything_and_runs(world, choice)
    all_pods_start(world, choice)
    operator_sees_everything_and_runs(world, choice)


@on_a_pod
def kubelet_starts_a_pod(world: World, pod: Pod) -> None:
    if pod.state is TrainerState.PENDING:
        world.report(pod.name, starting())


@on_a_pod
def kubelet_removes_a_deleted_pod(world: World, pod: Pod) -> None:
    if pod.deleting and world.answers(pod):
        world.remove_pod(pod.name)


@on_a_pod
def kubelet_reports_sigterm(world: World, pod: Pod) -> None:
    if pod.deleting:
        summary = torchrun_summary(0, -15, "", world.now)
        world.report(pod.name, ended(1, summary, when=world.now))


# Agents


def workers_meet(world: World, choice: int) -> None:
    world.workers_meet()


@on_a_pod
def workers_stop_to_give_heartbeats(world: World, pod: Pod) -> None:
    if pod.state is TrainerState.RUNNING and world.answers(pod):
        world.put_pod({**world.body(pod.name), "status": starting()})


@on_a_pod
def agent_reports_a_failure(world: World, pod: Pod) -> None:
    if pod.state is TrainerState.RUNNING:
        report = agent_report(pod.attempt, rank=pod.index)
        world.report(pod.name, ended(1, report, when=world.now))


@on_a_pod
def agent_reports_an_error_before_the_first_step(world: World, pod: Pod) -> None:
    if pod.state is TrainerState.RUNNING:
        error = "ModuleNotFoundError: No module named 'tqdm'"
        report = agent_report(pod.attempt, rank=pod.index, exception=error)
        world.report(pod.name, ended(1, report, when=world.now))


@on_a_pod
def agent_reports_a_failure_without_progress(world: World, pod: Pod) -> None:
    if pod.state is TrainerState.RUNNING:
        steps = {str(attempt): [7, 7] for attempt in range(pod.born, pod.attempt + 1)}
        report = agent_report(pod.attempt, rank=pod.index, steps=steps)
        world.report(pod.name, ended(1, report, when=world.now))


@on_a_pod
def agent_reports_a_hang(world: World, pod: Pod) -> None:
    if pod.state is TrainerState.RUNNING:
        report = agent_report(pod.attempt, "Hang", exception="no heartbeat for 60 s")
        world.report(pod.name, ended(1, report, when=world.now))


@on_a_pod
def agent_waited_in_vain(world: World, pod: Pod) -> None:
    """End a pod after the loss of its peer. Its next assignment comes too late, or never."""
    if pod.state is TrainerState.RUNNING:
        # It may have been told, and not have read it.
        attempt = max(pod.born, pod.attempt - world.created % 2)
        report = agent_report(attempt, "Follower", rank=pod.index, exception="connection closed")
        world.report(pod.name, ended(1, report, when=world.now))


# Nodes


def node_is_unreachable(world: World, choice: int) -> None:
    """Let a node stop, and its pods become not ready, as Kubernetes sees it after 40 s."""
    name = name_of_node(choice)
    world.change_node(name, read_node(a_node(name, "Unknown")))
    for pod in world.existing().values():
        if pod.node_name == name and pod.state is TrainerState.RUNNING:
            body = world.body(pod.name)
            world.put_pod({**body, "status": not_ready(body["status"])})


def kubernetes_evicts_the_pods_of_a_node(world: World, choice: int) -> None:
    for pod in world.existing().values():
        if pod.node_name == name_of_node(choice) and not world.answers(pod):
            world.delete_pod(pod.name, pod.uid, None)


def most_nodes_are_unreachable(world: World, choice: int) -> None:
    for number in range(4):
        node_is_unreachable(world, number)


def node_is_not_ready(world: World, choice: int) -> None:
    world.change_node(name_of_node(choice), read_node(a_node(name_of_node(choice), "False")))


def node_is_gone(world: World, choice: int) -> None:
    world.change_node(name_of_node(choice), None)


def node_is_out_of_service(world: World, choice: int) -> None:
    name = name_of_node(choice)
    world.change_node(name, read_node(a_node(name, "Unknown", OUT_OF_SERVICE)))


def node_gets_a_spot_notice(world: World, choice: int) -> None:
    world.change_node(
        name_of_node(choice), read_node(a_node(name_of_node(choice), "True", SPOT_TAINT))
    )


def node_is_cordoned(world: World, choice: int) -> None:
    world.change_node(name_of_node(choice), read_node(a_node(name_of_node(choice), "True", CORDON)))


def node_returns(world: World, choice: int) -> None:
    name = name_of_node(choice)
    world.change_node(name, read_node(a_node(name)))


# Users and administrators


@on_a_pod
def user_deletes_a_pod(world: World, pod: Pod) -> None:
    world.delete_pod(pod.name, pod.uid, None)


@on_a_pod
def user_deletes_a_pod_by_force(world: World, pod: Pod) -> None:
    world.delete_pod(pod.name, pod.uid, 0)


@on_a_pod
def user_copies_a_pod(world: World, pod: Pod) -> None:
    status = running() if world.created % 2 else succeeded()
    add_stray(world, a_stray(pod.index + world.created % 3, status, attempt=pod.attempt))


def user_creates_a_pod_beyond_the_gang(world: World, choice: int) -> None:
    attempt = world.status.attempt.number
    name = f"digits-{attempt}-7"
    # Without an attempt it could be a pod of a gang with a wiped status.
    if attempt is not None:
        add_stray(world, a_stray(7, running(), name=name, attempt=attempt))


def add_stray(world: World, body: dict[str, Any]) -> None:
    node = world.fitting_node(0)
    if node and body["metadata"]["name"] not in world.existing():
        world.put_pod({**body, "spec": {"nodeName": node}})


def user_changes_the_number_of_nodes(world: World, choice: int) -> None:
    world.change_spec(nodes=1 + choice % 4)


def user_suspends_the_job(world: World, choice: int) -> None:
    world.change_spec(suspend=True)


def user_resumes_the_job(world: World, choice: int) -> None:
    world.change_spec(suspend=False)


def user_retries_the_job(world: World, choice: int) -> None:
    """Raise spec.retries. This takes up only a failed job again."""
    world.change_spec(retries=world.job.spec.lifecycle.retries + 1)


def user_sets_a_deadline(world: World, choice: int) -> None:
    field = ("activeDeadlineSeconds", "startupDeadlineSeconds")[choice % 2]
    world.change_spec(**{field: (60, 3000, None)[choice % 3]})


def user_wipes_the_status(world: World, choice: int) -> None:
    world.set_status({})


def user_restores_an_old_status(world: World, choice: int) -> None:
    """Write the job's status of some versions ago, as a restored backup would."""
    old = world.jobs[-1 - choice % len(world.jobs)]
    world.set_status(old.status.to_dict())


def user_deletes_the_job(world: World, choice: int) -> None:
    world.delete_job()


def crd_gets_a_new_field(world: World, choice: int) -> None:
    """Give the job a field unknown to the operator, by its default."""
    world.manifest["spec"] = {**world.manifest["spec"], f"field{choice % 2}": True}
    world.changed()


def api_server_begins_to_refuse_pods(world: World, choice: int) -> None:
    reasons = (Reason.QUOTA, Reason.POD_SECURITY, Reason.NAME_IN_USE)
    world.refuse_pods = reasons[choice % len(reasons)]


def api_server_accepts_pods_again(world: World, choice: int) -> None:
    world.refuse_pods = None


def api_server_finds_the_pods_invalid(world: World, choice: int) -> None:
    world.refuse_pods = Reason.INVALID_POD


def an_older_gang_is_incomplete(world: World, choice: int) -> None:
    world.older_gang = OlderGang("uid-of-older", "older")


def the_older_gang_runs(world: World, choice: int) -> None:
    world.older_gang = None


REPORTS = {
    "a_failure": lambda now, index: ended(1, torchrun_summary(index, when=now), when=now),
    "a_lost_peer": lambda now, index: ended(1, follower_summary(index, when=now), when=now),
    "an_end_without_a_text": lambda now, index: ended(1, when=now),
    "an_end_without_a_time": lambda now, index: without_end_time(ended(1)),
    "an_end_after_a_reboot": lambda now, index: ended(255, reason="Unknown", when=now),
    "a_non_retryable_code": lambda now, index: ended(1, torchrun_summary(index, 2, "", now)),
    "a_rendezvous_without_its_peers": lambda now, index: ended(1, RENDEZVOUS_TIMEOUT, when=now),
    "oom": lambda now, index: oom_killed(when=now),
    "an_eviction": lambda now, index: evicted(when=now),
    "a_limit_of_its_own": lambda now, index: over_own_limit(when=now),
    "a_refused_pod": lambda now, index: rejected_by_kubelet(),
    "a_drain": lambda now, index: ended(137, when=now, conditions=[disruption_target(when=now)]),
    "a_shutdown": lambda now, index: shut_down(),
    "no_room": lambda now, index: unschedulable(),
    "a_scheduling_gate": lambda now, index: scheduling_gated(),
    "no_image": lambda now, index: waiting("ImagePullBackOff", "no such image"),
    "success": lambda now, index: succeeded(when=now),
    "success_before_the_phase": lambda now, index: succeeded(when=now, phase="Running"),
}

# What happens in every cluster, most of the time.
ORDINARY = (
    operator_sees_everything_and_runs,
    operator_runs_with_what_it_has_seen,
    the_gang_starts,
    the_gang_starts,
    all_pods_start,
    all_deleted_pods_end,
    kubelet_starts_a_pod,
    kubelet_removes_a_deleted_pod,
    time_passes,
    workers_meet,
    all_running_nodes_succeed,
)

OBSERVING = (
    operator_sees_the_next_version_of_the_job,
    operator_sees_the_next_version_of_a_pod,
    operator_sees_the_next_version_of_a_pod,
    operator_sees_the_nodes,
    operator_sees_the_queue,
    operator_writes_progress_late,
    operator_stops_after_the_status,
    operator_stops_after_the_assignments,
    operator_stops_after_the_deletions,
    operator_restarts,
    another_operator_writes_a_status,
)

FAILING = (
    *(kubelet_reports(name, make) for name, make in REPORTS.items()),
    agent_reports_a_failure,
    agent_reports_a_failure_without_progress,
    agent_reports_an_error_before_the_first_step,
    agent_reports_a_hang,
    agent_waited_in_vain,
    workers_stop_to_give_heartbeats,
)

OF_NODES = (
    node_is_unreachable,
    kubernetes_evicts_the_pods_of_a_node,
    most_nodes_are_unreachable,
    node_is_not_ready,
    node_is_gone,
    node_is_out_of_service,
    node_gets_a_spot_notice,
    node_is_cordoned,
    node_returns,
)

OF_QUEUES = (
    queue_admits_the_job,
    queue_admits_the_job,
    queue_evicts_the_job,
    queue_has_no_room,
    administrator_deletes_the_workloads,
    administrator_removes_the_workloads_at_once,
    user_chooses_another_queue,
    user_loses_the_label_of_the_default_queue,
    administrator_makes_a_default_queue,
    administrator_removes_the_default_queue,
    operator_does_not_know_the_default_queue,
    queue_cannot_be_read,
    queue_can_be_read_again,
)

OF_USERS = (
    kubelet_reports_sigterm,
    user_deletes_a_pod,
    user_deletes_a_pod_by_force,
    user_copies_a_pod,
    user_creates_a_pod_beyond_the_gang,
    user_changes_the_number_of_nodes,
    user_suspends_the_job,
    user_resumes_the_job,
    user_retries_the_job,
    user_sets_a_deadline,
    crd_gets_a_new_field,
    api_server_begins_to_refuse_pods,
    api_server_accepts_pods_again,
    an_older_gang_is_incomplete,
    the_older_gang_runs,
    clock_jumps,
)

# Drawn rarely. After most of them not much can happen.
RARE = (
    user_deletes_the_job,
    api_server_finds_the_pods_invalid,
    user_wipes_the_status,
    user_restores_an_old_status,
)


# The end of the accidents


def calm_down(world: World) -> None:
    """End what keeps a job from running, but leave dead nodes dead if the operator can see them."""
    world.refuse_pods = None
    world.older_gang = None
    world.queue.state = ApiState.SERVED
    world.queue.takes_all = bool(world.queue.takes_all)
    if world.job.spec and world.job.spec.lifecycle.suspended:
        world.change_spec(suspend=False)
    nodes = world.nodes[-1]
    if not world.reads_nodes or 2 * sum(node.health != "True" for node in nodes.values()) > len(
        nodes
    ):
        for number in range(4):
            node_returns(world, number)
    for name, node in nodes.items():
        # The kubelet of such a node still ends its pods.
        if node.health == "False":
            world.change_node(name, replace(read_node(a_node(name)), taints=node.taints))


def run_without_accidents(world: World) -> None:
    """Let pods start, run and succeed, and deleted pods end, until the job ends.

    The operator runs only if something has changed or if it asked to be woken. Without either,
    nothing more can happen.
    """
    calm_down(world)
    world.settle()
    for _ in range(MAX_STEPS):
        before = _what_exists(world)
        all_deleted_pods_end(world, 0)
        queue_admits_the_job(world, 0)
        _advance_gang(world)
        wake = world.operator.plan().wake_after
        if world.status.finished or world.job.deleting:
            return
        if before == _what_exists(world) and wake is None:
            return
        world.now += timedelta(seconds=wake or 1)
        world.settle()


def _what_exists(world: World) -> object:
    return world.existing(), world.queue.workloads


def _advance_gang(world: World) -> None:
    """Let every pod start, and once all have met or succeeded, let all succeed."""
    gang = world.gang()
    # After its success, the pod of a node may be gone.
    present = {pod.index for pod in gang} | set(world.status.attempt.succeeded_nodes)
    has_met = all(pod.ready or pod.ended for pod in gang)
    if len(present) >= world.status.pods.desired and has_met:
        all_running_nodes_succeed(world, 0)
    all_pods_start(world, 0)
