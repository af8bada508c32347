"""Whether a job may run, and what its Workload needs: the part of a queue in the decisions.

The Workload says what may run, and the status of the job says what runs. A job that may not run is
treated as suspended, whatever the reason: its pods end, with their grace period.

    no Workload ─▶ created ─▶ admitted ─▶ the job runs ─▶ finished
                      ▲                        │
                      └──── given back ◀───────┘ evicted

Room is given back only when no pod of the job uses it.
"""

from datetime import datetime

from ddpjob.core.api.history import Place
from ddpjob.core.api.kueue import (
    API_VERSION,
    EVICTED,
    PODS_READY,
    QUOTA_RESERVED,
    Workload,
    newest_number,
    place_key,
)
from ddpjob.core.api.names import Condition
from ddpjob.core.api.queue import DEFAULT_QUEUE, LABEL_QUEUE
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.decide.deletions import delete_all_unfinished
from ddpjob.core.decide.transitions import grace_of
from ddpjob.core.observe.observation import ApiState, Finding, Observation, Pod
from ddpjob.core.plan import PlaceAction, PlaceStep, Plan, counted

# Why a job with a queue does not begin.
NOT_SERVED = {
    ApiState.REFUSED: (
        "the administrator has not given the operator the rights that queues need "
        f"(kueue.clusterRead of the chart); remove the label {LABEL_QUEUE} from the job"
    ),
    ApiState.UNKNOWN: "the operator has not read the Workloads of Kueue yet",
    ApiState.ABSENT: (
        f"the cluster does not serve {API_VERSION}; install Kueue, or remove the label "
        f"{LABEL_QUEUE} from the job"
    ),
    ApiState.UNREADABLE: "the operator cannot read the Workloads of Kueue; its log has the reason",
}

SUSPENDED = "suspended; to resume, set spec.suspend to false"


def what_holds(obs: Observation, spec: Spec) -> Finding | None:
    """Return why a job may not run, or None if it may."""
    if spec.lifecycle.suspended:
        return Finding(Reason.SUSPENDED, SUSPENDED)
    if obs.queue is None:
        return None if _rejoins(obs) else _leaves(obs)
    if obs.kueue is not ApiState.SERVED:
        if _runs(obs):
            # A running job goes on, and no other job begins.
            return None
        return Finding(Reason.NO_QUEUE, NOT_SERVED[obs.kueue])
    workload = obs.workload
    if workload is None and obs.refusal:
        return Finding(obs.refusal.reason, obs.refusal.message)
    if workload is None or workload.finished:
        return Finding(Reason.QUEUED, _waits_for_room(obs))
    if workload.deleting:
        lost = f"Workload {workload.name} was deleted, so the job gives its room back"
        return Finding(Reason.QUEUED, f"{lost} and asks for room again")
    if not _is_fit(workload, obs, spec):
        wanted = counted(spec.nodes, "node")
        return Finding(Reason.QUEUED, f"asks the queue {obs.queue} for room for {wanted}")
    if workload.may_run:
        return None
    return _waits_for_admission(obs, workload)


def _waits_for_room(obs: Observation) -> str:
    return f"waits for room in the queue {obs.queue}"


def _waits_for_admission(obs: Observation, workload: Workload) -> Finding:
    reason: str = Reason.QUEUED
    if workload.evicted:
        reason = str(workload.condition(EVICTED).get("reason"))
    if workload.evicted and workload.has_quota:
        lost = f"the queue {obs.queue} has taken the room of the job back"
        return Finding(reason, _with_words(lost, workload, EVICTED))
    if workload.has_quota and workload.checks:
        checks = ", ".join(workload.checks)
        message = f"has room in the queue {obs.queue}, and waits for its admission checks: {checks}"
        return Finding(Reason.QUEUED, message)
    waits = _waits_for_room(obs)
    return Finding(reason, _with_words(waits, workload, QUOTA_RESERVED))


def _is_fit(workload: Workload, obs: Observation, spec: Spec) -> bool:
    """Return True if a Workload asks for the room of the job as it is now."""
    return workload.is_for(obs.queue, spec.nodes, spec.scheduling.topology)


def may_join_a_queue(obs: Observation, spec: Spec) -> bool:
    """Return True if the default LocalQueue of the namespace can take a job without a queue.

    Otherwise Kueue would take its pods one by one. Kueue's own kinds of jobs get the label from
    Kueue.
    """
    if obs.has_default_queue is False or obs.queue is not None:
        return False
    if obs.kueue in (ApiState.OFF, ApiState.REFUSED):
        return False
    if spec.lifecycle.suspended:
        return False
    if _rejoins(obs):
        return True
    # A resumed job gets new pods.
    has_begun = obs.current or obs.status.attempt.latched
    goes_on = has_begun and not obs.status.has(Condition.SUSPENDED)
    has_room = any(one.has_quota for one in obs.workloads)
    return not (goes_on or obs.unreleased or has_room)


def _rejoins(obs: Observation) -> bool:
    """Return True if a job has only lost the label of the default queue: it has a place there.

    `kubectl replace` of the user's manifest does so.
    """
    has_place = obs.workload is not None and obs.workload.queue == DEFAULT_QUEUE
    return has_place and obs.has_default_queue is not False


