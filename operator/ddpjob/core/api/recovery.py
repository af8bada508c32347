"""Whether pods stay for the next attempt of a job.

A kept pod has its files, and a new one has not. A script with its checkpoints there would resume
from two epochs, and hang. So pods stay by default only if it can save its checkpoints elsewhere.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.merge import merge, one_for_each_path
from ddpjob.core.api.readers import Dict, child, children

# Kinds of volumes with the same files for all pods of a job. An `ephemeral` claim belongs to one
# pod, and a `hostPath` to one node.
SHARED_VOLUMES = (
    "persistentVolumeClaim",
    "nfs",
    "csi",
    "cephfs",
    "glusterfs",
    "azureFile",
    "quobyte",
    "portworxVolume",
    "flexVolume",
    "rbd",
    "iscsi",
    "fc",
    "cinder",
    "scaleIO",
    "storageos",
    "awsElasticBlockStore",
    "azureDisk",
    "gcePersistentDisk",
    "vsphereVolume",
    "photonPersistentDisk",
)


class Recovery(StrEnum):
    """Whether pods stay for the next attempt."""

    IN_PLACE = "InPlace"
    RECREATE = "Recreate"


def shared_volume(pod_fields: Mapping[str, Any], pod_template: Dict) -> str:
    """Return the name of a shared volume that the merged pod's trainer can write to, or ""."""
    mounts = pod_fields.get("volumeMounts", [])
    trainer = {"name": names.TRAINER, "volumeMounts": mounts}
    base = {
        "volumes": pod_fields.get("volumes", []),
        "containers": [trainer],
    }
    pod_spec = merge(base, child(pod_template, "spec"))
    writable = set(_writable(children(pod_spec, "containers")))
    for volume in children(pod_spec, "volumes"):
        if volume.get("name") in writable and _is_shared_and_writable(volume):
            return str(volume["name"])
    return ""


def _is_shared_and_writable(volume: Dict) -> bool:
    """Return True if all pods of a job can write to a volume."""
    for kind in SHARED_VOLUMES:
        if kind in volume:
            source = child(volume, kind)
            return not source.get("readOnly")
    return False


def _writable(containers: Iterable[Dict]) -> Iterable[str]:
    """Yield the names of the volumes that the trainer can write to.

    With `subPathExpr`, each pod may have a folder of its own.
    """
    for container in containers:
        if container.get("name") != names.TRAINER:
            continue
        for mount in one_for_each_path(children(container, "volumeMounts")):
            if not mount.get("readOnly") and not mount.get("subPathExpr"):
                yield str(mount.get("name"))
