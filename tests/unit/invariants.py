"""Invariants of every history of a job. Each function raises AssertionError if its own is broken.

They look at turns of the operator. A turn counts only if the API server accepted its status, since
only then the operator acts on it.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from builders.jobs import changed
from builders.times import NOW
from world import Turn, World

from ddpjob.core.api.conditions import stamp_conditions
from ddpjob.core.api.names import Cause, Condition, Phase
from ddpjob.core.api.queue import DEFAULT_QUEUE
from ddpjob.core.api.status import Status
from ddpjob.core.decide.dead_nodes import OUT_OF_SERVICE
from ddpjob.core.decide.deletions import LOST_PEERS
from ddpjob.core.observe.observation import ApiState, NodeHealth, Pod

# Causes that use up maxRestarts. After these, a gang cannot write a checkpoint any more.
BROKEN = (Cause.FAILURE, Cause.HANG)

# Possible events beside the one for a change of the job.
ASIDE = ("UnknownFields", "StrayPods")


def written(world: World) -> Iterator[tuple[Turn, Status, Status]]:
    """Return the turns with a changed status, with the old and the new one."""
    for turn in world.turns:
        if turn.written:
            yield turn, turn.observed.status, turn.plan.status


def is_recovery(turn: Turn) -> bool:
    return turn.observed.status_is_behind


# Entries of the history added by a pod's report.
REPORTED_LATER = dict.fromkeys(
    ("first_step", "last_step", "total_steps", "steps_lost", "training_time", "untrained_seconds")
)


def without_surroundings(status: Status) -> Status:
    """Return a finished status without its parts that may still change.

    These are the observed generation, the count of running pods, the information about Kubernetes
    nodes and stray pods, and the report of a pod that ends later: its steps, and the start of its
    training.
    """
    attempts = tuple(replace(ended, **REPORTED_LATER) for ended in status.attempts)
    return changed(
        status,
        attempts=attempts,
        seconds={"all": sum(status.account.seconds.values())},
        observed_generation=0,
        conditions=stamp_conditions(status.conditions, 0, NOW),
        pods=replace(status.pods, active=0, ready=0),
        unreachable_nodes=(),
        stray_pods=(),
        active_since=None,
        starting_since=None,
        active_seconds=0,
    )


# Never two attempts at once, never two pods of one index


def pods_of_two_attempts_never_run_at_the_same_time(world):
    assert world.violations == []


def pods_are_created_only_when_no_older_pod_runs(world):
    for turn in world.turns:
        if turn.plan.new_pods:
            assert all(pod.released for pod in turn.observed.older)


def an_attempt_has_at_most_one_pod_per_node(world):
    for turn in world.turns:
        pods = [(pod.attempt, pod.index) for pod in turn.observed.pods]
        assert len(pods) == len(set(pods))
        if not is_recovery(turn):
            for pod in turn.observed.current:
                assert pod.index < turn.observed.status.pods.desired
        for index in turn.plan.new_pods:
            assert 0 <= index < turn.plan.status.pods.desired


def no_pod_is_created_again_after_the_latch(world):
    for turn in world.turns:
        if turn.plan.new_pods and turn.observed.status.attempt.number is not None:
            assert not turn.observed.latched


def only_members_of_the_attempt_get_its_assignment(world):
    for turn in world.turns:
        status = turn.plan.status
        pods = {pod.uid: pod for pod in turn.observed.pods}
        deleted = {delete.uid for delete in turn.plan.delete}
        for assign in turn.plan.assign:
            pod = pods[assign.uid]
            if assign.dump:
                assert pod.attempt == status.attempt.number == turn.observed.attempt
                assert not pod.dumps
                continue
            assert pod.born == status.attempt.born(pod.index) < status.attempt.number
            assert pod.attempt < status.attempt.number or (pod.held and assign.start)
            assert pod.index < status.pods.desired
            assert pod.uid not in deleted
            assert not status.finished
            assert not status.has(Condition.SUSPENDED)


def pods_are_created_only_for_a_job_that_may_run(world):
    for turn in world.turns:
        if turn.plan.new_pods:
            assert turn.plan.status.attempt.number is not None
            assert not turn.plan.status.finished
            assert not turn.observed.job.deleting
            assert not turn.observed.job.spec.lifecycle.suspended


def the_first_pods_come_only_when_no_default_queue_takes_the_job(world):
    for turn in world.turns:
        observed = turn.observed
        is_first = turn.plan.new_pods and observed.status.attempt.number is None
        if is_first and observed.queue is None and observed.kueue is ApiState.SERVED:
            assert observed.has_default_queue is False


def an_attempt_begins_only_with_the_admission_of_the_queue(world):
    for turn in world.turns:
        observed = turn.observed
        begins = turn.plan.new_pods and turn.plan.status.attempt.number != (
            observed.status.attempt.number
        )
        if begins and observed.queue:
            assert observed.kueue is ApiState.SERVED
            assert observed.workload
            assert observed.workload.may_run


def a_lost_label_of_the_default_queue_gives_no_room_back(world):
    for turn in world.turns:
        observed = turn.observed
        if observed.queue or not observed.has_default_queue:
            continue
        if observed.refusal or observed.job.spec.lifecycle.suspended:
            continue
        if observed.workload and observed.workload.queue == DEFAULT_QUEUE:
            assert not turn.plan.status.message.startswith("leaves the queue")


# A restart is counted exactly once


def attempts_and_counters_never_decrease(world):
    for _, old, new in written(world):
        assert (new.attempt.number or 0) >= (old.attempt.number or 0)
        assert all(now >= before for before, now in zip(costs(old), costs(new), strict=True))
        assert new.budget.retried.retries >= old.budget.retried.retries


def costs(status: Status) -> tuple[int, int, int]:
    return status.budget.failures, status.budget.disruptions, status.budget.announced


def a_restart_costs_one_and_everything_else_costs_nothing(world):
    for turn, old, new in written(world):
        cost = tuple(now - before for before, now in zip(costs(old), costs(new), strict=True))
        assert cost in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
        if is_recovery(turn):
            assert sum(cost) == 0
        elif sum(cost):
            # If the job is suspended at the same look, its next attempt begins later.
            assert new.attempt.number == old.attempt.number + (not new.has(Condition.SUSPENDED))
            causes = BROKEN if cost == (1, 0, 0) else (Cause.DISRUPTION,)
            assert new.last_failure.cause in causes
            assert new.last_failure.attempt == old.attempt.number
            assert new.attempts[0].attempt == old.attempt.number


def a_budget_is_never_exceeded(world):
    for turn, old, new in written(world):
        policy = turn.observed.job.spec.failure_policy
        limits = (policy.max_restarts, policy.max_disruptions, policy.max_announced)
        retried = new.budget.retried
        before = (retried.failures, retried.disruptions, retried.announced)
        rows = zip(costs(old), costs(new), before, limits, strict=True)
        for was, is_now, at_retry, limit in rows:
            if policy.window is None and is_now > was and limit is not None:
                assert is_now - at_retry <= limit


def each_attempt_is_in_the_history_once(world):
    for _, _, new in written(world):
        attempts = [ended.attempt for ended in new.attempts]
        assert attempts == sorted(set(attempts), reverse=True), attempts
        assert len(attempts) <= 10


def a_new_attempt_or_end_is_reported_by_one_event(world):
    for turn, old, new in written(world):
        if new.finished != old.finished or (new.attempt.number or 0) > (old.attempt.number or 0):
            events = [event for event in turn.plan.events if event.reason not in ASIDE]
            assert len(events) == 1


# Finished is final, success is kept


def a_finished_job_never_changes(world):
    for turn in world.turns:
        old = turn.observed.status
        if old.finished and not is_taken_up_again(turn):
            reasons = {event.reason for event in turn.plan.events}
            assert turn.plan.new_pods == ()
            assert reasons <= {"StrayPods"}
            # Equal statuses need no comparison of their parts. It would take longer.
            if turn.plan.status != old:
                assert without_surroundings(turn.plan.status) == without_surroundings(old)


def is_taken_up_again(turn: Turn) -> bool:
    wanted = turn.observed.job.spec.lifecycle.retries
    old = turn.observed.status
    return old.has(Condition.FAILED) and wanted > old.budget.retried.retries


def a_job_is_taken_up_again_only_if_it_was_asked_for(world):
    for turn, old, new in written(world):
        if old.finished and not new.finished:
            assert is_taken_up_again(turn)
            assert new.budget.retried.retries == turn.observed.job.spec.lifecycle.retries
            assert costs(new) == costs(old)


def a_node_that_succeeded_is_never_lost(world):
    for turn, old, new in written(world):
        if is_recovery(turn):
            continue
        succeeded = {index for index in old.attempt.succeeded_nodes if index < old.pods.desired}
        if new.budget.disruptions > old.budget.disruptions:
            lost = int(new.last_failure.pod.rpartition("-")[2])
            assert lost not in succeeded
        if new.attempt.number == old.attempt.number and not new.finished:
            assert succeeded <= set(new.attempt.succeeded_nodes)
            assert not succeeded & set(turn.plan.new_pods)


def a_job_is_deleted_only_after_its_time_to_live(world):
    for turn in world.turns:
        if turn.plan.delete_job:
            status = turn.plan.status
            limit = turn.observed.job.spec.lifecycle.time_to_live
            assert status.finished
            assert turn.time >= status.completion_time + limit


# The last checkpoint is never lost


def pods_that_trained_may_write_a_checkpoint(world):
    for turn in world.turns:
        pods = {pod.uid: pod for pod in turn.observed.pods}
        for delete in turn.plan.delete:
            if may_have_something_to_save(turn, pods[delete.uid]):
                assert delete.forced or delete.grace is None


def may_have_something_to_save(turn: Turn, pod: Pod) -> bool:
    """Return True if the pod's gang ran, and all its peers can still take part in a checkpoint."""
    status = turn.observed.status
    failure = turn.plan.status.last_failure
    is_broken = failure.cause in BROKEN or failure.reason in LOST_PEERS
    if pod.released or (is_broken and failure.attempt == pod.attempt):
        return False
    if pod.attempt == turn.observed.attempt:
        return status.attempt.running_time is not None
    return pod.attempt == turn.observed.attempt - 1 and bool(status.attempt.previous_ran)


