"""Read a pod, as the API server shows it, into a Pod. No state of a pod is an error."""

import json
import re
from datetime import datetime
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.kueue import POD_FINALIZER, POD_GATE, selector_of_place
from ddpjob.core.api.pod_groups import group_of_pod
from ddpjob.core.api.queue import LABEL_QUEUE
from ddpjob.core.api.readers import (
    Dict,
    child,
    children,
    integer_or_none,
    integer_or_zero,
    mapping_or_empty,
)
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.times import LAST_MOMENT, MAX_SECONDS, parse_time
from ddpjob.core.observe.disruptions import (
    condition_of,
    disruption,
    finished_at,
    is_lost,
    own_limit,
)
from ddpjob.core.observe.observation import Finding, Pod, TrainerState
from ddpjob.core.observe.order import read_order
from ddpjob.core.observe.placement import read_placement, read_requests
from ddpjob.core.observe.termination import SETUP_FAILED, Termination, read_termination
from ddpjob.core.observe.torchrun_log import last_line

# Reasons of a waiting container if its image cannot be pulled.
IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
)

# The grace period of Kubernetes, if a pod has none, in seconds.
DEFAULT_GRACE = 30

# Reasons of a waiting container during a normal start.
NORMAL_REASONS = ("", "ContainerCreating", "PodInitializing")

# The reason of the condition PodScheduled while a scheduling gate holds a pod.
GATED = "SchedulingGated"

HELD_BY_KUEUE = Finding(
    Reason.HELD_BY_KUEUE,
    "Kueue holds the pod by itself, so the gang may start in part; let its configuration name "
    "DDPJobs (integrations.externalFrameworks: [DDPJob.v1alpha1.ddpjob.dev]), and give the job the "
    f"label {LABEL_QUEUE}",
)

# The scheduler's message if a claim of the pod does not exist. Some versions end it with the words
# "not found" once more.
CLAIM_NOT_FOUND = re.compile(r'persistentvolumeclaim "([^"]+)" not found')

# Reasons of a container that its runtime could not start, of containerd and of Docker.
NOT_STARTED = ("StartError", "ContainerCannotRun")

# The reason of a container killed for using more memory than its limit.
OOM_KILLED = "OOMKilled"

# The reason of a pod with a failed init container. Its exit code is not the worker's.
INIT_FAILED = "InitFailed"


def read_pod(body: Dict) -> Pod | None:
    """Read a pod of a job. Return None if its labels name no attempt or no index."""
    metadata = child(body, "metadata")
    spec, status = child(body, "spec"), child(body, "status")
    labels = child(metadata, "labels")
    attempt = str(labels.get(names.LABEL_ATTEMPT, ""))
    index = str(labels.get(names.LABEL_INDEX, ""))
    if not attempt.isdecimal() or not index.isdecimal():
        return None
    name = str(metadata.get("name", ""))
    told, container = _assignment(metadata), _trainer_container(status)
    state, end, termination = _state_and_end(metadata, status, container)
    return Pod(
        name=name,
        uid=str(metadata.get("uid", "")),
        attempt=int(attempt),
        born=_birth(name, int(attempt)),
        index=int(index),
        state=state,
        node_name=str(spec.get("nodeName") or ""),
        address=str(status.get("podIP") or ""),
        agent=_agent(spec),
        held=told.get("start") is False,
        dumps=told.get("dump") is True,
        order=read_order(told),
        ready=_is_ready(metadata, status),
        ready_since=_ready_since(status),
        sets_up=state is TrainerState.RUNNING and _is_starting_up(status),
        creating_since=_creating_since(status) if state is TrainerState.PENDING else None,
        released=_is_removed(metadata) or _is_released(status, end),
        grace=grace_of(spec),
        deletion_deadline=_deletion_deadline(metadata),
        started="terminated" in container or "running" in container,
        running_since=parse_time(child(container, "running").get("startedAt")),
        looks_lost=_looks_lost(status),
        gated=_schedule_condition(status).get("reason") == GATED,
        has_claims=_has_claims(spec),
        tolerated=_tolerated(spec),
        requests=read_requests(spec),
        placement=read_placement(spec),
        priority=integer_or_zero(spec.get("priority")),
        group=group_of_pod(body),
        place=selector_of_place(body),
        disruption=None if state is TrainerState.SUCCEEDED else disruption(body, end),
        own_limit=own_limit(status),
        blocked=_blocked(body, container) if state is TrainerState.PENDING else None,
        exit_code=integer_or_none((end or {}).get("exitCode")),
        exit_reason=_exit_reason(end or {}, termination),
        message=termination.text,
        follower=termination.follower,
        timed_out=termination.timed_out,
        summary=termination.summary,
        result=termination.result,
        reported=termination.attempt,
        hang=termination.hang,
        steps=termination.steps,
        total_steps=termination.total_steps,
        trained=termination.trained,
        finished=finished_at(end or {}),
    )


