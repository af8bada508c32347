"""A manifest file as a job to run here: checked, with the ConfigMaps beside it, and what a laptop cannot honour."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddpjob.core import names, profiles
from ddpjob.core.api import Job, Spec, SpecError, check_name

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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not YAML: {error}") from error
    jobs = [d for d in documents if isinstance(d, Mapping) and d.get("kind") == names.KIND]
    if len(jobs) != 1:
        raise SpecError(f"{path} must hold one {names.KIND}; it holds {len(jobs)}.")
    return _manifest(jobs[0], _config_maps(documents))


def _manifest(document: Dict, config_maps: Mapping[str, Mapping[str, str]]) -> Manifest:
    if document.get("apiVersion") != names.API_VERSION:
        raise SpecError(f"apiVersion must be {names.API_VERSION}, not {document.get('apiVersion')!r}.")
    metadata = document.get("metadata")
    name = check_name(metadata.get("name") if isinstance(metadata, Mapping) else None)
    spec = Spec.from_dict(document.get("spec"))
    job = Job.from_dict({**document, "metadata": {"namespace": "local", **(metadata or {}), "name": name}})
    _refuse_secrets(spec)
    return Manifest(job, spec, config_maps, tuple(_notes(spec, document["spec"])))


def _config_maps(documents: list[Any]) -> dict[str, Mapping[str, str]]:
    maps = [d for d in documents if isinstance(d, Mapping) and d.get("kind") == "ConfigMap"]
    return {str((d.get("metadata") or {}).get("name")): d.get("data") or {} for d in maps}


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
    pod = spec.pod_template.get("spec") or {}
    for env in (*(spec.pod_fields.get("env") or ()), *(trainer.get("env") or ())):
        yield f"env {env.get('name')}", env.get("valueFrom") or {}
    for source in (*(spec.pod_fields.get("envFrom") or ()), *(trainer.get("envFrom") or ())):
        yield "envFrom", source
    for volume in (*(spec.pod_fields.get("volumes") or ()), *(pod.get("volumes") or ())):
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
    devices = profiles.devices(spec.accelerator, spec.nproc_per_node, spec.pod_fields.get("resources"))
    if devices:
        yield f"accelerator: {', '.join(devices)} cannot be asked for here; processes see what this machine has"
    pod = spec.pod_template.get("spec") or {}
    others = [str(c.get("name")) for c in pod.get("containers") or () if c.get("name") != names.TRAINER]
    others += [str(c.get("name")) for c in pod.get("initContainers") or ()]
    if others:
        yield f"podTemplate: the containers {', '.join(others)} are not run"
    rest = sorted(set(pod) - {"containers", "initContainers", "volumes"})
    if rest:
        yield f"podTemplate: {', '.join(rest)} mean nothing here"
