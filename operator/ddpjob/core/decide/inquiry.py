"""Questions to the agents of running pods, asked to explain a problem.

A gang without a problem is asked only for its heartbeats. A missing answer, as behind a
NetworkPolicy, changes nothing.
"""

from datetime import datetime, timedelta

from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import later
from ddpjob.core.decide.hangs import pods_to_ask
from ddpjob.core.decide.heartbeats import pods_to_check
from ddpjob.core.decide.meeting import is_late
from ddpjob.core.observe.observation import Observation, Pod, TrainerState
from ddpjob.core.plan import Question

# Unready pods are asked after this time. Between two attempts, a few seconds are normal.
SILENT_TIME = timedelta(seconds=10)

# Time between two looks at a gang after one of its pods has stopped writing.
LOOK_INTERVAL = timedelta(seconds=10)


def asked_from(obs: Observation) -> datetime | None:
    """Return when to ask the unready pods, or None."""
    since = obs.status.attempt.silent_since
    return later(since, SILENT_TIME) if since and obs.must_be_ready and obs.silent else None


def questions(obs: Observation, spec: Spec, now: datetime) -> tuple[Question, ...]:
    """Return the questions to pods with a failed peer, to silent pods, and to late ones.

    Under suspicion of a hang, pods are asked at once. All running pods are asked once whether there
    were any heartbeats.
    """
    if obs.status.finished:
        return ()
    pods = _unended(obs) if _has_failed_pod(obs) else ()
    begins = asked_from(obs)
    if is_late(obs, now) or (begins and begins <= now):
        pods = obs.silent
    pods = pods or pods_to_check(obs, spec, now)
    pods = pods_to_ask(obs, spec) or pods
    known = (pod for pod in pods if pod.address)
    return tuple(Question(pod.name, pod.uid, pod.address, obs.attempt) for pod in known)


def _unended(obs: Observation) -> tuple[Pod, ...]:
    running = (pod for pod in obs.current if pod.state is TrainerState.RUNNING)
    return tuple(pod for pod in running if not pod.deleting)


def _has_failed_pod(obs: Observation) -> bool:
    return any(pod.state is TrainerState.FAILED for pod in obs.current)
