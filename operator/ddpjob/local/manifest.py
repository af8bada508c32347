"""A manifest file as a job to run here: checked, with the ConfigMaps beside it, and what a laptop cannot honour."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddpjob.core import names
from ddpjob.core.job import Job, require_job_name
from ddpjob.core.readers import SpecError
from ddpjob.core.spec import Spec

Dict = Mapping[str, Any]

NOT_HERE = {
    "image": "{value} is not used; this Python and its packages run the job",
    "imagePullPolicy": "no image is pulled",
    "imagePullSecrets": "no image is pulled",
    "resources": "requests and limits are not enforced",
    "nodeSelector": "every node is this machine",
    "tolerations": "every node is this machine",
    "affinity": "every node is this machine",
    "topologySpreadConstraints": "every node is this machine",
    "serviceAccountName": "there is no API server to talk to",
    "priorityClassName": "there is nothing to preempt",
}
"""Fields of the spec that mean nothing without a cluster, and what happens instead."""

NOT_IN_TRAINER = {
    "image": "{value} is not used; this Python and its packages run the job",
    "imagePullPolicy": "no image is pulled",
    "startupProbe": "no probe is run",
    "livenessProbe": "no probe is run",
    "readinessProbe": "no probe is run",
    "lifecycle": "no hook is run",
    "workingDir": "the current folder stays, where {value} is neither below a mount nor a folder of this machine",
}
"""The same of the trainer's container in podTemplate."""

HONOURED_IN_TRAINER = ("name", "env", "envFrom", "volumeMounts")
VOLUMES_HERE = ("name", "persistentVolumeClaim", "hostPath", "emptyDir", "configMap", "projected")


@dataclass(frozen=True)
class Manifest:
    """One DDPJob and the data of the ConfigMaps in the same file, by name."""

    job: Job
    spec: Spec
    config_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(path: Path) -> Manifest:
    """The one DDPJob in `path`. Raises SpecError with a sentence for anything that cannot run here."""
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text()) if d]
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{path} is not YAML: {error}") from error
    jobs = [d for d in documents if isinstance(d, Mapping) and d.get("kind") == names.KIND]
    if len(jobs) != 1:
        raise SpecError(f"{path} must hold one {names.KIND}; it holds {len(jobs)}.")
    return _manifest(jobs[0], _config_maps(documents))


def _manifest(document: Dict, config_maps: Mapping[str, Mapping[str, str]]) -> Manifest:
    if document.get("apiVersion") != names.API_VERSION:
        raise SpecError(
            f"apiVersion must be {names.API_VERSION}, not {document.get('apiVersion')!r}."
        )
    metadata = document.get("metadata")
    name = require_job_name(metadata.get("name") if isinstance(metadata, Mapping) else None)
    spec = Spec.from_dict(document.get("spec"))
    job = Job.from_dict(
        {**document, "metadata": {"namespace": "local", **(metadata or {}), "name": name}}
    )
    _check_shapes(spec)
    _refuse_secrets(spec)
    return Manifest(job, spec, config_maps, tuple(_notes(spec, document["spec"])))


