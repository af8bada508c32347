"""A rendered pod, and what is in it."""

import json

from builders import a_job, a_status

from ddpjob.core.api.names import ANNOTATION_ASSIGNMENT
from ddpjob.core.render.objects import pods
from ddpjob.core.render.pod_context import Settings

DEFAULTS = Settings()
RESTRICTED = Settings(restricted=True)


def render(index=0, *, nodes=2, attempt=0, settings=DEFAULTS, **spec):
    """Return the pod of one node, of a job with these fields in its spec."""
    status = a_status(attempt=attempt, nodes=nodes)
    (pod,) = pods(a_job(status=status, nodes=nodes, **spec), [index], settings)
    return pod


def trainer_of(pod):
    (container,) = (entry for entry in pod["spec"]["containers"] if entry["name"] == "trainer")
    return container


def env_of(pod):
    """Return the trainer's variables: for each name its value or its source."""
    found = {}
    for item in trainer_of(pod)["env"]:
        found[item["name"]] = item.get("value", item.get("valueFrom"))
    return found


def options_of(pod):
    """Return the options of the pod's agent."""
    return json.loads(trainer_of(pod)["command"][-1])


def assignment_of(pod):
    """Return the assignment of a new pod."""
    return json.loads(pod["metadata"]["annotations"][ANNOTATION_ASSIGNMENT])


def mounts_of(pod):
    return {mount["mountPath"]: mount["name"] for mount in trainer_of(pod)["volumeMounts"]}


def volumes_of(pod):
    return {volume["name"]: volume for volume in pod["spec"]["volumes"]}
