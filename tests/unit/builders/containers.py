"""Statuses of pods by the state of their trainer."""

from ddpjob.core.api import names
from ddpjob.core.api.times import format_time

from .times import NOW, at


def trainer_status(state, *other_containers):
    return {"containerStatuses": [*other_containers, {"name": names.TRAINER, "state": state}]}


def waiting(reason="ContainerCreating", message=""):
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", **trainer_status(state)}


def creating(seconds):
    """Return the status of a pod with a node for so many seconds, and without a container yet."""
    since = format_time(at(-seconds))
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    return {**waiting(), "conditions": [condition]}


def starting(*, since=NOW):
    """Return the status of a pod with a running container, before its workers have met."""
    state = {"running": {"startedAt": format_time(since)}}
    return {"phase": "Running", "podIP": "10.244.0.7", **trainer_status(state)}


def running(*, since=NOW):
    """Return the status of a pod after its workers have met the others."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": format_time(since)}
    status = {**starting(), "conditions": [ready]}
    status["containerStatuses"][0]["ready"] = True
    return status


def ended(code, message="", *, reason=None, when=NOW, **status):
    """Return the status of a pod after the end of its trainer.

    Other fields of the pod's status can be given by name, such as its `phase` if something else in
    it still runs.
    """
    state = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message,
        "finishedAt": format_time(when),
    }
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, **trainer_status({"terminated": state}), **status}


def succeeded(message="", **fields):
    return ended(0, message, **fields)


def failed(message="", **fields):
    return ended(1, message, **fields)


def oom_killed(**fields):
    return ended(137, reason="OOMKilled", **fields)


def without_end_time(status):
    """Remove the end time of the trainer. Some runtimes do not report it."""
    for container in status["containerStatuses"]:
        del container["state"]["terminated"]["finishedAt"]
    return status


def with_sidecar(status, state=None):
    """Add a container, still running or in another `state`, beside a trainer that has ended."""
    sidecar = {"name": "proxy", "state": state or {"running": {}}}
    containers = [*status["containerStatuses"], sidecar]
    return {**status, "phase": "Running", "containerStatuses": containers}
