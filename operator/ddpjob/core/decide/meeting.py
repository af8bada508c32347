"""A late gang: all its containers run, but its workers have not met.

This module finds its pods and gives advice. Nothing is decided here: an attempt may take its time
to meet, see startupDeadlineSeconds.
"""

from datetime import datetime, timedelta

from ddpjob.core.api.names import TRAINER
from ddpjob.core.api.times import later
from ddpjob.core.decide.in_place import SILENT_TIME, silent_time
from ddpjob.core.observe.observation import Observation

# Workers usually meet within seconds. An image on a slow disk needs more to start Python.
MEETING_TIME = timedelta(seconds=60)

# How many pods a message names.
MAX_NAMED = 5

USUAL_CAUSES = (
    "a NetworkPolicy or a service mesh keeps the pods apart; the cluster's DNS does not answer; "
    "the arguments or the script set another number of nodes, or a rendezvous of their own"
)


def late_from(obs: Observation) -> datetime | None:
    """Return when a running gang is late to meet; None if something else explains the delay."""
    attempt = obs.status.attempt
    has_peers = obs.status.pods.desired > 1
    if attempt.running_time or not has_peers or not obs.silent:
        return None
    began = _all_run_since(obs)
    if began is None:
        return None
    wait = MEETING_TIME
    if attempt.births:
        # The processes of the last attempt have the grace period of their pods to end.
        wait += silent_time(obs) - SILENT_TIME
    return later(began, wait)


def _all_run_since(obs: Observation) -> datetime | None:
    """Return when the last pod of the attempt began to wait for the others.

    The container of a kept pod is older than the attempt. A container with a setup is older than
    the end of the setup.
    """
    if obs.status.attempt.births or (obs.job.spec and obs.job.spec.setup):
        return obs.status.attempt.silent_since
    running = [pod for pod in obs.current if pod.running]
    times = [pod.running_since for pod in running if pod.running_since]
    return max(times, default=None)


def is_late(obs: Observation, now: datetime) -> bool:
    moment = late_from(obs)
    return moment is not None and moment <= now


def describe_late(obs: Observation) -> str:
    """Return the pods of a late gang that have not met the others, and where to look."""
    pods = [pod.name for pod in obs.silent]
    named = ", ".join(pods[:MAX_NAMED])
    if len(pods) > MAX_NAMED:
        named += f" and {len(pods) - MAX_NAMED} more"
    seconds = int(MEETING_TIME.total_seconds())
    verb = "has" if len(pods) == 1 else "have"
    log = f"kubectl -n {obs.job.namespace} logs {pods[0]} -c {TRAINER}"
    return (
        f"all containers have run for at least {seconds} s, and {named} {verb} not met the others "
        f"(log: {log}){_first_error(obs)}. Usual causes: {USUAL_CAUSES}"
    )


def _first_error(obs: Observation) -> str:
    """Return an error told by the agent of a silent pod, as a part of a message, or ""."""
    for pod in obs.silent:
        answer = obs.answer_of(pod)
        if answer and answer.error:
            return f"; {pod.name} says: {answer.error}"
    return ""
