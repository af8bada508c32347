"""Hangs: whether a gang hangs, and the stacks of all its ranks before anything is ended.

A pod becomes unready when its heartbeats stop, and its agent is asked. With `heartbeat: Log`, in
many scripts only rank 0 writes, so all are asked, and the gang hangs only if no pod has written.
Then the agents of all pods write the stacks of their ranks.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from math import inf

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api.names import Cause
from ddpjob.core.api.policy import Heartbeat
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import later
from ddpjob.core.decide.stacks import Frame, find_culprit, lines_of_rank, read_stacks
from ddpjob.core.decide.verdict import Verdict
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.plan import Assign

# Orders to write stacks that may be refused in a row.
MAX_REFUSED = 3

# The age of a heartbeat in the report on a hang.
AGE = re.compile(r"no heartbeat for (\d{1,9}) s")


def running_pods(obs: Observation) -> tuple[Pod, ...]:
    return tuple(pod for pod in obs.current if pod.running)


def suspects(obs: Observation, spec: Spec) -> bool:
    """Return True if pods may have become unready because they give no heartbeats any more."""
    lifecycle = spec.lifecycle
    if not lifecycle.hang_timeout and not lifecycle.first_heartbeat:
        return False
    has_met = obs.status.attempt.running_time is not None
    return has_met and bool(obs.silent)


def pods_to_ask(obs: Observation, spec: Spec) -> tuple[Pod, ...]:
    """Return the pods to ask whether a gang under suspicion hangs."""
    if not suspects(obs, spec):
        return ()
    if _is_by_log(spec):
        return running_pods(obs)
    return obs.silent


def still_writes(obs: Observation, spec: Spec) -> bool:
    """Return True if a pod of a gang under suspicion has written, as its agent answers.

    It is no excuse for a silent pod without an answer.
    """
    if not _is_by_log(spec) or not suspects(obs, spec):
        return False
    if not _have_answered(obs, obs.silent):
        return False
    limit = _limit(spec)
    ages = _ages(obs, running_pods(obs))
    return any(age < limit for age in ages)


def is_confirmed(obs: Observation, spec: Spec, now: datetime) -> bool:
    """Return True if agents confirm the hang of a gang under suspicion.

    With `heartbeat: Log` all of them have to answer.
    """
    if not suspects(obs, spec):
        return False
    if _is_by_log(spec):
        has_answers = _have_answered(obs, running_pods(obs))
        return has_answers and not still_writes(obs, spec) and _has_stopped(obs, spec, now)
    limit = _limit(spec)
    ages = _ages(obs, obs.silent)
    return any(age >= limit for age in ages)


def _has_stopped(obs: Observation, spec: Spec, now: datetime) -> bool:
    """Return True if a pod with steady output has stopped, or if the first output is too late.

    A pod may be unready for another reason: on a busy node, its agent answers a probe too late.
    """
    ages = _ages(obs, running_pods(obs))
    if ages:
        watched = [pod for pod in running_pods(obs) if _is_watched(obs, pod)]
        limit = _limit(spec)
        return any(age >= limit for age in _ages(obs, watched))
    first, began = spec.lifecycle.first_heartbeat, obs.status.attempt.running_time
    return first is not None and began is not None and now >= later(began, first)


def _is_watched(obs: Observation, pod: Pod) -> bool:
    answer = obs.answer_of(pod)
    return answer is not None and answer.watched


def _limit(spec: Spec) -> float:
    """Return the longest time between two heartbeats in seconds."""
    limit = spec.lifecycle.hang_timeout
    if not limit:
        return inf
    return limit.total_seconds()


def _is_by_log(spec: Spec) -> bool:
    return spec.lifecycle.heartbeat is Heartbeat.LOG


def _have_answered(obs: Observation, pods: Sequence[Pod]) -> bool:
    return all(obs.answer_of(pod) for pod in pods)


def _ages(obs: Observation, pods: Sequence[Pod]) -> list[float]:
    """Return the ages of the last heartbeats of pods, as their agents have answered them."""
    ages = []
    for pod in pods:
        answer = obs.answer_of(pod)
        if answer and answer.heartbeat is not None:
            ages.append(answer.heartbeat)
    return ages


def dumps(obs: Observation, spec: Spec, now: datetime) -> tuple[Assign, ...]:
    """Return the orders to the pods of a hung gang: write their stacks, and end.

    There are none if they are refused again and again: the gang ends without its stacks.
    """
    if obs.status.finished or obs.refused_orders >= MAX_REFUSED:
        return ()
    has_hung = any(pod.hang and pod.failed for pod in obs.current)
    if not has_hung and not is_confirmed(obs, spec, now):
        return ()
    able = [pod for pod in running_pods(obs) if can_dump(obs, pod)]
    return tuple(_order_dump(pod, now) for pod in able if not pod.dumps)


def _order_dump(pod: Pod, now: datetime) -> Assign:
    return Assign(
        pod.name,
        pod.uid,
        pod.index,
        grace=0.0,
        start=True,
        ready_since=pod.ready_since,
        time=now,
        dump=True,
    )


def can_dump(obs: Observation, pod: Pod) -> bool:
    """Return True if the agent of a pod takes part in the attempt and can write its stacks."""
    if pod.held or pod.deleting:
        return False
    takes_part = pod.attempt == obs.attempt
    return takes_part and pod.agent == config_map_name()


def are_to_come(obs: Observation, now: datetime, until: datetime) -> bool:
    """Return True if pods of a hung gang may still write their stacks, at most until `until`."""
    if now >= until:
        return False
    return any(can_dump(obs, pod) for pod in running_pods(obs))


def hang_verdict(obs: Observation) -> Verdict:
    """Return the verdict on a hung gang, with the probable culprit's rank."""
    hung = [pod for pod in obs.current if pod.hang and pod.failed]
    stacks: dict[int, Sequence[Frame]] = {}
    pods: dict[int, Pod] = {}
    steps: dict[int, int] = {}
    for each in hung:
        for rank, stack in read_stacks(each.message).items():
            stacks[rank] = stack
            pods[rank] = each
    for rank, each in pods.items():
        if obs.attempt in each.steps:
            _, last_step = each.steps[obs.attempt]
            steps[rank] = last_step
    culprit = find_culprit(stacks, steps)
    longest = max(map(_exception_of, hung), key=_age_in)
    if culprit:
        first = culprit.ranks[0]
        why = [culprit.message, *lines_of_rank(first, _report_lines(pods[first]))]
        return _hang_of(pods[first], longest, why, first)
    why = _report_lines(hung[0])
    if len(stacks) > 1:
        why.insert(0, "no rank stands out")
    return _hang_of(hung[0], longest, why, None)


def _hang_of(pod: Pod, exception: str, why: Sequence[str], rank: int | None) -> Verdict:
    sentences = [f"pod {pod.name} hangs: {exception}", *why]
    message = "; ".join(filter(None, sentences))
    return Verdict(
        Cause.HANG,
        Reason.HANG,
        message,
        pod.index,
        pod,
        rank,
        pod.exit_code,
    )


def _report_lines(pod: Pod) -> list[str]:
    """Return the lines about stacks in the report of a hung pod. The exception is its last line."""
    return pod.message.splitlines()[:-1]


def _exception_of(pod: Pod) -> str:
    lines = pod.message.splitlines()
    return lines[-1] if lines else ""


def _age_in(exception: str) -> int:
    """Return the age of the last heartbeat in the report of a pod, or -1 if it has none."""
    found = AGE.search(exception)
    return int(found[1]) if found else -1
