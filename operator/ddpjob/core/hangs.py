"""Hangs of a gang whose heartbeat is its output, and the stacks of all its ranks.

With `heartbeat: Log`, a pod that has written for long and stops becomes unready. In many scripts
only rank 0 writes, so the gang hangs only if no pod has written. Before anything is ended, the
agents of all pods write the stacks of their ranks.
"""

from datetime import datetime, timedelta

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.observe import Observation, Pod, TrainerState
from ddpjob.core.plan import Assign
from ddpjob.core.policy import Heartbeat
from ddpjob.core.spec import Spec


def running_pods(obs: Observation) -> tuple[Pod, ...]:
    return tuple(pod for pod in obs.current if pod.state is TrainerState.RUNNING)


def suspects(obs: Observation, spec: Spec) -> bool:
    """Return True if a pod may have become unready because it has stopped to write."""
    has_limit = spec.lifecycle.hang_timeout is not None
    is_by_log = spec.lifecycle.heartbeat is Heartbeat.LOG
    return has_limit and is_by_log and bool(obs.status.running_time and obs.silent)


def still_writes(obs: Observation, spec: Spec) -> bool:
    """Return True if a pod of a gang under suspicion has written, as its agent answers."""
    limit = spec.lifecycle.hang_timeout or timedelta(0)
    answers = [obs.answer_of(pod) for pod in running_pods(obs)]
    ages = [answer.heartbeat for answer in answers if answer and answer.heartbeat is not None]
    return suspects(obs, spec) and any(age < limit.total_seconds() for age in ages)


def hangs_by_log(obs: Observation, spec: Spec) -> bool:
    """Return True if all pods of a gang under suspicion answer, and none has written."""
    has_answers = all(obs.answer_of(pod) for pod in running_pods(obs))
    return suspects(obs, spec) and has_answers and not still_writes(obs, spec)


def dumps(obs: Observation, spec: Spec) -> tuple[Assign, ...]:
    """Return what pods are told that must write their stacks, and end: those of a hung gang."""
    has_hung = any(pod.hang and pod.state is TrainerState.FAILED for pod in obs.current)
    if obs.status.finished or not (has_hung or hangs_by_log(obs, spec)):
        return ()
    return tuple(
        Assign(pod.name, pod.uid, pod.index, 0.0, True, pod.ready_since, dump=True)
        for pod in running_pods(obs)
        if can_dump(obs, pod) and not pod.dumps
    )


def can_dump(obs: Observation, pod: Pod) -> bool:
    """Return True if the agent of a pod takes part in the attempt and can write its stacks."""
    takes_part = pod.attempt == obs.attempt and not pod.held and not pod.deleting
    return takes_part and pod.agent == config_map_name()


def are_to_come(obs: Observation, now: datetime, until: datetime) -> bool:
    """Return True if pods of a hung gang still write their stacks. They have until a moment."""
    return now < until and any(can_dump(obs, pod) for pod in running_pods(obs))
