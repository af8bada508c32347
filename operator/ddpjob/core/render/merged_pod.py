"""The last step of rendering: complete a pod after the merge with podTemplate.

    skeleton ─▶ fields of the spec ─▶ podTemplate ─▶ complete

A user can set some fields either in the spec or in podTemplate. Whatever depends on them is decided
here, from the merged pod.
"""

from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.kueue import Placement
from ddpjob.core.api.merge import one_for_each_path
from ddpjob.core.api.pod_groups import GroupName, add_group
from ddpjob.core.api.profiles import Profile, catalog
from ddpjob.core.api.readers import Dict, SpecError, child, children, normal_path, quoted
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.spec import Checkpoint
from ddpjob.core.observe.placement import REQUIRED
from ddpjob.core.observe.pods import grace_of
from ddpjob.core.render.job_defaults import add_job_defaults
from ddpjob.core.render.pod_context import Settings

Object = dict[str, Any]

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
PREFERRED_AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"
HOST_NAME = "kubernetes.io/hostname"

# Weight of the wish to avoid a node, from 1 to 100.
AVOIDANCE = 100

# The same of the wish for a node near the others.
NEARNESS = 100

# The agent's longest time for its report after the workers have ended, in seconds.
REPORT_SECONDS = 15

# What the Pod Security level restricted asks of every container.
RESTRICTED_CONTEXT = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def complete(merged: Dict, job: Job, spec: Spec, settings: Settings) -> Object:
    """Return a merged pod with what follows from it.

    Raises SpecError if the trainer is not in it, if a user's mount takes the place of one needed by
    the operator, or if the volume of a mount is not in it.
    """
    pod: Object = deepcopy(dict(merged))
    pod_spec = pod["spec"]
    profile = catalog()[spec.accelerator]
    trainer = _trainer(pod_spec)
    for container in _containers(pod_spec):
        if container.get("volumeMounts"):
            container["volumeMounts"] = one_for_each_path(container["volumeMounts"])
    for container in pod_spec.get("initContainers") or ():
        # Then the pod's status has the end of its log. The job's status takes it from there.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _refuse_replaced_mounts(trainer, spec.checkpoint, job.name)
    _remove_unused_volumes(pod_spec)
    _refuse_missing_volumes(pod_spec)
    variables = _own_variables(pod_spec, trainer, spec)
    _add_variables(trainer, variables)
    add_job_defaults(pod_spec, settings.defaults)
    _add_tolerations(pod_spec, profile)
    affinity = _with_instance_types(child(pod_spec, "affinity"), profile)
    affinity = _without_avoided_nodes(affinity, job)
    if affinity:
        pod_spec["affinity"] = affinity
    has_account = bool(pod_spec.get("serviceAccountName"))
    pod_spec.setdefault("automountServiceAccountToken", has_account)
    if pod_spec.get("hostNetwork"):
        # By default such a pod asks only the node's resolver, which does not know the gang's names.
        pod_spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    if settings.restricted:
        for container in _containers(pod_spec):
            own = container.get("securityContext") or {}
            container["securityContext"] = {**RESTRICTED_CONTEXT, **own}
    return pod


@dataclass(frozen=True)
class Constraints:
    """Choices about the nodes of pods, made outside of the spec.

    - `placement`: where a queue has given them room.
    - `group`: they are scheduled together or not at all. `is_near`: also in one domain.
    """

    placement: Placement | None = None
    group: GroupName | None = None
    is_near: bool = False


NO_CONSTRAINTS = Constraints()


def constrain(pod: Object, job: Job, constraints: Constraints) -> None:
    """Add what decides about the nodes of a pod."""
    if constraints.placement:
        add_placement(pod, constraints.placement)
    else:
        _add_topology(pod, job, constraints.is_near)
    if constraints.group:
        add_group(pod, constraints.group)


