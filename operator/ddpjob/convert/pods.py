"""Convert a pod template into fields of a DDPJob: fields of the spec, and the podTemplate.

Most fields of a pod are taken over by their declared shapes. The exceptions have a row here.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob.convert.draft import Draft, names_of, reason_against_variable
from ddpjob.convert.table import Row, Table, drop, drop_unknown, read_fields, used, without_foreign
from ddpjob.core.api import names, profiles, shapes
from ddpjob.core.api.kinds import kind_of_pod_field
from ddpjob.core.api.queue import LABEL_PRIORITY, LABEL_QUEUE
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    normal_path,
    quoted,
    require_object,
    require_objects,
)
from ddpjob.core.api.torchrun_flags import advice_on_variable

SHARED = "the pods of a DDPJob have /dev/shm in memory, up to their memory limit"

# Ports of the other operators' rendezvous.
RENDEZVOUS_PORTS = ("pytorchjob-port", 23456, 29400, 29500)

# Kueue's annotations of pods for a choice of nodes near each other.
TOPOLOGIES = {
    "kueue.x-k8s.io/podset-required-topology": "scheduling.topology.required",
    "kueue.x-k8s.io/podset-preferred-topology": "scheduling.topology.preferred",
}

# The reason to drop fields set by the operator.
OWNED = "the operator sets it"

# Labels set on pods by other operators. Selectors of them would find no pod of a DDPJob.
FOREIGN_LABELS = ("training.kubeflow.org/", "jobset.sigs.k8s.io/", "trainer.kubeflow.org/")


def read_template(draft: Draft, template: Any, path: str, container: str) -> None:
    """Read a pod template, except for the command. `container` is the training container's name."""
    fields = require_object(template, path)
    table: Table = {
        "metadata": lambda draft, value, path: read_fields(POD_METADATA, draft, value, path),
        "spec": lambda draft, value, path: _read_pod(draft, value, path, container),
    }
    read_fields(table, draft, fields, path)
    _drop_shared_memory(draft, path)


def find_trainer(pod: Any, path: str, container: str) -> tuple[Dict, str]:
    """Return the training container of a pod, and its path. Raises SpecError.

    It is the container of the given name, or the only one. The types of the pod's fields are
    checked here, so the caller can rely on them.
    """
    fields = require_object(pod, path)
    shapes.check(fields, _pod_shape(), path)
    containers = require_objects(fields.get("containers"), f"{path}.containers")
    for index, one in enumerate(containers):
        if one.get("name") == container or len(containers) == 1:
            return one, f"{path}.containers[{index}]"
    raise SpecError(
        f"{path}.containers: has no container {container}, which trains; "
        f"found {quoted(names_of(containers))}; name it {container}"
    )


def _read_pod(draft: Draft, pod: Any, path: str, container: str) -> None:
    trainer, where = find_trainer(pod, path, container)
    read_fields(_pod_table(), draft, pod, path)
    read_fields(_trainer_table(), draft, trainer, where)
    sidecars = []
    for index, one in enumerate(children(pod, "containers")):
        if one is trainer:
            continue
        at = f"{path}.containers[{index}]"
        if one.get("name") == names.TRAINER:
            raise SpecError(
                f"{at}.name: {names.TRAINER} is the container that trains in a DDPJob; give the "
                "sidecar another name"
            )
        sidecars.append(_pruned(draft, one, _container_shape(), "Container", at))
    if sidecars:
        draft.pod["containers"] = sidecars


# Rows of a pod


def _pod_shape() -> Dict:
    shape: Dict = shapes.shapes()["podTemplate"]["properties"]["spec"]
    return shape


def _container_shape() -> Dict:
    shape: Dict = _pod_shape()["properties"]["containers"]["items"]
    return shape


def _to_spec(key: str) -> Row:
    """Return the row of a field with the same name and shape in the spec."""

    def row(draft: Draft, value: Any, path: str) -> None:
        kind = kind_of_pod_field(key)
        draft.set(key, _pruned(draft, value, shapes.shapes()[key], kind, path), path)

    return row


def _to_pod(key: str, shape: Dict, kind: str) -> Row:
    def row(draft: Draft, value: Any, path: str) -> None:
        draft.pod[key] = _pruned(draft, value, shape, kind, path)

    return row


def _to_trainer(key: str, shape: Dict, kind: str) -> Row:
    def row(draft: Draft, value: Any, path: str) -> None:
        draft.trainer[key] = _pruned(draft, value, shape, kind, path)

    return row


def _scheduler(draft: Draft, value: Any, path: str) -> None:
    if value == "volcano":
        draft.set("scheduling.gang", "Volcano", path)
    elif value == "scheduler-plugins-scheduler":
        draft.set("scheduling.gang", "Coscheduling", path)
        draft.pod["schedulerName"] = value
    elif value != "default-scheduler":
        draft.pod["schedulerName"] = value


def _account(draft: Draft, value: Any, path: str) -> None:
    # The API server writes the deprecated name beside the other one.
    if draft.get("serviceAccountName") is None:
        draft.set("serviceAccountName", value, path)