def _state_and_end(
    metadata: Dict,
    status: Dict,
    container: Dict,
) -> tuple[TrainerState, Dict | None, Termination]:
    """Return the state of the trainer, the end of it or of an init container, and its words."""
    if "terminated" not in container:
        failed = _failed_init(metadata, status)
        if failed is not None:
            # It is not the log of a worker, whatever is in it.
            return TrainerState.FAILED, failed, Termination(str(failed["message"]))
    state = _trainer_state(status.get("phase"), container)
    if "terminated" not in container:
        return state, None, Termination()
    end = child(container, "terminated")
    return state, end, read_termination(str(end.get("message") or ""))


def _assignment(metadata: Dict) -> Dict:
    """Return the last assignment of a pod's agent: the fields of core/render/assignment.py."""
    text = child(metadata, "annotations").get(names.ANNOTATION_ASSIGNMENT)
    # Anybody who may change the pod can write anything into it.
    try:
        return mapping_or_empty(json.loads(text or "{}"))
    except (TypeError, ValueError, RecursionError):
        return {}


def _birth(name: str, attempt: int) -> int:
    """Return the attempt of a pod's creation, from its name."""
    birth = name.split("-")[-2:][0]
    return int(birth) if birth.isdecimal() else attempt


def grace_of(spec: Dict) -> int:
    """Return the grace period of a pod's spec in seconds. The API server accepts any number."""
    seconds = integer_or_none(spec.get("terminationGracePeriodSeconds"))
    return DEFAULT_GRACE if seconds is None else min(max(seconds, 0), MAX_SECONDS)


def _agent(spec: Dict) -> str:
    """Return the ConfigMap with the pod's agent; empty for a pod without one."""
    for volume in children(spec, "volumes"):
        if volume.get("name") == names.AGENT_VOLUME:
            return str(child(volume, "configMap").get("name", ""))
    return ""


def _has_claims(spec: Dict) -> bool:
    volumes = children(spec, "volumes")
    return any("persistentVolumeClaim" in volume for volume in volumes)


def _ready_since(status: Dict) -> str:
    ready = condition_of(status, "Ready")
    if ready.get("status") != "True":
        return ""
    return str(ready.get("lastTransitionTime", ""))


def _has_containers(status: Dict) -> bool:
    """Return True if the kubelet of a pod has created a container of it."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in children(status, kind):
            if "waiting" not in child(container, "state"):
                return True
    return False


def _creating_since(status: Dict) -> datetime | None:
    """Return since when a pod has had a node, if its kubelet has not created a container yet."""
    if _has_containers(status):
        return None
    scheduled = condition_of(status, "PodScheduled")
    if scheduled.get("status") != "True":
        return None
    return parse_time(scheduled.get("lastTransitionTime"))


def _is_ready(metadata: Dict, status: Dict) -> bool:
    """Return True if the trainer became ready in the attempt assigned to its pod.

    When a pod gets another assignment, it keeps the condition of the last one for a moment. The
    condition of the pod depends on its sidecars too, so it decides nothing else.
    """
    before = child(metadata, "annotations").get(names.ANNOTATION_READY_BEFORE)
    if before and before == _ready_since(status):
        return False
    trainer = _trainer_status(status)
    return bool(trainer.get("ready"))


def _is_starting_up(status: Dict) -> bool:
    """Return True if the startup probe of the running trainer has not succeeded."""
    trainer = _trainer_status(status)
    return trainer.get("started") is False


def _trainer_status(status: Dict) -> Dict:
    """Return the status of the container `trainer`."""
    for container in children(status, "containerStatuses"):
        if container.get("name") == names.TRAINER:
            return container
    return {}


def _trainer_container(status: Dict) -> Dict:
    """Return the `state` of the container `trainer`."""
    return child(_trainer_status(status), "state")


def _trainer_state(phase: Any, container: Dict) -> TrainerState:
    if "terminated" in container:
        exit_code = child(container, "terminated").get("exitCode")
        return TrainerState.SUCCEEDED if exit_code == 0 else TrainerState.FAILED
    if phase in ("Failed", "Succeeded"):
        # The end of the trainer was never reported: the pod was refused, evicted or lost.
        return TrainerState.FAILED
    return TrainerState.RUNNING if "running" in container else TrainerState.PENDING


def _exit_reason(end: Dict, termination: Termination) -> str:
    """Return a kubelet's reason for the end of a container, or SETUP_FAILED for a failed setup."""
    reason = str(end.get("reason") or "")
    if termination.setup and reason != OOM_KILLED:
        return SETUP_FAILED
    return reason


def _failed_init(metadata: Dict, status: Dict) -> Dict | None:
    """Return the end of a failed init container. The trainer never starts after it.

    Its message has the last line of the container, or how to read its log.
    """
    if status.get("phase") != "Failed":
        return None
    for container in children(status, "initContainerStatuses"):
        end = child(child(container, "state"), "terminated")
        if end.get("exitCode"):
            name = str(container.get("name"))
            words = _init_words(metadata, name, end)
            return {
                **end,
                "reason": end.get("reason") if is_lost(end) else INIT_FAILED,
                "message": f"init container {name}: {words}",
            }
    return None