def _add_topology(pod: Object, job: Job, is_near: bool) -> None:
    """Wish for, or require, nodes near those of the other pods of a job.

    A group may do so itself: `is_near`. A queue chooses the nodes.
    """
    topology = job.spec.scheduling.topology if job.spec else None
    if topology is None or (topology.required and is_near):
        return
    pods = {"matchLabels": {names.LABEL_JOB_UID: job.uid}}
    term: Dict = {"labelSelector": pods, "topologyKey": topology.key}
    if topology.required:
        field = REQUIRED
        rule = term
    else:
        field = PREFERRED_AFFINITY
        rule = {"weight": NEARNESS, "podAffinityTerm": term}
    affinity = child(pod["spec"], "affinity")
    pod_affinity = child(affinity, "podAffinity")
    given = pod_affinity.get(field) or ()
    pod_affinity = {**pod_affinity, field: [*given, rule]}
    pod["spec"]["affinity"] = {**affinity, "podAffinity": pod_affinity}


def add_placement(pod: Object, placement: Placement) -> None:
    """Restrict a pod to the nodes chosen by a queue."""
    metadata = pod["metadata"]
    pod_spec = pod["spec"]
    _update_object(metadata, "labels", placement.labels)
    _update_object(metadata, "annotations", placement.annotations)
    if placement.node_labels:
        _update_object(pod_spec, "nodeSelector", placement.node_labels)
    given = pod_spec.get("tolerations") or []
    added = [dict(one) for one in placement.tolerations if dict(one) not in given]
    if added:
        pod_spec["tolerations"] = [*given, *added]


def _update_object(parent: Object, key: str, changes: Dict) -> None:
    given = parent.get(key, {})
    parent[key] = {**given, **changes}


def add_domain(pod: Object, placement: Placement, index: int) -> None:
    """Restrict the pod of a node to the part of the cluster chosen for it by a queue."""
    labels = placement.domains.get(index)
    if labels:
        _update_object(pod["spec"], "nodeSelector", labels)


def _trainer(pod_spec: Object) -> Object:
    for container in pod_spec.get("containers", ()):
        if container.get("name") == names.TRAINER:
            found: Object = container
            return found
    raise SpecError(
        f"spec.podTemplate.spec.containers: must not remove the container {names.TRAINER}; omit "
        "the field or give a list of containers"
    )


def _containers(pod_spec: Object) -> list[Object]:
    init_containers = pod_spec.get("initContainers") or ()
    return [*init_containers, *pod_spec["containers"]]


# Volumes


def _refuse_replaced_mounts(trainer: Dict, checkpoint: Checkpoint | None, job_name: str) -> None:
    """Raise SpecError for a user's mount in place of the agent's files or of the checkpoints."""
    for mount in children(trainer, "volumeMounts"):
        path = normal_path(mount["mountPath"])
        if names.is_own_path(path) and mount["name"] != names.OWN_MOUNTS.get(path):
            raise SpecError(
                f"volumeMounts: {path} is reserved: paths below {names.FOLDER} belong to the "
                "operator; choose another path"
            )
        if not checkpoint or mount["name"] == names.CHECKPOINT_VOLUME:
            continue
        if path in (checkpoint.mount_path, checkpoint.folder(job_name)):
            raise SpecError(
                f"volumeMounts: with a mount at {path}, checkpoints would not get to the claim "
                f"{checkpoint.claim} of spec.checkpoint; remove the mount or choose another path"
            )


def _refuse_missing_volumes(pod_spec: Object) -> None:
    """Raise SpecError for a mount of a volume that the pod does not have."""
    volumes = {volume.get("name") for volume in pod_spec["volumes"]}
    for container in _containers(pod_spec):
        for mount in (*children(container, "volumeMounts"), *children(container, "volumeDevices")):
            if mount.get("name") not in volumes:
                path = mount.get("mountPath") or mount.get("devicePath")
                raise SpecError(
                    f"volumeMounts: the mount at {path} names the volume "
                    f"{quoted(mount.get('name'))}, which the pod does not have; add it to "
                    "spec.volumes, or remove the mount"
                )


def _remove_unused_volumes(pod_spec: Object) -> None:
    """Remove unmounted volumes of the operator: the user has mounted others in their place."""
    used = set()
    for container in _containers(pod_spec):
        for mount in children(container, "volumeMounts"):
            used.add(mount.get("name"))
    kept = []
    for volume in pod_spec["volumes"]:
        name = volume["name"]
        if name in used or not names.is_own_volume(name):
            kept.append(volume)
    pod_spec["volumes"] = kept


