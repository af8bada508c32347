"""The values in the skeleton of a pod: command, environment, resources, volumes and affinity."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ddpjob.core import names
from ddpjob.core.agent_files import STARTER, config_map_name
from ddpjob.core.assignment import (
    GRACE_SECONDS,
    SHUTDOWN_SECONDS,
    Addresses,
    ServiceAddresses,
    agent_options,
)
from ddpjob.core.job import Job
from ddpjob.core.merge import merge, merge_by, replace_by
from ddpjob.core.profiles import Profile, catalog
from ddpjob.core.readers import Dict, child
from ddpjob.core.spec import Spec

# User and group of pods that pass the Pod Security level restricted.
RESTRICTED_ID = 1000

# Placeholders for what differs between the pods of a gang. Their private-use characters cannot be
# confused with a user's text.
INDEX = "\ue000index\ue000"
HOSTNAME = "\ue000hostname\ue000"
ASSIGNMENT = "\ue000assignment\ue000"
PORT = "\ue000port\ue000"

# Fields of the DDPJob's spec that belong to the pod's spec, and those that belong to the container.
POD_LEVEL_FIELDS = (
    "imagePullSecrets",
    "nodeSelector",
    "topologySpreadConstraints",
    "serviceAccountName",
    "priorityClassName",
)
CONTAINER_LEVEL_FIELDS = ("imagePullPolicy", "envFrom")

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
REQUIRED_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED_AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"
HOST_NAME = "kubernetes.io/hostname"

# The operator's volume at /dev/shm, and the name of the file in that with the assignment.
SHARED_MEMORY_VOLUME = "ddpjob-shm"
ASSIGNMENT_NAME = names.ASSIGNMENT_FILE.rpartition("/")[2]

# Weight of the wish to avoid a node, from 1 to 100.
AVOIDANCE = 100


@dataclass(frozen=True)
class Settings:
    """The administrator's choices for every generated pod."""

    restricted: bool = False
    # False if /dev/shm is not the pod's own, as on one machine.
    clears_memory: bool = True
    addresses: Addresses = field(default_factory=ServiceAddresses)


def common_context(job: Job) -> dict[str, Any]:
    """Return the values that pods and the Service have in common."""
    return {
        "job": job,
        "api_version": names.API_VERSION,
        "kind": names.KIND,
        "labels": {
            names.LABEL_MANAGED_BY: names.MANAGER,
            names.LABEL_JOB: job.name,
            names.LABEL_JOB_UID: job.uid,
        },
        "managed_by_label": names.LABEL_MANAGED_BY,
        "manager": names.MANAGER,
        "uid_label": names.LABEL_JOB_UID,
        "index_label": names.LABEL_INDEX,
    }


def pod_context(job: Job, spec: Spec, settings: Settings) -> dict[str, Any]:
    """Return the values for the template of the current attempt's pods, with placeholders."""
    attempt = job.status.attempt or 0
    fields = spec.pod_fields
    profile = catalog()[spec.accelerator]
    common = common_context(job)
    volumes, mounts = _volumes(spec, settings)
    overlay = child(spec.pod_template, "spec")
    has_service_account = {**fields, **overlay}.get("serviceAccountName")
    needs_group = settings.restricted or spec.checkpoint
    return {
        **common,
        "labels": {
            **common["labels"],
            names.LABEL_ATTEMPT: str(attempt),
            names.LABEL_INDEX: INDEX,
        },
        "name": names.pod_name(job.name, attempt, INDEX),
        "hostname": HOSTNAME,
        "trainer": names.TRAINER,
        "spec": spec,
        "annotations": {names.ANNOTATION_ASSIGNMENT: ASSIGNMENT},
        "command": _command(spec, settings.clears_memory and _has_own_memory(volumes)),
        "env": _env(job, spec, profile, settings),
        "resources": _resources(spec),
        "port": names.RENDEZVOUS_PORT,
        "agent_port": names.AGENT_PORT,
        "volumes": volumes,
        "mounts": mounts,
        "affinity": _avoid_nodes(job, _affinity(profile, fields.get("affinity", {}))),
        "tolerations": [*fields.get("tolerations", []), *map(dict, profile.tolerations)],
        "pod_fields": {key: fields[key] for key in POD_LEVEL_FIELDS if key in fields},
        "container_fields": {key: fields[key] for key in CONTAINER_LEVEL_FIELDS if key in fields},
        "token": bool(has_service_account),
        "grace": GRACE_SECONDS,
        "restricted": settings.restricted,
        "fs_group": RESTRICTED_ID if needs_group else None,
        "user_id": RESTRICTED_ID,
    }


def _command(spec: Spec, clears_memory: bool) -> list[str]:
    """Return the command that starts the agent, without the user's arguments."""
    options = agent_options(spec, PORT, names.SHARED_MEMORY if clears_memory else None)
    folder = names.AGENT_FOLDER
    if spec.python:
        # Nothing has to be found then.
        return [spec.python, "-IS", folder, "agent", options]
    return ["/bin/sh", f"{folder}/{STARTER}", spec.command[0], folder, options]