def _config_maps(documents: list[Any]) -> dict[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {}
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == "ConfigMap":
            metadata = document.get("metadata")
            name = str(metadata.get("name")) if isinstance(metadata, Mapping) else "None"
            found[name] = _config_data(name, document.get("data") or {})
    return found


def _config_data(name: str, data: Any) -> Mapping[str, str]:
    if not isinstance(data, Mapping):
        raise SpecError(f"data of the ConfigMap {name} must be an object of texts, not {data!r}.")
    for key, text in data.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise SpecError(
                f"data of the ConfigMap {name} must be texts (numbers in quotes), but {key!r} is {text!r}."
            )
    return data


def _check_shapes(spec: Spec) -> None:
    """What `_references` and the notes rely on: lists of objects, and a volume's source with something in it."""
    pod = _mapping(spec.pod_template.get("spec"), "spec.podTemplate.spec")
    trainer = trainer_overlay(spec)
    for where, items in (
        ("spec.podTemplate.spec.initContainers", pod.get("initContainers")),
        ("spec.podTemplate.spec.volumes", pod.get("volumes")),
        *(
            (f"{key} of podTemplate's trainer", trainer.get(key))
            for key in ("env", "envFrom", "volumeMounts")
        ),
    ):
        if not isinstance(items, list | type(None)) or not all(
            isinstance(item, Mapping) for item in items or ()
        ):
            raise SpecError(f"{where} must be a list of objects, not {items!r}.")
    for item in (*(spec.pod_fields.get("env") or ()), *(trainer.get("env") or ())):
        _mapping(item.get("valueFrom"), f"valueFrom of env {item.get('name')}")
    for volume in volumes(spec):
        for key, source in volume.items():
            if key != "name" and not isinstance(source, Mapping):
                raise SpecError(
                    f"{key} of the volume {volume.get('name')} must be an object, not {source!r}."
                )
        sources = (volume.get("projected") or {}).get("sources")
        if not isinstance(sources, list | type(None)) or not all(
            isinstance(s, Mapping) for s in sources or ()
        ):
            raise SpecError(
                f"sources of the volume {volume.get('name')} must be a list of objects, not {sources!r}."
            )


def _mapping(value: Any, where: str) -> Dict:
    if not isinstance(value, Mapping | type(None)):
        raise SpecError(f"{where} must be an object, not {value!r}.")
    return value or {}


def volumes(spec: Spec) -> tuple[Dict, ...]:
    """The user's volumes: the spec's, then podTemplate's."""
    overlay = spec.pod_template.get("spec") or {}
    return (*(spec.pod_fields.get("volumes") or ()), *(overlay.get("volumes") or ()))


def check_claims(spec: Spec, given: Iterable[str]) -> None:
    """Raises SpecError for the name of a claim that the job does not mount: nothing would be found in it."""
    used = [
        str(v["persistentVolumeClaim"].get("claimName"))
        for v in volumes(spec)
        if "persistentVolumeClaim" in v
    ]
    used += [spec.checkpoint.claim] if spec.checkpoint else []
    for name in given:
        if name not in used:
            known = f"its claims are {', '.join(dict.fromkeys(used))}" if used else "it has none"
            raise SpecError(f"--claim names {name!r}, which the job does not use; {known}.")


def _refuse_secrets(spec: Spec) -> None:
    for where, item in _references(spec):
        if any(key in item for key in ("secret", "secretRef", "secretKeyRef")):
            raise SpecError(
                f"{where} takes a Secret, which only a cluster has. For a run here, give the value as a plain env entry "
                "in a copy of the manifest, or leave it out and set the variable in your shell."
            )


def _references(spec: Spec) -> Iterator[tuple[str, Dict]]:
    """Everything in the spec that may point at another object: (where, the pointing object)."""
    trainer = trainer_overlay(spec)
    for env in (*(spec.pod_fields.get("env") or ()), *(trainer.get("env") or ())):
        yield f"env {env.get('name')}", env.get("valueFrom") or {}
    for source in (*(spec.pod_fields.get("envFrom") or ()), *(trainer.get("envFrom") or ())):
        yield "envFrom", source
    for volume in volumes(spec):
        yield f"volume {volume.get('name')}", volume
        for source in (volume.get("projected") or {}).get("sources") or ():
            yield f"volume {volume.get('name')}", source


def trainer_overlay(spec: Spec) -> Dict:
    """What podTemplate says of the trainer's container."""
    containers = (spec.pod_template.get("spec") or {}).get("containers") or ()
    return next((c for c in containers if c.get("name") == names.TRAINER), {})


def _notes(spec: Spec, fields: Dict) -> Iterator[str]:
    for key, text in NOT_HERE.items():
        if fields.get(key):
            yield f"{key}: {text.format(value=fields[key])}"
    devices = spec.devices
    if devices:
        yield f"accelerator: {', '.join(devices)} cannot be asked for here; processes see what this machine has"
    pod = spec.pod_template.get("spec") or {}
    others = [
        str(c.get("name")) for c in pod.get("containers") or () if c.get("name") != names.TRAINER
    ]
    others += [str(c.get("name")) for c in pod.get("initContainers") or ()]
    if others:
        yield f"podTemplate: the containers {', '.join(others)} are not run"
    rest = sorted(set(pod) - {"containers", "initContainers", "volumes"})
    if rest:
        yield f"podTemplate: {', '.join(rest)} mean nothing here"
    yield from _trainer_notes(trainer_overlay(spec))
    yield from _volume_notes(spec)


def _trainer_notes(trainer: Dict) -> Iterator[str]:
    for key in sorted(set(trainer) - set(HONOURED_IN_TRAINER)):
        text = NOT_IN_TRAINER.get(key, "means nothing here")
        yield f"podTemplate's trainer: {key}: {text.format(value=trainer[key])}"


def _volume_notes(spec: Spec) -> Iterator[str]:
    """One for each kind of volume that only a cluster has."""
    named: dict[str, list[str]] = {}
    for volume in volumes(spec):
        kinds = set(volume) - set(VOLUMES_HERE)
        for source in (volume.get("projected") or {}).get("sources") or ():
            kinds |= {f"projected {kind}" for kind in source if kind != "configMap"}
        for kind in kinds:
            named.setdefault(kind, []).append(str(volume.get("name")))
    for kind, names_of in sorted(named.items()):
        yield f"volumes: {', '.join(names_of)}: there is no {kind} here; an empty folder takes its place"
