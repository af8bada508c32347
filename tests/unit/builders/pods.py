"""Pods as the API server shows them: `a_pod(1, failed())`, with a status of `containers`."""

import json
from datetime import timedelta

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.times import format_time
from ddpjob.core.observe.observation import Pod
from ddpjob.core.observe.pods import read_pod

from .jobs import JOB_UID
from .times import at


def a_pod(index=0, status=None, *, attempt=0, deleted_at=None, grace=45, **spec):
    """Return the pod of one node as the API server shows it.

    Without a `status` it is Pending and not scheduled. Fields of its spec can be given by name. It
    has no agent of this version, so it does not stay for another attempt.
    """
    name = names.pod_name("digits", attempt, index)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": "digits",
        "uid": JOB_UID,
        "controller": True,
    }
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-of-{name}",
        "labels": {names.LABEL_ATTEMPT: str(attempt), names.LABEL_INDEX: str(index)},
        "ownerReferences": [owner],
    }
    if deleted_at is not None:
        metadata["deletionTimestamp"] = format_time(deleted_at + timedelta(seconds=grace))
        metadata["deletionGracePeriodSeconds"] = grace
    if is_scheduled(status):
        spec = {"nodeName": f"node-{index}", **spec}
    spec = {"terminationGracePeriodSeconds": 45, **spec}
    return {"metadata": metadata, "spec": spec, "status": status or {"phase": "Pending"}}


def an_agents_pod(index=0, status=None, *, attempt=0, born=None, annotations=(), **fields):
    """Return a pod that may stay for another attempt.

    `born` is the attempt of its creation, if the pod has stayed since then.
    """
    pod = a_pod(index, status, attempt=attempt, **fields)
    if born is not None:
        name = names.pod_name("digits", born, index)
        pod["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
    pod["metadata"]["annotations"] = dict(annotations)
    agent = {"name": names.AGENT_VOLUME, "configMap": {"name": config_map_name()}}
    pod["spec"] = {**pod["spec"], "volumes": [agent]}
    return pod


def told(seconds, copies=0, **fields):
    """Return the annotations of a kept pod with an assignment given so many seconds after NOW."""
    time = format_time(at(seconds))
    text = json.dumps({"start": True, "grace": 7, "time": time, "copies": copies, **fields})
    return {names.ANNOTATION_ASSIGNMENT: text}


def a_stray(index=0, status=None, *, name="copy", attempt=0):
    """Return a pod with the labels and the owner of a gang's pod, but with a name of its own."""
    pod = a_pod(index, status, attempt=attempt)
    pod["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
    return pod


def is_scheduled(status) -> bool:
    """Return True if a pod with this status has a Kubernetes node."""
    if status is None:
        return False
    for entry in status.get("conditions", ()):
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return False
    return True


def read_pods(*bodies) -> tuple[Pod, ...]:
    return tuple(pod for pod in map(read_pod, bodies) if pod)