def _init_words(metadata: Dict, name: str, end: Dict) -> str:
    line = last_line(str(end.get("message") or ""))
    why = str(end.get("reason") or f"exit code {end['exitCode']}")
    if line and why != OOM_KILLED:
        return line
    namespace = metadata.get("namespace")
    pod = metadata.get("name")
    return f"{why} (its log: kubectl -n {namespace} logs {pod} -c {name})"


def _is_removed(metadata: Dict) -> bool:
    """Return True if the pod was deleted by force, and only a finalizer keeps the object."""
    grace = metadata.get("deletionGracePeriodSeconds")
    return "deletionTimestamp" in metadata and grace == 0


def uses_quota(body: Dict) -> bool:
    """Return True if a pod still has its share of a quota: all its containers have to end."""
    has_ended = child(body, "status").get("phase") in ("Succeeded", "Failed")
    return not has_ended and not _is_removed(child(body, "metadata"))


def _is_released(status: Dict, end: Dict | None) -> bool:
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    return end is not None and not _sidecars_run(status)


def _sidecars_run(status: Dict) -> bool:
    """Return True if a container beside the trainer has not ended.

    Sidecars among the init containers do not count: the kubelet ends those itself.
    """
    for container in children(status, "containerStatuses"):
        is_sidecar = container.get("name") != names.TRAINER
        has_ended = "terminated" in child(container, "state")
        if is_sidecar and not has_ended:
            return True
    return False


def _looks_lost(status: Dict) -> bool:
    """Return True if the pod is not ready while all its containers are.

    The control plane sets the pods of an unreachable node to not ready, by the condition Ready
    alone. A kubelet changes ContainersReady too. If a readiness gate is open, it gives a reason.
    """
    ready = condition_of(status, "Ready")
    if ready.get("status") != "False" or ready.get("reason"):
        return False
    return condition_of(status, "ContainersReady").get("status") == "True"


def _tolerated(spec: Dict) -> tuple[str, ...]:
    """Return the keys of the taints tolerated by a pod, without those added by Kubernetes."""
    tolerated = []
    for toleration in children(spec, "tolerations"):
        key = str(toleration.get("key") or "")
        if not key.startswith("node.kubernetes.io/"):
            tolerated.append(key)
    return tuple(tolerated)


def _deletion_deadline(metadata: Dict) -> datetime | None:
    """Return the end of the grace period of a pod under deletion, or None for another pod."""
    deadline = metadata.get("deletionTimestamp")
    if not deadline:
        return None
    # An unreadable deadline is the last moment: the pod is being deleted, and not overdue.
    return parse_time(deadline) or LAST_MOMENT


def _schedule_condition(status: Dict) -> Dict:
    """Return the condition PodScheduled if it is False."""
    condition = condition_of(status, "PodScheduled")
    return condition if condition.get("status") == "False" else {}


def _blocked(body: Dict, container: Dict) -> Finding | None:
    """Return what keeps a pending pod from starting, or None."""
    metadata, spec, status = (child(body, part) for part in ("metadata", "spec", "status"))
    if any(gate.get("name") == POD_GATE for gate in children(spec, "schedulingGates")):
        return HELD_BY_KUEUE
    scheduled = _schedule_condition(status)
    if scheduled:
        return _unscheduled(scheduled)
    for init in children(status, "initContainerStatuses"):
        finding = _waiting(child(init, "state"))
        if finding:
            message = f"init container {init.get('name')}: {finding.message}"
            return Finding(finding.reason, message)
    is_held = POD_FINALIZER in (metadata.get("finalizers") or ())
    return _waiting(container) or (HELD_BY_KUEUE if is_held else None)


def _unscheduled(condition: Dict) -> Finding:
    """Return why a pod has no node, from its condition PodScheduled."""
    message = str(condition.get("message") or "no node fits yet")
    if condition.get("reason") == GATED:
        return Finding(Reason.GATED, message)
    claim = CLAIM_NOT_FOUND.search(message)
    if claim:
        # The scheduler's own words are about nodes, but the nodes are not at fault.
        missing = f'PersistentVolumeClaim "{claim[1]}" does not exist in the namespace of the job'
        return Finding(Reason.CLAIM_NOT_FOUND, missing)
    return Finding(Reason.UNSCHEDULABLE, message)


def _waiting(container: Dict) -> Finding | None:
    waiting = child(container, "waiting")
    reason = str(waiting.get("reason") or "")
    message = str(waiting.get("message") or reason)
    if reason in NORMAL_REASONS:
        return None
    if reason in IMAGE_REASONS:
        return Finding(Reason.IMAGE_PULL, message)
    return Finding(reason, message)
