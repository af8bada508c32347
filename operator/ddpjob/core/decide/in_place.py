"""Recovery in place: the pods kept for the next attempt, and the orders to their agents.

A pod stays if it is alive and did nothing wrong. Its agent ends the processes of the last attempt
before it starts those of the next one. The rendezvous completes only with the pods of all nodes, so
two attempts never train at once.
"""

from datetime import datetime, timedelta

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api.names import Cause, Condition
from ddpjob.core.api.pod_fields import GRACE_SECONDS
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import later
from ddpjob.core.decide.dead_nodes import find_end_of_node, is_not_ready
from ddpjob.core.decide.deletions import LOST_PEERS
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.observe.termination import SETUP_FAILED
from ddpjob.core.plan import Assign

# After these causes, pods stay. Resized: with another number of nodes.
IN_PLACE = (Cause.FAILURE, Cause.DISRUPTION, Cause.RESIZED)

# Seconds from SIGTERM to SIGKILL for processes whose peers are gone. They cannot write a checkpoint
# together any more.
BROKEN_GRACE = 1.0

# When an assignment is written again if its pod does not follow it. On a busy node, a kubelet left
# a change of an annotation out of the pod's file for a minute, probably because it was writing the
# change before it. Another change makes it write the file, as does its next sync after up to 90 s.
COPY_TIMES = (timedelta(seconds=5), timedelta(seconds=20))

# A gang with the usual grace period, without another fault, must be ready again after this time.
SILENT_TIME = timedelta(seconds=120)


def pods_that_stay(
    obs: Observation,
    spec: Spec,
    cause: Cause,
    culprit: Pod | None,
    now: datetime,
) -> tuple[Pod, ...]:
    """Return the pods of the current attempt to keep for the next one.

    None stay if the job has to wait for a back-off: the pods would occupy their devices. None stay
    if the attempt never trained: what the attempt before has left in them may be the reason. It is
    not the reason if the setup of the culprit has failed.
    """
    if not spec.in_place or cause not in IN_PLACE:
        return ()
    has_trained = obs.status.attempt.running_time is not None
    has_other_reason = culprit is not None and culprit.exit_reason == SETUP_FAILED
    if not has_trained and not has_other_reason:
        return ()
    until = obs.status.backoff.until
    if until and until > now:
        return ()
    wanted = [pod for pod in obs.current if pod.index < spec.nodes]
    innocent = [pod for pod in wanted if pod is not culprit]
    return tuple(pod for pod in innocent if _can_stay(obs, pod, now))


def _can_stay(obs: Observation, pod: Pod, now: datetime) -> bool:
    if pod.disruption or pod.deleting or pod.looks_lost:
        return False
    if is_not_ready(obs, pod.node_name) or find_end_of_node(obs, pod, now):
        return False
    # An agent of another version may not understand the assignment.
    is_reachable = bool(pod.address) and pod.agent == config_map_name()
    return pod.running and is_reachable


def assignments(obs: Observation, now: datetime) -> tuple[Assign, ...]:
    """Return the assignments still to be given to the kept pods."""
    status = obs.status
    if status.finished or status.has(Condition.SUSPENDED) or not status.attempt.births:
        return ()
    is_whole = _is_whole(obs)
    start = _may_start(obs)
    orders = []
    for pod in obs.unassigned:
        stays_held = pod.held and not start
        if pod.deleting or stays_held:
            continue
        order = Assign(
            pod.name,
            pod.uid,
            pod.index,
            grace=float(pod.grace) if is_whole else BROKEN_GRACE,
            start=start,
            ready_since=pod.ready_since,
            time=now,
        )
        orders.append(order)
    return tuple(orders)


def lost_assignments(obs: Observation, now: datetime) -> tuple[Assign, ...]:
    """Return the assignments to be written again, since their pods do not follow them yet."""
    found = []
    for pod in obs.current:
        moment = next_copy(obs, pod)
        if pod.order is None or moment is None or moment > now:
            continue
        copy = Assign(
            pod.name,
            pod.uid,
            pod.index,
            grace=pod.order.grace,
            start=not pod.held,
            ready_since=None,
            time=pod.order.time,
            copies=pod.order.copies + 1,
            dump=pod.dumps,
        )
        found.append(copy)
    return tuple(found)


def next_copy(obs: Observation, pod: Pod) -> datetime | None:
    """Return when to write the last assignment of a pod again, or None."""
    if obs.status.finished or pod.order is None or pod.order.copies not in range(len(COPY_TIMES)):
        return None
    if not pod.running or pod.deleting or pod.attempt != obs.attempt:
        return None
    # A gang that has met has followed. A copy just before the order to write stacks could make the
    # kubelet lose that.
    has_met = obs.status.attempt.running_time is not None
    follows = not pod.dumps and (has_met or (pod.ready and not pod.held))
    return None if follows else later(pod.order.time, COPY_TIMES[pod.order.copies])


def _may_start(obs: Observation) -> bool:
    """Return False if the gang could meet while a pod of the last attempt still runs.

    Otherwise a new pod is part of the gang, and it is created only when no such pod runs.
    """
    has_new_pods = any(born == obs.attempt for born in obs.status.attempt.births)
    return has_new_pods or all(pod.released for pod in obs.older)


def _is_whole(obs: Observation) -> bool:
    """Return True if all pods of the last attempt run: they write a last checkpoint together.

    Its processes then have the grace period of their pods, to end.
    """
    failure = obs.status.last_failure
    if failure.attempt != obs.attempt - 1:
        return True
    if failure.cause != Cause.DISRUPTION or failure.reason in LOST_PEERS:
        return False
    return any(pod.running and pod.active for pod in obs.older)


def silent_time(obs: Observation) -> timedelta:
    """Return the time after which a gang without another fault must be ready again.

    Its pods may first use all of their grace period.
    """
    grace = max((pod.grace for pod in obs.current), default=0)
    more = max(0, grace - GRACE_SECONDS)
    return SILENT_TIME + timedelta(seconds=more)