def _env(job: Job, spec: Spec, profile: Profile, settings: Settings) -> list[Dict]:
    """Return the operator's variables, then the profile's, then the user's. The last one wins."""
    variables = {
        "DDP_JOB_NAME": job.name,
        "DDP_JOB_NAMESPACE": job.namespace,
        "DDP_NODE_INDEX": INDEX,
        "OMP_NUM_THREADS": str(_threads(spec)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
    }
    if spec.checkpoint:
        folder = f"{spec.checkpoint.mount_path}/{job.name}"
        variables["DDP_CHECKPOINT_DIR"] = folder
        if profile.node_cache_variable:
            variables[profile.node_cache_variable] = f"{folder}/compile-cache/n{INDEX}"
    if settings.restricted:
        # An unknown user has no home folder, and getpass.getuser() raises without a name.
        variables |= {"HOME": names.HOME, "USER": "ddpjob", "LOGNAME": "ddpjob"}
    variables |= profile.env
    entries: list[Dict] = [{"name": name, "value": value} for name, value in variables.items()]
    node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    entries.append({"name": "DDP_NODE_NAME", "valueFrom": node_name})
    return replace_by("name", entries, spec.pod_fields.get("env", []))


def _threads(spec: Spec) -> int:
    """Return the CPU threads of each process.

    The container's cores are shared evenly. By default torch would take the whole node's.
    """
    resources = spec.pod_fields.get("resources", {})
    quantity = child(resources, "requests").get("cpu") or child(resources, "limits").get("cpu")
    return max(1, int(_cores(quantity) // spec.nproc_per_node))


def _cores(quantity: Any) -> float:
    """Return a quantity of CPU in cores; 0 if it is absent or not a number."""
    text = str(quantity or 0)
    try:
        cores = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    except ValueError:
        return 0.0
    return cores if isfinite(cores) else 0.0


def _resources(spec: Spec) -> Dict:
    """Return the user's resources and the profile's devices.

    Kubernetes copies the limits of devices into the requests.
    """
    limits = {name: str(count) for name, count in spec.devices.items()}
    base = {"limits": limits} if limits else {}
    merged: Dict = merge(base, spec.pod_fields.get("resources", {}))
    return merged


def _volumes(spec: Spec, settings: Settings) -> tuple[list[Dict], list[Dict]]:
    """Return (volumes, mounts): the operator's, then the user's.

    If the user mounts a volume at one of the operator's paths, the operator's is omitted.
    """
    annotation = {"fieldPath": f"metadata.annotations['{names.ANNOTATION_ASSIGNMENT}']"}
    assignment = {"items": [{"path": ASSIGNMENT_NAME, "fieldRef": annotation}]}
    memory = {"emptyDir": {"medium": "Memory"}}
    sources: dict[str, tuple[str, Dict]] = {
        names.AGENT_VOLUME: (names.AGENT_FOLDER, {"configMap": {"name": config_map_name()}}),
        "ddpjob-run": (names.RUN_FOLDER, memory),
        "ddpjob-pod": (names.POD_FOLDER, {"downwardAPI": assignment}),
        # Without this volume /dev/shm has 64 MiB.
        SHARED_MEMORY_VOLUME: (names.SHARED_MEMORY, memory),
    }
    if spec.checkpoint:
        claim = {"persistentVolumeClaim": {"claimName": spec.checkpoint.claim}}
        sources["ddpjob-checkpoint"] = (spec.checkpoint.mount_path, claim)
    if settings.restricted:
        sources["ddpjob-home"] = (names.HOME, {"emptyDir": {}})
    user_mounts: Sequence[Dict] = spec.pod_fields.get("volumeMounts", [])
    taken = {str(mount.get("mountPath")).rstrip("/") for mount in user_mounts}
    volumes: list[Dict] = []
    mounts: list[Dict] = []
    for name, (path, source) in sources.items():
        if path not in taken:
            volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path})
    return (
        merge_by("name", volumes, spec.pod_fields.get("volumes", [])),
        merge_by("mountPath", mounts, user_mounts),
    )


def _has_own_memory(volumes: Sequence[Dict]) -> bool:
    """Return False if a user's volume is mounted at /dev/shm, which others may use too."""
    return any(volume["name"] == SHARED_MEMORY_VOLUME for volume in volumes)


def _affinity(profile: Profile, user: Dict) -> Dict:
    """Return the user's affinity, restricted to the profile's instance types.

    Nodes without the label of the instance type are allowed too: there the devices decide.
    """
    if not profile.instance_types:
        return user
    instance_types = [
        {"key": INSTANCE_TYPE, "operator": "In", "values": list(profile.instance_types)},
        {"key": INSTANCE_TYPE, "operator": "DoesNotExist"},
    ]
    node_affinity = user.get("nodeAffinity") or {}
    user_required = node_affinity.get(REQUIRED_AFFINITY) or {}
    # Terms are alternatives, so each of them needs the instance type.
    terms = []
    for term in user_required.get("nodeSelectorTerms") or [{}]:
        for instance_type in instance_types:
            expressions = [*(term.get("matchExpressions") or ()), instance_type]
            terms.append({**term, "matchExpressions": expressions})
    required = {REQUIRED_AFFINITY: {"nodeSelectorTerms": terms}}
    return {**user, "nodeAffinity": {**node_affinity, **required}}


def _avoid_nodes(job: Job, affinity: Dict) -> Dict:
    """Return the affinity with the wish to avoid the nodes on which attempts failed repeatedly."""
    avoided = [node.name for node in job.status.failed_nodes if node.is_avoided]
    if not avoided:
        return affinity
    expression = {"key": HOST_NAME, "operator": "NotIn", "values": avoided}
    wish = {"weight": AVOIDANCE, "preference": {"matchExpressions": [expression]}}
    node_affinity = affinity.get("nodeAffinity") or {}
    preferred = [*(node_affinity.get(PREFERRED_AFFINITY) or ()), wish]
    return {**affinity, "nodeAffinity": {**node_affinity, PREFERRED_AFFINITY: preferred}}