# Variables


def _own_variables(pod_spec: Dict, trainer: Dict, spec: Spec) -> dict[str, str]:
    grace = grace_of(pod_spec)
    return {
        "OMP_NUM_THREADS": str(_threads(pod_spec, trainer, spec)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(shutdown_seconds(grace)),
    }


def shutdown_seconds(grace: int) -> int:
    """Return the seconds that workers have after SIGTERM, out of a pod's grace period."""
    report_seconds = min(REPORT_SECONDS, grace // 3)
    return max(1, grace - report_seconds)


def _add_variables(trainer: Object, variables: dict[str, str]) -> None:
    """Add variables that the user has not set. They come first: the others may refer to them."""
    given = trainer.get("env", [])
    known = {entry["name"] for entry in given}
    added = []
    for name, value in variables.items():
        if name not in known:
            added.append({"name": name, "value": value})
    trainer["env"] = [*added, *given]


def _threads(pod_spec: Dict, trainer: Dict, spec: Spec) -> int:
    """Return the CPU threads of each process.

    The cores of the container, or else of the pod, are shared evenly. By default torch would take
    the whole node's.
    """
    given = [child(one, "resources") for one in (trainer, pod_spec)]
    found = [child(one, kind).get("cpu") for one in given for kind in ("requests", "limits")]
    cores = _cores(next(filter(None, found), None))
    return max(1, int(cores // spec.nproc_per_node))


def _cores(quantity: Any) -> float:
    """Return a quantity of CPU in cores; 0 if it is absent or not a number."""
    text = str(quantity or 0)
    try:
        number = float(text.removesuffix("m"))
    except ValueError:
        return 0.0
    cores = number / 1000 if text.endswith("m") else number
    return cores if isfinite(cores) else 0.0


# Nodes


def _add_tolerations(pod_spec: Object, profile: Profile) -> None:
    given = pod_spec.get("tolerations") or []
    added = [dict(one) for one in profile.tolerations if dict(one) not in given]
    if given or added:
        pod_spec["tolerations"] = [*given, *added]


def _with_instance_types(affinity: Dict, profile: Profile) -> Dict:
    """Return an affinity, restricted to the profile's instance types.

    Nodes without the label of the instance type are allowed too: there the devices decide.
    """
    if not profile.instance_types:
        return affinity
    instance_types = [
        {"key": INSTANCE_TYPE, "operator": "In", "values": list(profile.instance_types)},
        {"key": INSTANCE_TYPE, "operator": "DoesNotExist"},
    ]
    node_affinity = affinity.get("nodeAffinity") or {}
    given = node_affinity.get(REQUIRED) or {}
    # Terms are alternatives, so each of them needs the instance type.
    terms = []
    for term in given.get("nodeSelectorTerms") or [{}]:
        expressions = term.get("matchExpressions") or ()
        for instance_type in instance_types:
            terms.append({**term, "matchExpressions": [*expressions, instance_type]})
    node_affinity = {**node_affinity, REQUIRED: {"nodeSelectorTerms": terms}}
    return {**affinity, "nodeAffinity": node_affinity}


def _without_avoided_nodes(affinity: Dict, job: Job) -> Dict:
    """Return an affinity with the wish to avoid nodes with repeated failures of attempts."""
    avoided = [node.name for node in job.status.failed_nodes if node.is_avoided]
    if not avoided:
        return affinity
    expression = {
        "key": HOST_NAME,
        "operator": "NotIn",
        "values": avoided,
    }
    wish = {
        "weight": AVOIDANCE,
        "preference": {"matchExpressions": [expression]},
    }
    node_affinity = affinity.get("nodeAffinity") or {}
    given = node_affinity.get(PREFERRED_AFFINITY) or ()
    node_affinity = {**node_affinity, PREFERRED_AFFINITY: [*given, wish]}
    return {**affinity, "nodeAffinity": node_affinity}
