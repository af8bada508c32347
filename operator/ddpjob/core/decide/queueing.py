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
    DEFAULT_QUEUE,
    EVICTED,
    LABEL_QUEUE,
    PODS_READY,
    QUOTA_RESERVED,
    Workload,
    newest_number,
    place_key,
)
from ddpjob.core.api.names import Condition
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.observe.observation import ApiState, Finding, Observation, Pod
from ddpjob.core.plan import PlaceAction, PlaceStep, counted

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
        return _leaves(obs)
    if obs.kueue is not ApiState.SERVED:
        # A running job goes on, and no other job begins.
        return None if _runs(obs) else Finding(Reason.NO_QUEUE, NOT_SERVED[obs.kueue])
    workload = obs.workload
    waits = f"waits for room in the queue {obs.queue}"
    if workload is None and obs.refusal:
        return Finding(obs.refusal.reason, obs.refusal.message)
    if workload is None or workload.finished:
        return Finding(Reason.QUEUED, waits)
    if workload.deleting:
        lost = f"Workload {workload.name} was deleted, so the job gives its room back"
        return Finding(Reason.QUEUED, f"{lost} and asks for room again")
    if not workload.is_for(obs.queue, spec.nodes, spec.scheduling.topology):
        wanted = counted(spec.nodes, "node")
        return Finding(Reason.QUEUED, f"asks the queue {obs.queue} for room for {wanted}")
    if workload.may_run:
        return None
    evicted = workload.condition(EVICTED)
    if workload.evicted and workload.has_quota:
        lost = f"the queue {obs.queue} has taken the room of the job back"
        return Finding(str(evicted.get("reason")), _with_words(lost, workload, EVICTED))
    if workload.has_quota and workload.checks:
        checks = ", ".join(workload.checks)
        message = f"has room in the queue {obs.queue}, and waits for its admission checks: {checks}"
        return Finding(Reason.QUEUED, message)
    message = _with_words(waits, workload, QUOTA_RESERVED)
    return Finding(str(evicted.get("reason")) if workload.evicted else Reason.QUEUED, message)


def may_join_a_queue(obs: Observation, spec: Spec) -> bool:
    """Return True if the default LocalQueue of the namespace can take a job without a queue.

    Otherwise Kueue would take its pods one by one. Kueue's own kinds of jobs get the label from
    Kueue.
    """
    is_possible = obs.has_default_queue is not False and obs.queue is None and not obs.refusal
    is_off = obs.kueue in (ApiState.OFF, ApiState.REFUSED)
    if not is_possible or is_off or spec.lifecycle.suspended:
        return False
    had_place = obs.workload is not None and obs.workload.queue == DEFAULT_QUEUE
    # With a place there, only the label was lost, as by `kubectl replace` of the user's manifest.
    has_pods = obs.unreleased or obs.current or obs.status.attempt.latched
    return had_place or not (has_pods or any(one.has_quota for one in obs.workloads))


def misplaced(obs: Observation) -> tuple[Pod, ...]:
    """Return the pods that wait for nodes already replaced by the queue."""
    workload = obs.workload
    if workload is None or not (workload.may_run and workload.domains):
        return ()
    levels = list(workload.domains[0].labels)
    places = {domain.key for domain in workload.domains}
    waiting = (pod for pod in obs.current if pod.place and pod.active and not pod.node_name)
    return tuple(
        pod for pod in waiting if not pod.deleting and place_key(levels, pod.place) not in places
    )


def _leaves(obs: Observation) -> Finding | None:
    """Return why a job without its queue label may not run yet: it still has room of the queue.

    Otherwise the queue could not take the room back.
    """
    if obs.kueue is not ApiState.SERVED:
        return None
    held = [one for one in obs.workloads if one.has_quota and not one.finished]
    return Finding(Reason.QUEUED, f"leaves the queue {held[0].queue}") if held else None


def _runs(obs: Observation) -> bool:
    has_begun = obs.status.attempt.number is not None
    return has_begun and not obs.status.has(Condition.SUSPENDED)


def _with_words(text: str, workload: Workload, kind: str) -> str:
    """Return a text with the words of Kueue in a condition."""
    words = str(workload.condition(kind).get("message") or "")
    return f"{text}: {words}" if words else text


def next_place(obs: Observation, spec: Spec) -> Place:
    """Return the present or the next place of a job. Each new place has a number of its own."""
    place, workload = obs.status.place, obs.workload
    if not _wants_room(obs, spec):
        return place
    if workload and workload.may_run:
        return Place(place.number, workload.uid)
    if place.number == 0:
        # After the status was lost, the job keeps its room.
        known = (one.name for one in obs.workloads if not one.finished)
        return Place(newest_number(obs.job.name, obs.job.uid, known) or 1)
    is_new = workload is None and bool(place.uid)
    if is_new or (workload is not None and workload.finished):
        return Place(place.number + 1)
    return place


def _wants_room(obs: Observation, spec: Spec) -> bool:
    is_over = obs.status.finished or spec.lifecycle.suspended
    return obs.queue is not None and obs.kueue is ApiState.SERVED and not is_over


def next_step(obs: Observation, spec: Spec, now: datetime) -> PlaceStep | None:
    """Return the next step for the Workloads of a job, or None."""
    if obs.kueue is not ApiState.SERVED:
        return None
    workload = obs.workload
    surplus = [one for one in obs.workloads if one is not workload and _is_to_remove(one)]
    if surplus:
        return _once_free(obs, PlaceStep(PlaceAction.REMOVE, surplus[0]))
    if obs.status.finished:
        return finish(obs)
    if workload is None:
        is_asked = _wants_room(obs, spec) and obs.status.place.number and not obs.status.place.uid
        is_too_early = obs.refusal is not None and obs.refusal.is_too_early(now)
        may_ask = is_asked and not is_too_early
        return _once_free(obs, PlaceStep(PlaceAction.CREATE)) if may_ask else None
    is_fit = workload.is_for(obs.queue, spec.nodes, spec.scheduling.topology)
    is_of_no_use = workload.deleting or not (_wants_room(obs, spec) and is_fit)
    if is_of_no_use:
        step = PlaceStep(PlaceAction.REMOVE, workload)
        return _once_free(obs, step) if workload.held or not workload.deleting else None
    if workload.evicted and workload.has_quota:
        return _once_free(obs, PlaceStep(PlaceAction.GIVE_BACK, workload))
    return _readiness(obs, workload) if workload.may_run else None


def finish(obs: Observation) -> PlaceStep | None:
    """Return the step to give the room of a finished job back, if it still has some."""
    workload = obs.workload
    if obs.kueue is not ApiState.SERVED or workload is None:
        return None
    is_over = workload.finished and not workload.held
    return None if is_over else _once_free(obs, PlaceStep(PlaceAction.FINISH, workload))


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
