"""The user's settings of the pod, from the fields of the spec and from podTemplate."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ddpjob.core.api import names
from ddpjob.core.api.readers import (
    Dict,
    child,
    children,
    refuse,
    require_objects,
    require_string,
)
from ddpjob.core.api.resolved import Spec

TEMPLATE = "spec.podTemplate.spec"
TRAINER = f"{TEMPLATE}.containers[{names.TRAINER}]"


@dataclass(frozen=True)
class UserPod:
    """A user's part of the pod: the lists of the spec, each followed by podTemplate's.

    - `claims`: the names of the claims in `volumes`, and the claim of the checkpoints.
    - `template`: podTemplate's pod spec. `trainer`: its container `trainer`.
    - `other_containers`: the names of its other containers, init containers included.
    """

    env: tuple[Dict, ...] = ()
    env_from: tuple[Dict, ...] = ()
    volumes: tuple[Dict, ...] = ()
    claims: tuple[str, ...] = ()
    template: Dict = field(default_factory=dict)
    trainer: Dict = field(default_factory=dict)
    other_containers: tuple[str, ...] = ()

    @classmethod
    def from_spec(cls, spec: Spec) -> "UserPod":
        """Read the user's part of a pod. Raises SpecError for a volume of another shape."""
        template = child(spec.pod_template, "spec")
        trainer, others = _split_containers(template)
        # Join the lists of both.
        env = (*children(spec.pod_fields, "env"), *children(trainer, "env"))
        env_from = (*children(spec.pod_fields, "envFrom"), *children(trainer, "envFrom"))
        volumes = (*children(spec.pod_fields, "volumes"), *children(template, "volumes"))
        for volume in volumes:
            _check_volume(volume)
        # Several volumes may have the same claim.
        claims = list(_volume_claims(volumes))
        if spec.checkpoint:
            claims.append(spec.checkpoint.claim)
        return cls(
            env=env,
            env_from=env_from,
            volumes=volumes,
            claims=tuple(dict.fromkeys(claims)),
            template=template,
            trainer=trainer,
            other_containers=others,
        )


def _split_containers(template: Dict) -> tuple[Dict, tuple[str, ...]]:
    """Return the container `trainer` of a pod spec, and the names of all others."""
    trainer: Dict = {}
    others = [*children(template, "initContainers")]
    for container in children(template, "containers"):
        if container.get("name") == names.TRAINER:
            trainer = container
        else:
            others.append(container)
    return trainer, tuple(str(container.get("name")) for container in others)


def projected_sources(volume: Dict) -> tuple[Dict, ...]:
    return children(child(volume, "projected"), "sources")


def _check_volume(volume: Dict) -> None:
    where = f"volume {volume.get('name')}"
    for key, source in volume.items():
        # The spec's own check takes an empty source, such as `persistentVolumeClaim:`, for absent.
        if source is None:
            raise refuse(f"{where}: {key}", "an object", source)
    sources = child(volume, "projected").get("sources")
    require_objects(sources, f"{where}: projected.sources")


def _volume_claims(volumes: tuple[Dict, ...]) -> Iterator[str]:
    for volume in volumes:
        claim = volume.get("persistentVolumeClaim")
        if claim is not None:
            where = f"volume {volume.get('name')}: persistentVolumeClaim.claimName"
            yield require_string(claim.get("claimName"), where)
