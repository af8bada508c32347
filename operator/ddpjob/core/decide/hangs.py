"""Hangs: whether a gang hangs, and the stacks of all its ranks before anything is ended.

A pod becomes unready when its heartbeats stop, and its agent is asked. With `heartbeat: Log`, in
many scripts only rank 0 writes, so all are asked, and the gang hangs only if no pod has written.
Then the agents of all pods write the stacks of their ranks.
"""

from collections.abc import Sequence
from datetime import datetime
from math import inf

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api.policy import Heartbeat
from ddpjob.core.api.resolved import Spec
from ddpjob.core.observe.observation import Observation, Pod, TrainerState
from ddpjob.core.plan import Assign


def running_pods(obs: Observation) -> tuple[Pod, ...]:
    return tuple(pod for pod in obs.current if pod.state is TrainerState.RUNNING)


def suspects(obs: Observation, spec: Spec) -> bool:
    """Return True if pods may have become unready because they give no heartbeats any more."""
    has_limit = bool(spec.lifecycle.hang_timeout or spec.lifecycle.first_heartbeat)
    return has_limit and bool(obs.status.attempt.running_time and obs.silent)


def pods_to_ask(obs: Observation, spec: Spec) -> tuple[Pod, ...]:
    """Return the pods to ask whether a gang under suspicion hangs."""
    if not suspects(obs, spec):
        return ()
    return running_pods(obs) if _is_by_log(spec) else obs.silent


def still_writes(obs: Observation, spec: Spec) -> bool:
    """Return True if a pod of a gang under suspicion has written, as its agent answers.

    It is no excuse for a silent pod without an answer.
    """
    ages = _ages(obs, running_pods(obs))
    is_suspected = _is_by_log(spec) and suspects(obs, spec)
    is_suspected = is_suspected and all(obs.answer_of(pod) for pod in obs.silent)
    return is_suspected and any(age < _limit(spec) for age in ages)


def is_confirmed(obs: Observation, spec: Spec) -> bool:
    """Return True if agents confirm the hang of a gang under suspicion.

    With `heartbeat: Log` all of them have to answer.
    """
    if not suspects(obs, spec):
        return False
    if _is_by_log(spec):
        has_answers = all(obs.answer_of(pod) for pod in running_pods(obs))
        return has_answers and not still_writes(obs, spec)
    return any(age >= _limit(spec) for age in _ages(obs, obs.silent))


def _limit(spec: Spec) -> float:
    """Return the longest time between two heartbeats in seconds."""
    limit = spec.lifecycle.hang_timeout
    return limit.total_seconds() if limit else inf


def _is_by_log(spec: Spec) -> bool:
    return spec.lifecycle.heartbeat is Heartbeat.LOG


def _ages(obs: Observation, pods: Sequence[Pod]) -> list[float]:
    """Return the ages of the last heartbeats of pods, as their agents have answered them."""
    answers = [obs.answer_of(pod) for pod in pods]
    return [answer.heartbeat for answer in answers if answer and answer.heartbeat is not None]


def dumps(obs: Observation, spec: Spec) -> tuple[Assign, ...]:
    """Return the orders to the pods of a hung gang: write their stacks, and end."""
    has_hung = any(pod.hang and pod.state is TrainerState.FAILED for pod in obs.current)
    if obs.status.finished or not (has_hung or is_confirmed(obs, spec)):
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
    """Return True if pods of a hung gang may still write their stacks, at most until `until`."""
    return now < until and any(can_dump(obs, pod) for pod in running_pods(obs))
