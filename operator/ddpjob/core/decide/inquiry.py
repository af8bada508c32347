"""Which agents the operator asks: those of running pods that it has to explain.

In the normal course no agent is asked. No answer, as behind a NetworkPolicy, changes nothing.
"""

from datetime import datetime, timedelta

from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import later
from ddpjob.core.decide.hangs import pods_to_ask
from ddpjob.core.decide.heartbeats import pods_to_check
from ddpjob.core.decide.meeting import is_late
from ddpjob.core.observe.observation import Observation, Pod, TrainerState
from ddpjob.core.plan import Question

# Pods that are not ready for so long are asked. Between two attempts it takes a few seconds.
SILENT_TIME = timedelta(seconds=10)

# Between two looks at a gang of which a pod has stopped writing.
LOOK_INTERVAL = timedelta(seconds=10)


def asked_from(obs: Observation) -> datetime | None:
    """Return when the pods that are not ready are asked, or None."""
    since = obs.status.attempt.silent_since
    return later(since, SILENT_TIME) if since and obs.must_be_ready and obs.silent else None


def questions(obs: Observation, spec: Spec, now: datetime) -> tuple[Question, ...]:
    """Return what to ask: pods whose peers have failed, that are silent, or have not met.

    Pods that may hang are asked at once, and once whether there were heartbeats at all.
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