def only_pods_of_dead_nodes_are_deleted_by_force(world):
    for turn in world.turns:
        pods = {pod.uid: pod for pod in turn.observed.pods}
        for delete in turn.plan.delete:
            assert (delete.grace == 0) == bool(delete.forced)
            if delete.forced:
                assert is_dead(turn, pods[delete.uid])


def is_dead(turn: Turn, pod) -> bool:
    """Return True if nothing speaks for the node of a pod."""
    nodes = turn.observed.nodes
    if nodes is None:
        return pod.looks_lost and pod.deleting
    node = nodes.get(pod.node_name)
    if node and OUT_OF_SERVICE in node.taints:
        return True
    ready = sum(node.health is NodeHealth.READY for node in nodes.values())
    return 2 * ready >= len(nodes) and (node is None or node.health is not NodeHealth.READY)


def a_pod_that_the_operator_did_not_create_is_never_deleted(world):
    for turn in world.turns:
        assert not {delete.name for delete in turn.plan.delete} & set(turn.observed.strays)


# A person can see what happens


def at_most_one_condition_is_true(world):
    for turn in world.turns:
        status = turn.plan.status
        assert sum(status.has(kind) for kind in Condition) <= 1, status.conditions


def every_status_has_a_phase_a_reason_and_the_generation(world):
    for turn in world.turns:
        job = turn.observed.job
        status = turn.plan.status
        if job.deleting:
            assert turn.plan.status == job.status
            continue
        if not status.phase:
            # The operator writes no status of a new job before it has read the queues.
            assert turn.observed.has_default_queue is None
            assert not job.status.phase
            continue
        assert status.phase in set(Phase)
        assert status.reason
        assert status.message
        assert status.observed_generation == job.generation
        for condition in status.conditions:
            assert condition.observed_generation == job.generation


