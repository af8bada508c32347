"""The fields of a spec that have the shape of Kubernetes' pod fields, and their checks.

Only what rendering relies on, and what YAML gets wrong most often, is checked here. The API server
checks the rest when a pod is created.
"""

from collections.abc import Sequence
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.merge import MERGE_KEYS
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    quoted,
    require_object,
    require_objects,
    require_string,
)

# Fields of the spec that enter the pod unchanged.
POD_FIELDS = (
    "imagePullPolicy",
    "imagePullSecrets",
    "env",
    "envFrom",
    "resources",
    "volumes",
    "volumeMounts",
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "serviceAccountName",
    "priorityClassName",
)

# Their shapes. Every field that is in neither list is a list of objects.
OBJECT_FIELDS = ("resources", "nodeSelector", "affinity")
STRING_FIELDS = ("imagePullPolicy", "serviceAccountName", "priorityClassName")

# Seconds between SIGTERM and SIGKILL of a pod, unless podTemplate sets another number.
GRACE_SECONDS = 45

# Lists in which Kubernetes refuses two items with the same merge key.
UNIQUE_LISTS = ("volumes", "volumeMounts")

# Strings that each item of a list must have.
REQUIRED_STRINGS = {
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("name", "mountPath"),
}

# Fields that the operator sets in every pod, so podTemplate must not.
OWNED_POD_FIELDS = ("restartPolicy", "hostname", "subdomain", "activeDeadlineSeconds")
OWNED_TRAINER_FIELDS = (
    "command",
    "args",
    "resources",
    "readinessProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "restartPolicy",
)

OWNED = "is set by the operator; remove it"


def read_pod_fields(fields: Dict) -> dict[str, Any]:
    """Return the pod fields of a spec that are set, unchanged. Raises SpecError."""
    found = {}
    for key in POD_FIELDS:
        value = fields.get(key)
        # An empty string means "not set" in Kubernetes.
        is_empty = key in STRING_FIELDS and value == ""
        if value is not None and not is_empty:
            found[key] = _read_pod_field(key, value)
    return found


def _read_pod_field(key: str, value: Any) -> Any:
    where = f"spec.{key}"
    if key in STRING_FIELDS:
        return require_string(value, where)
    if key == "resources":
        return _read_resources(value, where)
    if key in OBJECT_FIELDS:
        return require_object(value, where)
    items = require_objects(value, where)
    for item in items:
        _check_item(key, item, where)
    if key in UNIQUE_LISTS:
        _refuse_duplicates(items, MERGE_KEYS[key], where)
    return list(items)


def _read_resources(value: Any, where: str) -> Dict:
    resources = require_object(value, where)
    for kind in ("limits", "requests"):
        require_object(resources.get(kind), f"{where}.{kind}")
    return resources


def _check_item(key: str, item: Dict, where: str) -> None:
    for name in REQUIRED_STRINGS.get(key, ()):
        require_string(item.get(name), f"{where}[].{name}")
    if key == "env":
        _refuse_reserved_variable(item, where)
        _check_variable(item, where)
    if key == "volumes":
        _refuse_operator_volume(item, where)
    if key == "volumeMounts":
        _refuse_operator_path(item, where)


def _check_variable(item: Dict, where: str) -> None:
    value = item.get("value", "")
    if "valueFrom" not in item and not isinstance(value, str):
        raise SpecError(
            f"{where}: the value of {item['name']} must be a string, got {quoted(value)}; "
            "put it in quotes"
        )


def _refuse_duplicates(items: Sequence[Dict], key: str, where: str) -> None:
    seen = set()
    for item in items:
        value = str(item.get(key))
        if value in seen:
            raise SpecError(f"{where}: several items have the {key} {value}; keep one")
        seen.add(value)


def _refuse_operator_volume(volume: Dict, where: str) -> None:
    name = str(volume.get("name"))
    if names.is_own_volume(name):
        raise SpecError(
            f"{where}: the volume name {name} is reserved: names that begin with "
            f"{names.VOLUME_PREFIX} belong to the operator; choose another name"
        )


def _refuse_operator_path(mount: Dict, where: str) -> None:
    path = str(mount.get("mountPath"))
    if names.is_own_path(path):
        raise SpecError(
            f"{where}: the path {path} is reserved: paths below {names.FOLDER} belong to the "
            "operator; choose another path"
        )


def _refuse_reserved_variable(item: Dict, where: str) -> None:
    name = str(item.get("name"))
    if name in names.RESERVED_VARIABLES or name.startswith(names.RESERVED_PREFIX):
        raise SpecError(f"{where}: {name} is set by torchrun for each process; remove it")


def read_pod_template(value: Any) -> dict[str, Any]:
    """Return the overlay of a spec: metadata.labels, metadata.annotations and spec.

    Raises SpecError if it sets what the operator sets.
    """
    template = require_object(value, "spec.podTemplate")
    metadata = _read_metadata(template.get("metadata"))
    pod = require_object(template.get("spec"), "spec.podTemplate.spec")
    for key in OWNED_POD_FIELDS:
        if key in pod:
            raise SpecError(f"spec.podTemplate.spec.{key}: {OWNED}")
    volumes_path = "spec.podTemplate.spec.volumes"
    for volume in require_objects(pod.get("volumes"), volumes_path):
        _refuse_operator_volume(volume, volumes_path)
    for kind in ("containers", "initContainers"):
        where = f"spec.podTemplate.spec.{kind}"
        for container in require_objects(pod.get(kind), where):
            for mount in require_objects(container.get("volumeMounts"), f"{where}[].volumeMounts"):
                _refuse_operator_path(mount, f"{where}[].volumeMounts")
            if kind == "containers" and container.get("name") == names.TRAINER:
                _check_trainer(container)
    overlay: dict[str, Any] = {}
    if metadata:
        overlay["metadata"] = metadata
    if pod:
        overlay["spec"] = pod
    return overlay


def _read_metadata(value: Any) -> dict[str, Dict]:
    metadata = require_object(value, "spec.podTemplate.metadata")
    found = {}
    for kind in ("labels", "annotations"):
        where = f"spec.podTemplate.metadata.{kind}"
        entries = require_object(metadata.get(kind), where)
        for key in entries:
            if str(key).startswith(f"{names.GROUP}/"):
                raise SpecError(f"{where}: {key} {OWNED}")
        if entries:
            found[kind] = entries
    return found


def _check_trainer(container: Dict) -> None:
    where = f"spec.podTemplate.spec.containers[{names.TRAINER}]"
    for key in OWNED_TRAINER_FIELDS:
        if key in container:
            raise SpecError(f"{where}.{key}: {OWNED}")
    for item in require_objects(container.get("env"), f"{where}.env"):
        _refuse_reserved_variable(item, f"{where}.env")
