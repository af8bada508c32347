"""The rules that turn an Observation and the time into a Plan.

The rules are one ordered tuple. The first matching rule gives the plan. Deciding is pure, and
total: it never raises, whatever the pods look like.

The caller first writes the plan's status, under the resourceVersion of the observed job, and only
then changes pods. So a crash between two writes, a stale view or a second operator can neither lose
nor repeat a restart.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.core.api import names
from ddpjob.core.api.conditions import stamp_conditions
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.queue import DEFAULT_QUEUE
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import at_clock
from ddpjob.core.api.times import format_time, later
from ddpjob.core.decide import timers
from ddpjob.core.decide.accounting import run_account
from ddpjob.core.decide.causes import Undecided, judge, judge_silence
from ddpjob.core.decide.dead_nodes import describe_wait, track_unreachable
from ddpjob.core.decide.deletions import (
    clean_up,
    delete_dead_leftovers,
    delete_ended,
    delete_outdated,
    delete_unfinished,
    previous_grace,
)
from ddpjob.core.decide.describe import (
    describe,
    describe_backoff,
    describe_existing_pods,
    describe_pods,
    find_blocker,
    latch_run,
    latched,
    recount,
    with_status,
)
from ddpjob.core.decide.hangs import dumps, still_writes
from ddpjob.core.decide.heartbeats import report_heartbeats
from ddpjob.core.decide.in_place import assignments, lost_assignments
from ddpjob.core.decide.inquiry import questions
from ddpjob.core.decide.queueing import (
    finish,
    leave,
    may_join_a_queue,
    misplaced,
    next_place,
    next_step,
    what_holds,
)
from ddpjob.core.decide.reports import (
    report_ignored_fields,
    report_steps,
    report_strays,
    report_unused_devices,
)
from ddpjob.core.decide.restarts import give_way, resize, restart_or_fail, retry
from ddpjob.core.decide.suspension import resume, suspend
from ddpjob.core.decide.timers import is_due, run_clocks, seconds_until_next
from ddpjob.core.decide.transitions import begin, complete, recover, stop
from ddpjob.core.observe.observation import Observation, Pod, Refusal, TrainerState
from ddpjob.core.plan import MAX_MESSAGE, Delete, Event, Plan, counted, create_gang

Rule = Callable[[Observation, Spec, datetime], Plan | None]

# Seconds before the next look while the default LocalQueues are not read yet. Their first answer is
# a reason for a look too.
SOON = 1.0

# A deleted pod without a node is gone at once, unless a finalizer of others holds it.
MISPLACED_TIME = timedelta(seconds=30)

# Seconds between two looks at a job waiting for an older one.
YIELD_INTERVAL = 5.0


def decide(obs: Observation, now: datetime) -> Plan:
    """Return the plan for a job.

    The status stays exactly as it is if the job is being deleted, if another controller manages it,
    or if the API server has a newer status.
    """
    spec = obs.job.spec
    is_behind = obs.status_is_behind and not obs.is_current
    if is_behind or obs.job.managed_by != names.CONTROLLER:
        return Plan(obs.status)
    if obs.job.deleting:
        return leave(obs, spec, now) if spec else Plan(obs.status)
    # From here on, no clock of the status is ahead of `now`.
    obs = with_status(obs, at_clock(obs.status, now))
    if spec is None:
        plan = _unreadable_spec(obs)
    else:
        observed = replace(
            obs.status,
            unreachable_nodes=track_unreachable(obs, now),
            attempt=latch_run(obs, now),
        )
        obs = with_status(obs, observed)
        plan = _first_match(obs, spec, now)
        plan = _complete_plan(obs, spec, plan, now)
    generation = obs.job.generation
    conditions = stamp_conditions(plan.status.conditions, generation, now)
    status = replace(
        plan.status,
        observed_generation=generation,
        conditions=conditions,
    )
    return replace(plan, status=status)


def _complete_plan(obs: Observation, spec: Spec, plan: Plan, now: datetime) -> Plan:
    """Add what every plan has: its clocks, its next wake-up, and reports on the surroundings."""
    if not obs.status.finished:
        plan = report_ignored_fields(plan, spec)
        plan = report_unused_devices(obs, plan, spec)
        plan = report_heartbeats(obs, plan, spec, now)
    plan = report_steps(obs, plan)
    plan = report_strays(obs, plan)
    after = with_status(obs, plan.status)
    after = with_status(after, run_clocks(after, now))
    after = with_status(after, run_account(after, now))
    orders = dumps(after, spec, now)
    if orders and after.status.attempt.silent_since:
        # The pods have time to write their stacks.
        attempt = replace(after.status.attempt, silent_since=now)
        after = with_status(after, replace(after.status, attempt=attempt))
    assign = (*assignments(after, now), *orders) or lost_assignments(after, now)
    waits = [plan.wake_after, seconds_until_next(after, spec, now)]
    if _has_new_deadline(obs, after, spec, now):
        waits.append(0.0)
    wake_after = min((wait for wait in waits if wait is not None), default=None)
    check_agent = is_due(timers.agent_is_checked, after, spec, now)
    place = next_place(after, spec)
    after = with_status(after, replace(after.status, place=place))
    return replace(
        plan,
        status=after.status,
        place=next_step(after, spec, now),
        assign=assign,
        ask=questions(after, spec, now),
        check_agent=check_agent,
        wake_after=wake_after,
    )


def _has_new_deadline(
    before: Observation,
    after: Observation,
    spec: Spec,
    now: datetime,
) -> bool:
    """Return True if a deadline is over by a change of this look itself.

    A deadline already over before this look is no reason for another look at once.
    """
    for timer in timers.DEADLINES:
        if is_due(timer, after, spec, now) and not is_due(timer, before, spec, now):
            return True
    return False


def _first_match(obs: Observation, spec: Spec, now: datetime) -> Plan:
    for rule in RULES:
        plan = rule(obs, spec, now)
        if plan is not None:
            return plan
    raise AssertionError("the last rule always applies")


def _unreadable_spec(obs: Observation) -> Plan:
    """Change no pod: another version of the CRD accepted a spec that this operator cannot read."""
    if obs.status.finished:
        return Plan(obs.status, place=finish(obs))
    message = (
        f"{obs.job.spec_error}. The CRD and the operator have different versions: upgrade the "
        "older one."
    )
    status = replace(
        obs.status,
        # Its pods, if it has any, are left as they are.
        phase=obs.status.phase or Phase.PENDING,
        reason=Reason.INVALID_SPEC,
        message=message[:MAX_MESSAGE],
    )
    return Plan(status)


# The rules, in the order of RULES


def status_is_behind(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.status_is_behind or obs.status.finished:
        return None
    return recover(obs, spec, now)


def job_is_taken_up_again(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.status.is_retried_by(spec.lifecycle.retries):
        return None
    return retry(obs, spec, now)


def job_is_finished(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.status.finished:
        return None
    active = [pod.state for pod in obs.pods if pod.active]
    ready = active.count(TrainerState.RUNNING)
    pods = replace(obs.status.pods, active=len(active), ready=ready)
    status = replace(obs.status, pods=pods)
    if is_due(timers.time_to_live, obs, spec, now):
        return Plan(status, delete_job=True)
    return Plan(status, delete=clean_up(obs, spec, None, now))


def all_nodes_succeeded(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.succeeded or len(obs.succeeded) < obs.status.pods.desired:
        return None
    return complete(obs, spec, now)


def default_queue_takes_the_job(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not may_join_a_queue(obs, spec):
        return None
    if obs.has_default_queue is None:
        # The operator has just started.
        return Plan(obs.status, wake_after=SOON)
    refusal = obs.refusal
    if refusal and refusal.is_too_early(now):
        if obs.unreleased:
            # A running job has only lost its label.
            return None
        # Pods without the label would be held one by one.
        return Plan(describe(obs, Phase.PENDING, refusal.reason, refusal.message))
    if obs.unreleased:
        return Plan(recount(obs), join_queue=DEFAULT_QUEUE)
    message = f"joins the LocalQueue {DEFAULT_QUEUE}, which takes the jobs of its namespace"
    status = describe(obs, Phase.PENDING, Reason.QUEUED, message)
    return Plan(status, join_queue=DEFAULT_QUEUE)


def job_may_not_run(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    why = what_holds(obs, spec)
    if why is None:
        return None
    return suspend(obs, spec, why, now)


def active_deadline_is_over(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    limit = spec.lifecycle.active_deadline
    if limit is None or not is_due(timers.active_deadline, obs, spec, now):
        return None
    seconds = int(limit.total_seconds())
    message = f"the job was active for activeDeadlineSeconds={seconds}, in all its attempts"
    return stop(obs, spec, Reason.DEADLINE, message, now)


def job_is_new(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if obs.status.attempt.number is not None:
        return None
    begun = with_status(obs, begin(obs, spec, now))
    return pods_are_not_created(begun, spec, now)


def job_is_resumed(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.status.has(Condition.SUSPENDED):
        return None
    return resume(obs, spec, now)


def older_pods_still_run(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    remaining = [pod for pod in obs.older if not pod.released]
    if not remaining:
        return None
    wait = describe_wait(obs, remaining[0], now)
    message = f"attempt {obs.attempt} waits for {describe_pods(remaining)} to end{wait}"
    status = describe(obs, Phase.RESTARTING, Reason.WAITING_FOR_OLD_PODS, message)
    grace = previous_grace(obs.status, obs.attempt)
    return Plan(status, delete=delete_unfinished(obs, remaining, grace, now))


def nodes_were_changed(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if spec.nodes == obs.status.pods.desired:
        return None
    return resize(obs, spec, now)


def queue_has_replaced_a_node(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    pods = [pod for pod in misplaced(obs) if not _is_overdue(pod, now)]
    if not pods:
        return None
    delete = tuple(Delete(pod.name, pod.uid, grace=0) for pod in pods if not pod.deleting)
    status = recount(obs)
    # Such a pod is not lost: it is created again, and the attempt goes on.
    attempt = replace(status.attempt, latched=False)
    wake_after = MISPLACED_TIME.total_seconds()
    return Plan(replace(status, attempt=attempt), delete=delete, wake_after=wake_after)


def _is_overdue(pod: Pod, now: datetime) -> bool:
    """Return True if a pod without a node is still there long after its deletion."""
    deadline = pod.deletion_deadline
    return deadline is not None and now >= later(deadline, MISPLACED_TIME)


def attempt_failed(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    verdict = judge(obs, now)
    if verdict is None:
        return None
    if isinstance(verdict, Undecided):
        status = latched(obs, recount(obs))
        first_seen = status.attempt.undecided_since or now
        attempt = replace(status.attempt, undecided_since=first_seen)
        return Plan(replace(status, attempt=attempt))
    return restart_or_fail(obs, spec, verdict, now)


def gang_is_silent(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not is_due(timers.silence_ends, obs, spec, now):
        return None
    if still_writes(obs, spec) or dumps(obs, spec, now):
        return None
    return restart_or_fail(obs, spec, judge_silence(obs), now)


def startup_deadline_is_over(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    limit = spec.lifecycle.startup_deadline
    is_over = is_due(timers.startup_deadline, obs, spec, now)
    if limit is None or not is_over or obs.all_run:
        return None
    if obs.missing and obs.refusal is None:
        # A new operator does not know yet why pods are missing: the next refusal says it.
        return None
    blocker = find_blocker(obs)
    if blocker:
        reason = blocker.reason
        why = blocker.message
    else:
        reason = Reason.STARTUP_DEADLINE
        why = describe_existing_pods(obs, now).message
    seconds = int(limit.total_seconds())
    message = f"not all nodes were running within startupDeadlineSeconds={seconds}: {why}"
    return stop(obs, spec, reason, message, now)


def older_gang_needs_room(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if not obs.older_gang:
        return None
    yielding = obs.status.attempt.yielding
    if yielding and yielding.until > now:
        message = (
            f"waits until {obs.older_gang} runs, which needs the same room; at most until "
            f"{format_time(yielding.until)}"
        )
        status = describe(obs, Phase.PENDING, Reason.YIELDED, message)
        return Plan(status, wake_after=YIELD_INTERVAL)
    has_room = find_blocker(obs) is None
    if has_room or not is_due(timers.gang_timeout, obs, spec, now):
        return None
    return give_way(obs, spec, now)


def _wait_for_leftovers(obs: Observation, now: datetime) -> Plan:
    """Wait for the pods of an earlier job: they may still write into the same checkpoint folder."""
    first = obs.leftovers[0]
    message = f"waits for {describe_pods(obs.leftovers)} of an earlier job with this name to end"
    wait = describe_wait(obs, first, now)
    if not wait and not first.deleting:
        wait = f"; to end it now: kubectl -n {obs.job.namespace} delete pod {first.name}"
    message += wait
    status = describe(obs, Phase.PENDING, Reason.NAME_IN_USE, message)
    return Plan(status, delete=delete_dead_leftovers(obs, now))


def pods_are_not_created(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    if obs.latched or not obs.missing:
        return None
    if obs.leftovers:
        return _wait_for_leftovers(obs, now)
    attempt = replace(obs.status.attempt, yielding=None)
    obs = with_status(obs, replace(obs.status, attempt=attempt))
    refusal = obs.refusal
    if refusal and refusal.final and not attempt.had_pods:
        return stop(obs, spec, refusal.reason, refusal.message, now)
    until = obs.status.backoff.until
    if until and now < until:
        return Plan(describe_backoff(obs))
    if refusal:
        return _retry_after_refusal(obs, refusal, now)
    message = f"creating {counted(obs.status.pods.desired, 'pod')} of attempt {obs.attempt}"
    status = describe(obs, Phase.STARTING, Reason.CREATING_PODS, message)
    return Plan(status, create=create_gang(obs.missing), delete=delete_outdated(obs))


def _retry_after_refusal(obs: Observation, refusal: Refusal, now: datetime) -> Plan:
    status = describe(obs, Phase.PENDING, refusal.reason, refusal.message)
    if refusal.is_too_early(now):
        return Plan(status)
    # If the quota counts ended pods too, delete them, with their logs, to make room.
    delete = delete_ended(obs.older) if refusal.counts_ended_pods else delete_outdated(obs)
    return Plan(status, create=create_gang(obs.missing), delete=delete)


def all_pods_exist(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    status = describe_existing_pods(obs, now)
    was_running = obs.status.has(Condition.RUNNING)
    if was_running or not status.has(Condition.RUNNING):
        return Plan(status)
    event = Event("Normal", "Running", status.message)
    return Plan(status, events=(event,))


RULES: tuple[Rule, ...] = (
    status_is_behind,  # A user changed the status: go on with what the pods show.
    job_is_taken_up_again,  # Before the end: spec.retries has grown since the job has failed.
    job_is_finished,  # Any other finished job never runs again: clean up.
    all_nodes_succeeded,  # Before failures: a succeeded node cannot be lost any more.
    default_queue_takes_the_job,  # Its pods would be taken one by one.
    job_may_not_run,  # Suspended, or without room in its queue: no pods, whatever ends them.
    active_deadline_is_over,  # The job has had its time.
    job_is_new,  # The first attempt begins.
    job_is_resumed,  # A new attempt begins. It uses no budget.
    older_pods_still_run,  # Two attempts never train at the same time.
    nodes_were_changed,  # An attempt has a fixed size, so a new one begins. It uses no budget.
    queue_has_replaced_a_node,  # A pod that waits for the old one would wait for ever.
    attempt_failed,  # The whole gang restarts, or the job fails.
    gang_is_silent,  # Nothing has ended, and nothing happens: a hang, or a pod kept in vain.
    startup_deadline_is_over,  # A gang that cannot start must not hold devices for ever.
    older_gang_needs_room,  # Of two incomplete gangs, the younger gives way.
    pods_are_not_created,  # All at once: gang schedulers and autoscalers must see all of them.
    all_pods_exist,  # Nothing to do but to report how far the pods are.
)