def unknown_fields_are_reported_by_at_most_one_event(world):
    for turn, old, _ in written(world):
        reasons = [event.reason for event in turn.plan.events]
        assert reasons.count("UnknownFields") <= (not old.ignored_fields)


# Nothing is written without a change


def an_event_comes_only_with_a_change_of_the_status(world):
    for turn in world.turns:
        if turn.plan.events:
            assert turn.changes_the_status


def a_status_is_the_same_after_it_was_written_and_read(world):
    for turn in world.turns:
        # An equal one was written and read before.
        if turn.plan.status != turn.observed.status:
            assert Status.from_dict(turn.new_status).to_dict() == turn.new_status


# Time


def the_next_look_is_never_in_the_past(world):
    for turn in world.turns:
        assert turn.plan.wake_after is None or turn.plan.wake_after >= 0


def no_clock_of_the_status_is_ahead(world):
    for turn in world.turns:
        if not turn.observed.job.deleting:
            for clock in running_clocks(turn.plan.status):
                assert clock <= turn.time


def running_clocks(status: Status) -> list[datetime]:
    clocks = [status.active_since, status.attempt.starting_since, status.attempt.silent_since]
    clocks += [node.since for node in status.unreachable_nodes]
    return [clock for clock in clocks if clock]


INVARIANTS = (
    pods_of_two_attempts_never_run_at_the_same_time,
    pods_are_created_only_when_no_older_pod_runs,
    an_attempt_has_at_most_one_pod_per_node,
    no_pod_is_created_again_after_the_latch,
    only_members_of_the_attempt_get_its_assignment,
    pods_are_created_only_for_a_job_that_may_run,
    the_first_pods_come_only_when_no_default_queue_takes_the_job,
    an_attempt_begins_only_with_the_admission_of_the_queue,
    a_lost_label_of_the_default_queue_gives_no_room_back,
    attempts_and_counters_never_decrease,
    a_restart_costs_one_and_everything_else_costs_nothing,
    a_budget_is_never_exceeded,
    each_attempt_is_in_the_history_once,
    a_new_attempt_or_end_is_reported_by_one_event,
    a_finished_job_never_changes,
    a_job_is_taken_up_again_only_if_it_was_asked_for,
    a_node_that_succeeded_is_never_lost,
    a_job_is_deleted_only_after_its_time_to_live,
    pods_that_trained_may_write_a_checkpoint,
    only_pods_of_dead_nodes_are_deleted_by_force,
    a_pod_that_the_operator_did_not_create_is_never_deleted,
    at_most_one_condition_is_true,
    every_status_has_a_phase_a_reason_and_the_generation,
    unknown_fields_are_reported_by_at_most_one_event,
    an_event_comes_only_with_a_change_of_the_status,
    a_status_is_the_same_after_it_was_written_and_read,
    the_next_look_is_never_in_the_past,
    no_clock_of_the_status_is_ahead,
)


def check(world: World) -> None:
    """Check the invariants of the turns since the last check."""
    for invariant in INVARIANTS:
        invariant(world)
    world.turns.clear()
