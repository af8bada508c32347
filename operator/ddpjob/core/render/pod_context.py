"""The values in the skeleton of a pod: command, environment, resources, volumes and affinity."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpjob.core.agent_files import STARTER, config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.merge import merge, merge_by, replace_by
from ddpjob.core.api.pod_fields import GRACE_SECONDS
from ddpjob.core.api.profiles import Profile, catalog
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.resolved import Spec
from ddpjob.core.render.assignment import Addresses, ServiceAddresses, agent_options

# User and group of pods at the Pod Security level restricted.
RESTRICTED_ID = 1000

# Placeholders for what differs between the pods of a gang. Their private-use characters cannot be
# confused with a user's text.
INDEX = "\ue000index\ue000"
HOSTNAME = "\ue000hostname\ue000"
ASSIGNMENT = "\ue000assignment\ue000"
PORT = "\ue000port\ue000"

# Fields of the DDPJob's spec for the pod's spec, and fields for the container.
POD_LEVEL_FIELDS = (
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "serviceAccountName",
    "priorityClassName",
)
CONTAINER_LEVEL_FIELDS = ("imagePullPolicy", "envFrom")

# The agent ends a setup that lasts too long, and reports it. The kubelet would end the agent so
# many seconds later.
SETUP_MARGIN = 300

# The name of the file with the assignment.
ASSIGNMENT_NAME = names.ASSIGNMENT_FILE.rpartition("/")[2]


@dataclass(frozen=True)
class Settings:
    """The administrator's choices for every generated pod.

    - `restricted`: the pods follow the Pod Security level restricted, unless a job says otherwise.
    - `defaults`: fields of a pod's spec for jobs without their own (job_defaults.py).
    - `isolated`: a pod has files and IPC of its own. Processes of one machine have not.
    """

    restricted: bool = False
    isolated: bool = True
    addresses: Addresses = field(default_factory=ServiceAddresses)
    defaults: Dict = field(default_factory=dict)

    def of_job(self, spec: Spec | None) -> "Settings":
        """Return the settings with what a job chooses itself."""
        if spec is None or spec.restricted is None:
            return self
        return replace(self, restricted=spec.restricted)


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
    attempt = job.status.attempt.number or 0
    fields = spec.pod_fields
    profile = catalog()[spec.accelerator]
    common = common_context(job)
    volumes, mounts = _volumes(spec, settings)
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
        "command": _command(job, spec, settings),
        "env": _env(job, spec, profile, settings),
        "resources": _resources(spec),
        "port": names.RENDEZVOUS_PORT,
        "agent_port": names.AGENT_PORT,
        "started_path": names.STARTED_PATH,
        "startup_failures": int(spec.setup_timeout.total_seconds()) + SETUP_MARGIN,
        "volumes": volumes,
        "mounts": mounts,
        "pod_fields": {key: fields[key] for key in POD_LEVEL_FIELDS if key in fields},
        "container_fields": {key: fields[key] for key in CONTAINER_LEVEL_FIELDS if key in fields},
        "grace": GRACE_SECONDS,
        "restricted": settings.restricted,
        "fs_group": RESTRICTED_ID if needs_group else None,
        "user_id": RESTRICTED_ID,
    }


def _command(job: Job, spec: Spec, settings: Settings) -> list[str]:
    """Return the command to start the agent, without the user's arguments."""
    state_path = names.state_path(job.uid, INDEX)
    options = agent_options(spec, state_path, PORT, isolated=settings.isolated)
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
    }
    if spec.checkpoint:
        folder = spec.checkpoint.folder(job.name)
        variables[names.CHECKPOINT_VARIABLE] = folder
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


def _resources(spec: Spec) -> Dict:
    """Return the user's resources and the profile's devices.

    Kubernetes copies the limits of devices into the requests.
    """
    limits = {name: str(count) for name, count in spec.devices.items()}
    base = {"limits": limits} if limits else {}
    merged: Dict = merge(base, spec.pod_fields.get("resources", {}))
    return merged


def _volumes(spec: Spec, settings: Settings) -> tuple[list[Dict], list[Dict]]:
    """Return (volumes, mounts): the operator's, then the user's."""
    annotation = {"fieldPath": f"metadata.annotations['{names.ANNOTATION_ASSIGNMENT}']"}
    assignment = {"items": [{"path": ASSIGNMENT_NAME, "fieldRef": annotation}]}
    memory = {"emptyDir": {"medium": "Memory"}}
    agent = {"configMap": {"name": config_map_name()}}
    sources: list[tuple[str, Dict, Sequence[str]]] = [
        (names.OWN_MOUNTS[names.FOLDER], {"emptyDir": {}}, [names.FOLDER]),
        (names.OWN_MOUNTS[names.AGENT_FOLDER], agent, [names.AGENT_FOLDER]),
        (names.OWN_MOUNTS[names.RUN_FOLDER], memory, [names.RUN_FOLDER]),
        (names.OWN_MOUNTS[names.POD_FOLDER], {"downwardAPI": assignment}, [names.POD_FOLDER]),
        # Without this volume /dev/shm has 64 MiB.
        (
            names.OWN_MOUNTS[names.MEMORY_FOLDER],
            memory,
            [names.SHARED_MEMORY, names.MEMORY_FOLDER],
        ),
    ]
    if spec.code:
        sources.append((names.CODE_VOLUME, {"configMap": {"name": spec.code}}, [names.CODE_FOLDER]))
    if spec.checkpoint:
        claim = {"persistentVolumeClaim": {"claimName": spec.checkpoint.claim}}
        sources.append((names.CHECKPOINT_VOLUME, claim, [spec.checkpoint.mount_path]))
    if settings.restricted:
        sources.append(("ddpjob-home", {"emptyDir": {}}, [names.HOME]))
    volumes: list[Dict] = [{"name": name, **source} for name, source, _ in sources]
    mounts: list[Dict] = [
        {"name": name, "mountPath": path} for name, _, paths in sources for path in paths
    ]
    return (
        merge_by("name", volumes, spec.pod_fields.get("volumes", [])),
        merge_by("mountPath", mounts, spec.pod_fields.get("volumeMounts", [])),
    )