def misplaced(obs: Observation) -> tuple[Pod, ...]:
    """Return the pods that wait for nodes already replaced by the queue, until they are gone."""
    workload = obs.workload
    if workload is None or not (workload.may_run and workload.domains):
        return ()
    levels = list(workload.domains[0].labels)
    places = {domain.key for domain in workload.domains}
    found = []
    for pod in obs.current:
        waits = not pod.ended and not pod.node_name
        if waits and pod.place and place_key(levels, pod.place) not in places:
            found.append(pod)
    return tuple(found)


def _leaves(obs: Observation) -> Finding | None:
    """Return why a job without its queue label may not run yet: it still has room of the queue.

    Otherwise the queue could not take the room back.
    """
    if obs.kueue is not ApiState.SERVED:
        return None
    for workload in obs.workloads:
        if workload.has_quota and not workload.finished:
            return Finding(Reason.QUEUED, f"leaves the queue {workload.queue}")
    return None


def _runs(obs: Observation) -> bool:
    has_begun = obs.status.attempt.number is not None
    return has_begun and not obs.status.has(Condition.SUSPENDED)


def _with_words(text: str, workload: Workload, kind: str) -> str:
    """Return a text with the words of Kueue in a condition."""
    condition = workload.condition(kind)
    words = str(condition.get("message") or "")
    return f"{text}: {words}" if words else text


def leave(obs: Observation, spec: Spec, now: datetime) -> Plan:
    """Return the plan for a job being deleted: its status stays, and its room goes back.

    A finalizer of others may hold the job for long. Meanwhile the queue may take the room back.
    """
    workload = obs.workload
    is_taken = workload is not None and (workload.evicted or workload.deleting)
    delete = delete_all_unfinished(obs, grace_of(obs), now) if is_taken else ()
    return Plan(obs.status, delete=delete, place=next_step(obs, spec, now))


def next_place(obs: Observation, spec: Spec) -> Place:
    """Return the present or the next place of a job. Each new place has a number of its own."""
    place = obs.status.place
    workload = obs.workload
    if not _wants_room(obs, spec):
        return place
    if workload and workload.may_run:
        return Place(place.number, workload.uid)
    if place.number == 0:
        # After the status was lost, the job keeps its room.
        known = [one.name for one in obs.workloads if not one.finished]
        newest = newest_number(obs.job.name, obs.job.uid, known)
        return Place(newest or 1)
    is_used_up = bool(place.uid) if workload is None else workload.finished
    return Place(place.number + 1) if is_used_up else place


def _wants_room(obs: Observation, spec: Spec) -> bool:
    if obs.status.finished or obs.job.deleting or spec.lifecycle.suspended:
        return False
    return obs.queue is not None and obs.kueue is ApiState.SERVED


def next_step(obs: Observation, spec: Spec, now: datetime) -> PlaceStep | None:
    """Return the next step for the Workloads of a job, or None."""
    if obs.kueue is not ApiState.SERVED:
        return None
    workload = obs.workload
    for other in obs.workloads:
        if other is not workload and _is_to_remove(other):
            return _once_free(obs, PlaceStep(PlaceAction.REMOVE, other))
    if obs.status.finished:
        return finish(obs)
    if workload is None:
        return _ask_for_room(obs, spec, now)
    is_wanted = _wants_room(obs, spec) and _is_fit(workload, obs, spec)
    if workload.deleting or not is_wanted:
        is_gone = workload.deleting and not workload.held
        if is_gone:
            return None
        return _once_free(obs, PlaceStep(PlaceAction.REMOVE, workload))
    if workload.evicted and workload.has_quota:
        return _once_free(obs, PlaceStep(PlaceAction.GIVE_BACK, workload))
    return _readiness(obs, workload) if workload.may_run else None


def _ask_for_room(obs: Observation, spec: Spec, now: datetime) -> PlaceStep | None:
    place = obs.status.place
    if not _wants_room(obs, spec) or not place.number or place.uid:
        return None
    if obs.refusal and obs.refusal.is_too_early(now):
        return None
    return _once_free(obs, PlaceStep(PlaceAction.CREATE))


def finish(obs: Observation) -> PlaceStep | None:
    """Return the step to give the room of a finished job back, if it still has some."""
    workload = obs.workload
    if obs.kueue is not ApiState.SERVED or workload is None:
        return None
    is_over = workload.finished and not workload.held
    if is_over:
        return None
    return _once_free(obs, PlaceStep(PlaceAction.FINISH, workload))


def _is_to_remove(workload: Workload) -> bool:
    return workload.held or not (workload.deleting or workload.finished)


def _once_free(obs: Observation, step: PlaceStep) -> PlaceStep | None:
    """Return a step to give room back, or to ask for room, once no pod uses the old room."""
    return None if obs.unreleased else step


def _readiness(obs: Observation, workload: Workload) -> PlaceStep | None:
    """Return the step to tell Kueue whether the workers of all pods have met."""
    has_met = obs.status.attempt.running_time is not None
    is_known = workload.holds(PODS_READY)
    if has_met and not is_known:
        return PlaceStep(PlaceAction.READY, workload)
    if is_known and not has_met:
        return PlaceStep(PlaceAction.NOT_READY, workload)
    return None