def _env(draft: Draft, value: Any, path: str) -> None:
    """Keep the variables, except those set by torchrun for each process."""
    kept = []
    shape = shapes.shapes()["env"]["items"]
    for index, item in enumerate(require_objects(value, path)):
        at = f"{path}[{index}]"
        name = str(item.get("name", ""))
        reason = reason_against_variable(name)
        if reason:
            draft.drop(at, dict(item), reason, advice_on_variable(name))
        else:
            kept.append(_pruned(draft, item, shape, "EnvVar", at))
    if kept:
        draft.set("env", kept, path)


def _ports(draft: Draft, value: Any, path: str) -> None:
    """Keep the ports, except those of the other operator's rendezvous."""
    kept = []
    for index, port in enumerate(require_objects(value, path)):
        at = f"{path}[{index}]"
        if port.get("name") in RENDEZVOUS_PORTS or port.get("containerPort") in RENDEZVOUS_PORTS:
            why = "it is that of the rendezvous, which has other ports in a DDPJob"
            draft.drop(at, dict(port), why)
        else:
            kept.append(_pruned(draft, port, {}, "ContainerPort", at))
    if kept:
        draft.trainer["ports"] = kept


def _pod_labels(kind: str) -> Row:
    def row(draft: Draft, value: Any, path: str) -> None:
        kept = without_foreign(draft, require_object(value, path), path)
        for annotation, field in TOPOLOGIES.items():
            if annotation in kept:
                draft.set(field, kept.pop(annotation), f"{path}[{annotation}]")
        for label in (LABEL_QUEUE, LABEL_PRIORITY):
            if label in kept:
                _move_to_job(draft, label, kept.pop(label), path)
        if kept:
            draft.pod_metadata[kind] = {**draft.pod_metadata.get(kind, {}), **kept}

    return row


def _move_to_job(draft: Draft, label: str, value: Any, path: str) -> None:
    """Move the label of a queue to the job. The pods must not have it."""
    labels = draft.metadata.setdefault("labels", {})
    if labels.setdefault(label, value) != value:
        why = f"a queue belongs to the job, whose label is {quoted(labels[label])}"
        draft.drop(f"{path}[{label}]", value, why)


OF_A_POD = "each pod gets its own"

POD_METADATA: Table = {
    "labels": _pod_labels("labels"),
    "annotations": _pod_labels("annotations"),
    "name": drop(OF_A_POD),
    "generateName": drop(OF_A_POD),
    "namespace": drop("pods are in the namespace of the job"),
    "creationTimestamp": drop("the API server sets it"),
    "finalizers": drop("the operator deletes the pods itself"),
}

# Fields of a pod that do not simply become the field of the same name.
POD_EXCEPTIONS: Table = {
    "containers": used,
    "schedulerName": _scheduler,
    "serviceAccount": _account,
    "restartPolicy": drop(
        "the gang restarts together",
        "failurePolicy.maxRestarts",
        unless=("Never",),
    ),
    "hostname": drop("the host name of a pod has the index of its node"),
    "subdomain": drop("it is the job's Service"),
    "setHostnameAsFQDN": drop(OWNED),
    "activeDeadlineSeconds": drop("the operator decides when a job ends", "activeDeadlineSeconds"),
    "priority": drop("the API server derives it", "priorityClassName"),
    "preemptionPolicy": drop("the API server derives it", "priorityClassName"),
    "overhead": drop("the API server derives it", "runtimeClassName in podTemplate.spec"),
    "ephemeralContainers": drop("only a pod that runs can have them"),
    "readinessGates": drop("a pod of a DDPJob is ready when its workers have met"),
    "os": drop("DDPJobs run on Linux", unless=({"name": "linux"},)),
}

TERMINAL = "a pod of a DDPJob has no terminal"

TRAINER_EXCEPTIONS: Table = {
    "name": used,
    "command": used,
    "args": used,
    "env": _env,
    "ports": _ports,
    "readinessProbe": drop("the operator sets it: a pod is ready when its workers have met"),
    "terminationMessagePath": drop(OWNED, unless=("/dev/termination-log",)),
    "terminationMessagePolicy": drop(OWNED, unless=("File", "FallbackToLogsOnError")),
    "restartPolicy": drop("the gang restarts together", "failurePolicy.maxRestarts"),
    "resizePolicy": drop("the pods of a DDPJob keep their size", unless=([],)),
    "stdin": drop(TERMINAL, unless=(False,)),
    "stdinOnce": drop(TERMINAL, unless=(False,)),
    "tty": drop(TERMINAL, unless=(False,)),
}


def _pod_table() -> Table:
    known = shapes.known_fields(_pod_shape(), "PodSpec")
    of_pod = {key: _to_pod(key, *inner) for key, inner in known.items()}
    in_spec = {key: _to_spec(key) for key in of_pod if key in shapes.shapes()}
    # spec.resources is for the container. A pod's own resources are different.
    in_spec.pop("resources", None)
    return {**of_pod, **in_spec, **POD_EXCEPTIONS}


