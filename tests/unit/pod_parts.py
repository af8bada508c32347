"""The parts of a rendered pod."""

import json

from ddpjob.core.api.names import ANNOTATION_ASSIGNMENT


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
