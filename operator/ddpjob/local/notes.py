"""Notes on the fields of a manifest without an effect on this machine."""

from collections.abc import Iterable, Iterator

from ddpjob.core.api.readers import Dict, quoted
from ddpjob.core.api.resolved import Spec
from ddpjob.local.user_pod import TEMPLATE, TRAINER, UserPod, projected_sources

NO_IMAGE = "{value} is not used, the job runs in this Python environment"
NO_PULL = "ignored, no image is pulled"
ONE_MACHINE = "ignored, all nodes run on this machine"
NO_PROBE = "ignored, probes are not run"

# Fields of the spec for a cluster only.
CLUSTER_FIELDS = {
    "image": NO_IMAGE,
    "imagePullPolicy": NO_PULL,
    "imagePullSecrets": NO_PULL,
    "resources": "ignored, requests and limits are not enforced",
    "nodeSelector": ONE_MACHINE,
    "tolerations": ONE_MACHINE,
    "affinity": ONE_MACHINE,
    "topologySpreadConstraints": ONE_MACHINE,
    "scheduling": ONE_MACHINE,
    "serviceAccountName": "ignored, a local run has no API server",
    "priorityClassName": "ignored, a local run preempts nothing",
    "podSecurity": "ignored, a local run has no Pod Security",
    "suspend": "ignored, the run begins at once",
    "retries": "ignored, each run begins anew",
    "ttlSecondsAfterFinished": "ignored, the files of the run are kept",
    "cleanPodPolicy": "ignored, no process is left after the run",
    "managedBy": "ignored, this command looks after the run",
}

# Fields of podTemplate's container `trainer` for a cluster only.
CLUSTER_TRAINER_FIELDS = {
    "image": NO_IMAGE,
    "imagePullPolicy": NO_PULL,
    "startupProbe": NO_PROBE,
    "livenessProbe": NO_PROBE,
    "readinessProbe": NO_PROBE,
    "lifecycle": "ignored, hooks are not run",
    "workingDir": "{value} is used only if it is below a mount or exists on this machine",
}
LOCAL_TRAINER_FIELDS = ("name", "env", "envFrom", "volumeMounts")

# Fields of podTemplate's pod spec with an effect here, or with notes of their own.
LOCAL_TEMPLATE_FIELDS = (
    "containers",
    "initContainers",
    "volumes",
    "terminationGracePeriodSeconds",
)

# Keys of a volume with an effect here.
LOCAL_VOLUMES = (
    "name",
    "persistentVolumeClaim",
    "hostPath",
    "emptyDir",
    "configMap",
    "downwardAPI",
    "projected",
)


def find_notes(fields: Dict, spec: Spec, pod: UserPod) -> tuple[str, ...]:
    """Return one note for each field without an effect here. `fields` is the spec as written."""
    notes = [*_spec_notes(fields)]
    if spec.devices:
        devices = ", ".join(spec.devices)
        notes.append(
            f"spec.accelerator: {devices} cannot be requested here, the processes use the devices "
            "of this machine"
        )
    if pod.other_containers:
        containers = ", ".join(pod.other_containers)
        notes.append(f"{TEMPLATE}: containers that are not run on this machine: {containers}")
    ignored = sorted(set(pod.template) - set(LOCAL_TEMPLATE_FIELDS))
    if ignored:
        notes.append(f"{TEMPLATE}: fields that are ignored on this machine: {', '.join(ignored)}")
    return (*notes, *_trainer_notes(pod.trainer), *_volume_notes(pod.volumes))


def _spec_notes(fields: Dict) -> Iterator[str]:
    for key, effect in CLUSTER_FIELDS.items():
        if fields.get(key):
            yield f"spec.{key}: {effect.format(value=quoted(fields[key]))}"


def _trainer_notes(trainer: Dict) -> Iterator[str]:
    for key in sorted(trainer):
        if key not in LOCAL_TRAINER_FIELDS:
            effect = CLUSTER_TRAINER_FIELDS.get(key, "ignored on this machine")
            yield f"{TRAINER}.{key}: {effect.format(value=quoted(trainer[key]))}"


def _volume_notes(volumes: Iterable[Dict]) -> Iterator[str]:
    """Yield one note for each kind of volume found only in a cluster."""
    names_by_kind: dict[str, list[str]] = {}
    for volume in volumes:
        kinds = set(volume) - set(LOCAL_VOLUMES)
        for source in projected_sources(volume):
            kinds |= {f"projected {kind}" for kind in source if kind != "configMap"}
        for kind in kinds:
            names_by_kind.setdefault(kind, []).append(str(volume.get("name")))
    for kind, names in sorted(names_by_kind.items()):
        yield (
            f"spec.volumes: {', '.join(names)}: {kind} volumes are not available here, an empty "
            "folder is used"
        )