def _trainer_table() -> Table:
    known = shapes.known_fields(_container_shape(), "Container")
    of_container = {key: _to_trainer(key, *inner) for key, inner in known.items()}
    in_spec = {key: _to_spec(key) for key in of_container if key in shapes.shapes()}
    image: Table = {"image": lambda draft, value, path: draft.set("image", value, path)}
    return {**of_container, **in_spec, **image, **TRAINER_EXCEPTIONS}


def _pruned(draft: Draft, value: Any, shape: Dict, kind: str, path: str) -> Any:
    """Return a value without unknown fields. Remark on each of them."""
    if isinstance(value, list):
        inner = shape.get("items", {})
        items = enumerate(value)
        return [_pruned(draft, one, inner, kind, f"{path}[{index}]") for index, one in items]
    known = shapes.known_fields(shape, kind)
    if not known or not isinstance(value, Mapping):
        return value
    kept = {}
    for key, item in value.items():
        if key in known:
            kept[key] = _pruned(draft, item, *known[key], f"{path}.{key}")
        elif item is not None:
            drop_unknown(draft, item, f"{path}.{key}", known)
    return kept


# Shared memory


def _drop_shared_memory(draft: Draft, path: str) -> None:
    """Drop the usual volume at /dev/shm. The operator adds it to every pod."""
    mounts = list(children(draft.spec, "volumeMounts"))
    for mount in mounts:
        if normal_path(str(mount.get("mountPath"))) != names.SHARED_MEMORY:
            continue
        name = mount.get("name")
        found = [one for one in children(draft.spec, "volumes") if one.get("name") == name]
        source = found[0] if found else {}
        if child(source, "emptyDir").get("medium") != "Memory" and "hostPath" not in source:
            continue
        draft.spec["volumeMounts"] = [one for one in mounts if one is not mount]
        draft.drop(f"{path}.spec: the mount at {names.SHARED_MEMORY}", dict(mount), SHARED)
        if name not in _mounted(draft):
            volumes = children(draft.spec, "volumes")
            draft.spec["volumes"] = [one for one in volumes if one is not source]
            draft.drop(f"{path}.spec: its volume", dict(source), SHARED)


def drop_lost_mounts(draft: Draft, path: str) -> None:
    """Drop the mounts of volumes that the pods do not have, such as those of a JobSet's claims."""
    volumes = {one.get("name") for one in children(draft.spec, "volumes")}
    for place in (draft.spec, *_containers(draft)):
        for mount in children(place, "volumeMounts"):
            if mount.get("name") in volumes:
                continue
            place["volumeMounts"] = [one for one in place["volumeMounts"] if one is not mount]
            if not place["volumeMounts"]:
                del place["volumeMounts"]
            container = f" of {place['name']}" if "name" in place else ""
            draft.drop(
                f"{path}: the mount at {mount.get('mountPath')}{container}",
                dict(mount),
                f"the pods have no volume {mount.get('name')}",
                "a claim of your own in spec.volumes, and the mount in spec.volumeMounts",
            )


def _containers(draft: Draft) -> list[dict[str, Any]]:
    """Return the containers beside the trainer."""
    return [*draft.pod.get("containers", ()), *draft.pod.get("initContainers", ())]


def _mounted(draft: Draft) -> set[Any]:
    """Return the names of the mounted volumes."""
    users = (draft.spec, *_containers(draft))
    return {mount.get("name") for one in users for mount in children(one, "volumeMounts")}


# What follows from the whole pod


def note_selectors(draft: Draft, path: str) -> None:
    """Note selectors of labels missing on the pods of a DDPJob."""
    for key in ("affinity", "topologySpreadConstraints"):
        text = json.dumps(draft.spec.get(key))
        for label in FOREIGN_LABELS:
            if label in text:
                ours = f"{names.LABEL_JOB}: NAME"
                draft.note(
                    f"{path}: {key}", f"pods of a DDPJob have no labels {label}…", f"write {ours}"
                )


def choose_accelerator(draft: Draft) -> int:
    """Set the accelerator with the devices of the resources. Return their number, or 0."""
    for name, count in _devices(draft.spec.get("resources")):
        found = profiles.profiles_with(name)
        fitting = [one for one in found if profiles.catalog()[one].devices.get(name) == count]
        if found:
            draft.set("accelerator", (fitting or found)[0], f"the resource {name}")
            return count
        draft.note(
            f"the resource {name}",
            "no accelerator profile has this device; accelerator is the default, "
            f"{profiles.DEFAULT}, with which the script chooses device and backend itself",
        )
        return count
    return 0


def _devices(resources: Any) -> Iterator[tuple[str, int]]:
    """Yield the devices among the extended resources of a container, with their numbers."""
    quantities = {**child(resources, "requests"), **child(resources, "limits")}
    known = profiles.all_devices()
    for name, quantity in sorted(quantities.items(), key=lambda item: item[0] not in known):
        vendor = str(name).partition("/")[2]
        is_device = name in known or vendor.startswith(("gpu", "mig-", "gaudi", "neuron"))
        if vendor and is_device and str(quantity).isdecimal() and int(quantity):
            yield str(name), int(quantity)
