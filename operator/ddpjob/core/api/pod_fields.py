"""The fields of a spec with Kubernetes' own shapes, and what the operator sets of a pod.

Their shapes and changes are declared in pod_shapes.yaml.
"""

from collections.abc import Iterator
from typing import Any

from ddpjob.core.api import names, shapes
from ddpjob.core.api.kinds import kind_of_pod_field
from ddpjob.core.api.queue import LABEL_QUEUE
from ddpjob.core.api.readers import Dict, SpecError, child, children, mapping_or_empty

POD_TEMPLATE = "podTemplate"

# Seconds between SIGTERM and SIGKILL of a pod, unless podTemplate sets another number.
GRACE_SECONDS = 45

# The operator sets these fields in every pod, so podTemplate must not.
OWNED_POD_FIELDS = ("restartPolicy", "hostname", "subdomain", "activeDeadlineSeconds")
OWNED_TRAINER_FIELDS = (
    "command",
    "args",
    "resources",
    "restartPolicy",
    "readinessProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
)

OWNED = "is set by the operator; remove it"


def pod_field_names() -> tuple[str, ...]:
    """Return the names of the fields of a spec that enter the pod unchanged."""
    return tuple(name for name in shapes.shapes() if name != POD_TEMPLATE)


def read_pod_fields(fields: Dict) -> dict[str, Any]:
    """Return the fields of a spec that enter the pod, unchanged. Raises SpecError."""
    found = {}
    for key in pod_field_names():
        value = fields.get(key)
        if value is None:
            continue
        shapes.check(value, shapes.shapes()[key], f"spec.{key}")
        # An empty string means "not set" in Kubernetes.
        if value != "":
            found[key] = value
    return found


def read_pod_template(value: Any) -> dict[str, Any]:
    """Return the known parts of podTemplate that are not empty. Raises SpecError."""
    if value is None:
        return {}
    shape = shapes.shapes()[POD_TEMPLATE]
    shapes.check(value, shape, f"spec.{POD_TEMPLATE}")
    metadata = child(value, "metadata")
    known = shape["properties"]["metadata"]["properties"]
    overlay = {
        "metadata": {key: metadata[key] for key in known if metadata.get(key)},
        "spec": child(value, "spec"),
    }
    return {key: part for key, part in overlay.items() if part}


def find_unknown_pod_fields(spec: Dict) -> Iterator[str]:
    """Yield a sentence for each field within the pod fields that Kubernetes does not know."""
    for key in pod_field_names():
        shape, kind = shapes.shapes()[key], kind_of_pod_field(key)
        yield from shapes.unknown_fields(spec.get(key), shape, kind, f"spec.{key}")
    # The fields of podTemplate itself are checked with the spec's own fields.
    shape = shapes.shapes()[POD_TEMPLATE]["properties"]["spec"]
    pod = child(spec.get(POD_TEMPLATE), "spec")
    yield from shapes.unknown_fields(pod, shape, "PodSpec", f"spec.{POD_TEMPLATE}.spec")


# The checks of the rules for pod fields (spec_rules.py). Each raises SpecError.

# If a queue gave room to single pods, it would hold a gang in part.
QUEUE_OF_POD = f"{LABEL_QUEUE} belongs to the job; set it in metadata.labels"


def check_variables(env: Any, where: str) -> None:
    """Refuse variables set by torchrun for each process."""
    for item in env or ():
        name = item["name"]
        if name in names.RESERVED_VARIABLES or name.startswith(names.RESERVED_PREFIX):
            raise SpecError(f"{where}: {name} is set by torchrun for each process; remove it")


def check_metadata(metadata: Dict) -> None:
    """Refuse labels and annotations of the operator."""
    for kind in ("labels", "annotations"):
        for key in mapping_or_empty(metadata.get(kind)):
            if str(key).startswith(f"{names.GROUP}/"):
                raise SpecError(f"spec.{POD_TEMPLATE}.metadata.{kind}: {key} {OWNED}")
    if LABEL_QUEUE in mapping_or_empty(metadata.get("labels")):
        raise SpecError(f"spec.{POD_TEMPLATE}.metadata.labels: {QUEUE_OF_POD}")


def check_owned_pod_fields(pod: Dict) -> None:
    _refuse_owned(pod, OWNED_POD_FIELDS, f"spec.{POD_TEMPLATE}.spec")


def check_trainer(pod: Dict) -> None:
    """Refuse what the operator sets in the container trainer."""
    for where, container in _trainers(pod):
        _refuse_owned(container, OWNED_TRAINER_FIELDS, where)


def check_trainers_variables(pod: Dict) -> None:
    for where, container in _trainers(pod):
        check_variables(container.get("env"), f"{where}.env")


def check_images(pod: Dict) -> None:
    """Refuse another container without an image, such as `pytorch` of a PyTorchJob."""
    for container in children(pod, "containers"):
        name = container["name"]
        if name != names.TRAINER and not container.get("image"):
            raise SpecError(
                f"spec.{POD_TEMPLATE}.spec.containers[{name}]: has no image; to change the "
                f"container that trains, name it {names.TRAINER}, otherwise give it an image"
            )


def check_working_dir(pod: Dict) -> None:
    """Refuse a working directory of the container trainer: spec.code sets it."""
    for where, container in _trainers(pod):
        if container.get("workingDir"):
            raise SpecError(
                f"{where}.workingDir: with spec.code, the working directory is the one with the "
                "code; remove it"
            )


def check_startup_probe(pod: Dict) -> None:
    """Refuse a startup probe of the container trainer: spec.setup has its own."""
    for where, container in _trainers(pod):
        if container.get("startupProbe") is not None:
            raise SpecError(
                f"{where}.startupProbe: with spec.setup, the startup probe asks the agent whether "
                "the setup has ended; remove it"
            )


def _trainers(pod: Dict) -> Iterator[tuple[str, Dict]]:
    for container in children(pod, "containers"):
        if container["name"] == names.TRAINER:
            yield f"spec.{POD_TEMPLATE}.spec.containers[{names.TRAINER}]", container


def _refuse_owned(fields: Dict, owned: tuple[str, ...], where: str) -> None:
    for key in owned:
        if fields.get(key) is not None:
            raise SpecError(f"{where}.{key}: {OWNED}")
