"""Questions to the agents of running pods, asked to explain a problem.

A gang without a problem is asked only for its heartbeats. A missing answer, as behind a
NetworkPolicy, changes nothing.
"""

from datetime import datetime, timedelta

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import later
from ddpjob.core.decide.hangs import pods_to_ask, running_pods
from ddpjob.core.decide.heartbeats import pods_to_check
from ddpjob.core.decide.meeting import is_late
from ddpjob.core.observe.observation import Observation, Pod
from ddpjob.core.plan import Question

# Unready pods are asked after this time. Between two attempts, a few seconds are normal.
SILENT_TIME = timedelta(seconds=10)

# Time between two looks at a gang after one of its pods has stopped writing.
LOOK_INTERVAL = timedelta(seconds=10)


def asked_from(obs: Observation) -> datetime | None:
    """Return when to ask the unready pods, or None."""
    since = obs.status.attempt.silent_since
    if not since or not obs.must_be_ready or not obs.silent:
        return None
    return later(since, SILENT_TIME)


def questions(obs: Observation, spec: Spec, now: datetime) -> tuple[Question, ...]:
    """Return the questions to pods with a failed peer, to silent pods, and to late ones.

    Under suspicion of a hang, pods are asked at once. All running pods are asked once whether there
    were any heartbeats.
    """
    if obs.status.finished:
        return ()
    return tuple(
        Question(
            pod.name,
            pod.uid,
            pod.address,
            obs.attempt,
            _path_of(pod, obs.job.uid),
        )
        for pod in _pods_to_question(obs, spec, now)
        if pod.address
    )


def _path_of(pod: Pod, uid: str) -> str:
    """Return where the agent of a pod answers. Those of an older version have one path for all."""
    is_new = pod.agent == config_map_name()
    return names.state_path(uid, pod.index) if is_new else names.STATE_PATH


def _pods_to_question(obs: Observation, spec: Spec, now: datetime) -> tuple[Pod, ...]:
    suspected = pods_to_ask(obs, spec)
    if suspected:
        return suspected
    concerned = _pods_with_a_problem(obs, now)
    if concerned:
        return concerned
    return pods_to_check(obs, spec, now)


def _pods_with_a_problem(obs: Observation, now: datetime) -> tuple[Pod, ...]:
    begins = asked_from(obs)
    is_silent = begins is not None and begins <= now
    if is_silent or is_late(obs, now):
        return obs.silent
    if obs.has_failed_pod:
        return _unended(obs)
    return ()


def _unended(obs: Observation) -> tuple[Pod, ...]:
    return tuple(pod for pod in running_pods(obs) if not pod.deleting)
