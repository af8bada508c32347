"""The pods to delete, and their grace periods."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from ddpjob.core.api.names import Cause
from ddpjob.core.api.policy import CleanPodPolicy
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Status
from ddpjob.core.decide.dead_nodes import describe_death, is_dead
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.plan import Delete

# Grace periods of pods with nothing to save, in seconds. While torch is imported, process 1 has no
# handler for SIGTERM and ends only with the grace period. Without its peers, a rank cannot write a
# checkpoint. A disrupted gang gets the pods' own grace period and writes one.
NEVER_RAN_GRACE = 5
BROKEN_GANG_GRACE = 15

# A peer is gone already after these disruptions. After others, such as a drain, it still runs.
LOST_PEERS = (Reason.NODE_UNREACHABLE, Reason.NODE_RESTARTED, Reason.PEER_LOST)


def delete_unfinished(
    obs: Observation,
    pods: Iterable[Pod],
    grace: int | None,
    now: datetime,
) -> tuple[Delete, ...]:
    """Delete the pods with containers that have not ended.

    A pod on a dead node is deleted by force, also if it is being deleted already.
    """
    deletions = []
    for pod in pods:
        if is_dead(obs, pod, now):
            deletions.append(_forced(obs, pod))
        elif not pod.released and not pod.deleting:
            deletions.append(Delete(pod.name, pod.uid, grace))
    return tuple(deletions)


def _forced(obs: Observation, pod: Pod) -> Delete:
    return Delete(
        pod.name,
        pod.uid,
        grace=0,
        forced=describe_death(obs, pod),
        node=pod.node_name,
    )


def delete_dead_leftovers(obs: Observation, now: datetime) -> tuple[Delete, ...]:
    """Delete the pods of earlier jobs of this name on dead nodes, where they can never end.

    The job waits for them, and nothing else removes them.
    """
    dead = [pod for pod in obs.leftovers if is_dead(obs, pod, now)]
    return tuple(_forced(obs, pod) for pod in dead)


def delete_all_unfinished(
    obs: Observation,
    grace: int | None,
    now: datetime,
    stay: Sequence[Pod] = (),
) -> tuple[Delete, ...]:
    """Delete the unfinished pods of every attempt, except those in `stay`.

    `grace` is for the pods of the current attempt.
    """
    older_grace = previous_grace(obs.status, obs.attempt)
    older = delete_unfinished(obs, obs.older, older_grace, now)
    apart = {pod.uid for pod in (*obs.older, *stay)}
    others = [pod for pod in obs.pods if pod.uid not in apart]
    return older + delete_unfinished(obs, others, grace, now)


def delete_ended(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Delete the pods that have ended, with their logs."""
    ended = [pod for pod in pods if pod.released and not pod.deleting]
    return tuple(Delete(pod.name, pod.uid) for pod in ended)


def clean_up(
    obs: Observation,
    spec: Spec,
    grace: int | None,
    now: datetime,
) -> tuple[Delete, ...]:
    """Delete the pods of a finished job, as its cleanPodPolicy says."""
    policy = spec.lifecycle.clean_pods
    if policy is CleanPodPolicy.NONE:
        return ()

    unfinished = delete_all_unfinished(obs, grace, now)
    if policy is CleanPodPolicy.RUNNING:
        return unfinished
    return unfinished + delete_ended(obs.pods)


def delete_outdated(obs: Observation) -> tuple[Delete, ...]:
    """Delete ended pods with outdated logs.

    The previous attempt and the one in `lastFailure` keep theirs for `kubectl logs`.
    """
    previous = obs.attempt - 1
    failed = obs.status.last_failure.attempt
    outdated = [pod for pod in obs.older if pod.attempt not in (previous, failed)]
    return delete_ended(outdated)


def current_grace(status: Status, attempt: int) -> int | None:
    """Return the grace period of the current attempt's pods in seconds; None is their own.

    Kept pods may still write a checkpoint of the attempt before.
    """
    current = status.attempt
    ran = current.running_time is not None
    if not ran and current.births:
        ran = current.previous_ran
    return _grace(status, attempt, ran)


def previous_grace(status: Status, attempt: int) -> int | None:
    """Return the grace period of the pods of the attempt before `attempt`."""
    return _grace(status, attempt - 1, status.attempt.previous_ran)


def _grace(status: Status, attempt: int, ran: bool) -> int | None:
    failure = status.last_failure
    has_failed = failure.cause in (Cause.FAILURE, Cause.HANG)
    has_lost_peers = failure.reason in LOST_PEERS
    is_of_attempt = failure.attempt == attempt
    if is_of_attempt and (has_failed or has_lost_peers):
        return BROKEN_GANG_GRACE
    return None if ran else NEVER_RAN_GRACE
