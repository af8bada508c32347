"""A planned pod (or the job's Service) as the object to create: a typed context into a skeleton, then the user's overlay.

The skeletons in `templates/` are what an administrator reads; every choice is made here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any, Protocol

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ddpjob.core import names, profiles
from ddpjob.core.api import Job, Spec, SpecError
from ddpjob.core.merge import merge, merge_by, replace_by

Dict = Mapping[str, Any]
Loader = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # ten times faster where PyYAML has libyaml, as its wheels do

RENDEZVOUS_TIMEOUT = "3600"
"""Seconds. Peers may stay Pending for long (a full cluster, an autoscaler); waiting must not cost an attempt."""

SHUTDOWN_SECONDS = 30
"""What torchrun gives its workers after SIGTERM; the pod's grace period is longer, so that its summary gets written."""

GRACE_SECONDS = SHUTDOWN_SECONDS + 15

RESTRICTED_ID = 1000

INDEX, HOSTNAME, LOCAL_ADDRESS, IS_HOST = (
    f"\ue000{word}\ue000" for word in ("index", "hostname", "address", "host")
)
"""What differs between the pods of a gang; private-use characters, so that no user's text is taken for one."""

MARK = re.compile("\ue000[a-z]+\ue000")
SURROGATES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


class Addresses(Protocol):
    """Where the agents of an attempt meet and what each calls itself; c10d ranks are the string order of the latter."""

    def endpoint(self, job: Job, attempt: int) -> str: ...

    def local(self, job: Job, attempt: int, index: int) -> str: ...


class ServiceAddresses:
    """Names under the job's headless Service; short ones, since Neuron accepts no more than 63 characters."""

    def endpoint(self, job: Job, attempt: int) -> str:
        return f"{self.local(job, attempt, 0)}:{names.RENDEZVOUS_PORT}"

    def local(self, job: Job, attempt: int, index: int) -> str:
        return f"{names.hostname(attempt, index, job.status.nodes.desired)}.{job.name}"


@dataclass(frozen=True)
class Settings:
    """The administrator's choices for every generated pod."""

    restricted: bool = False
    addresses: Addresses = field(default_factory=ServiceAddresses)


def pods(job: Job, indices: Iterable[int], settings: Settings) -> Iterator[dict[str, Any]]:
    """The pods of nodes `indices` in the job's current attempt, in their order.

    The pods of a gang differ in a few words only, so the skeleton is rendered and parsed once and the words filled in:
    parsing YAML for each of a thousand pods would cost seconds. Raises SpecError for fields of a shape that no pod has.
    """
    assert job.spec is not None
    assert job.status.attempt is not None
    attempt = job.status.attempt
    try:
        shape = _shape(job, job.spec, attempt, settings)
    except (
        TypeError,
        KeyError,
        AttributeError,
        yaml.YAMLError,
    ) as error:  # of shapes that the CRD leaves open
        raise SpecError(
            f"No pod can be made of this spec: {type(error).__name__}: {error}."
        ) from error
    for index in indices:
        words = {
            INDEX: str(index),
            HOSTNAME: names.hostname(attempt, index, job.status.nodes.desired),
            LOCAL_ADDRESS: settings.addresses.local(job, attempt, index),
            IS_HOST: "true" if index == 0 else "false",
        }
        yield json.loads(MARK.sub(lambda found, words=words: words.get(found[0], found[0]), shape))  # type: ignore[misc]


def _shape(job: Job, spec: Spec, attempt: int, settings: Settings) -> str:
    """All that the pods of a gang have in common, as JSON, with marks for what they have not."""
    skeleton = yaml.load(
        _template("pod.yaml.j2").render(_pod_context(job, spec, attempt, settings)), Loader=Loader
    )
    pod = merge(skeleton, spec.pod_template)
    if pod["spec"].get(
        "hostNetwork"
    ):  # else only the node's resolver is asked, which does not know the gang's names
        pod["spec"].setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return json.dumps(_hardened(pod) if settings.restricted else pod, ensure_ascii=False)


def _hardened(pod: dict[str, Any]) -> dict[str, Any]:
    """What the level *restricted* asks of every container, also of those that the overlay brought, unless they say it."""
    level = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = dict(pod["spec"])
    for kind in ("initContainers", "containers"):
        if kind in spec:
            spec[kind] = [
                {**c, "securityContext": level | (c.get("securityContext") or {})}
                for c in spec[kind]
            ]
    return {**pod, "spec": spec}


def service(job: Job) -> dict[str, Any]:
    """The job's one headless Service, under whose name its node 0 is found."""
    text = _template("service.yaml.j2").render(_common(job), port=names.RENDEZVOUS_PORT)
    rendered: dict[str, Any] = yaml.load(text, Loader=Loader)
    return rendered


@cache
def _template(name: str) -> Template:
    loader = PackageLoader("ddpjob.core", "templates")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.policies["json.dumps_function"] = _json_for_yaml
    return environment.get_template(name)


def _json_for_yaml(value: Any, **options: Any) -> str:
    """JSON that YAML reads as well: a character that JSON escapes as two surrogates stays itself."""
    return SURROGATES.sub(
        lambda found: str(json.loads(f'"{found[0]}"')), json.dumps(value, **options)
    )


def _common(job: Job) -> dict[str, Any]:
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGER,
        names.LABEL_JOB: job.name,
        names.LABEL_JOB_UID: job.uid,
    }
    return {
        "job": job,
        "api_version": names.API_VERSION,
        "kind": names.KIND,
        "labels": labels,
        "uid_label": names.LABEL_JOB_UID,
        "index_label": names.LABEL_INDEX,
    }


def _pod_context(job: Job, spec: Spec, attempt: int, settings: Settings) -> dict[str, Any]:
    fields, profile = spec.pod_fields, profiles.catalog()[spec.accelerator]
    common = _common(job)
    attempt_labels = {names.LABEL_ATTEMPT: str(attempt), names.LABEL_INDEX: INDEX}
    volumes, mounts = _volumes(spec, settings)
    return {
        **common,
        "labels": {**common["labels"], **attempt_labels},
        "name": names.pod_name(job.name, attempt, INDEX),
        "hostname": HOSTNAME,
        "trainer": names.TRAINER,
        "spec": spec,
        "command": _command(job, spec, attempt, settings.addresses),
        "env": _env(job, spec, profile, attempt, settings),
        "resources": _resources(spec),
        "port": names.RENDEZVOUS_PORT,
        "volumes": volumes,
        "mounts": mounts,
        "affinity": _affinity(profile, fields.get("affinity") or {}),
        "tolerations": [*(fields.get("tolerations") or []), *map(dict, profile.tolerations)],
        "pod_fields": {key: fields[key] for key in POD_LEVEL_FIELDS if key in fields},
        "container_fields": {
            key: fields[key] for key in ("imagePullPolicy", "envFrom") if key in fields
        },
        "token": bool(
            {**fields, **(spec.pod_template.get("spec") or {})}.get("serviceAccountName")
        ),
        "grace": GRACE_SECONDS,
        "restricted": settings.restricted,
        "fs_group": RESTRICTED_ID if settings.restricted or spec.checkpoint else None,
        "user_id": RESTRICTED_ID,
    }


POD_LEVEL_FIELDS = (
    "imagePullSecrets",
    "nodeSelector",
    "topologySpreadConstraints",
    "serviceAccountName",
    "priorityClassName",
)


def _command(job: Job, spec: Spec, attempt: int, addresses: Addresses) -> list[str]:
    """torchrun with every choice made for it, only in flags that torch 2.5 to 2.15 know; the user's args follow."""
    conf = {
        "join_timeout": RENDEZVOUS_TIMEOUT,
        "read_timeout": RENDEZVOUS_TIMEOUT,
        **spec.rdzv_conf,
    }
    conf["is_host"] = IS_HOST  # never left to a guess: a Service name makes every agent a client
    return [
        *spec.command,
        f"--nnodes={job.status.nodes.desired}",
        f"--nproc-per-node={spec.processes}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-id={names.rendezvous_id(job.uid, attempt)}",
        f"--rdzv-endpoint={addresses.endpoint(job, attempt)}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in sorted(conf.items()))}",
        f"--local-addr={LOCAL_ADDRESS}",
    ]


def _env(
    job: Job, spec: Spec, profile: profiles.Profile, attempt: int, settings: Settings
) -> list[Dict]:
    """Ours, then the profile's, then the user's; a later one of the same name wins."""
    ours = {
        "DDP_JOB_NAME": job.name,
        "DDP_JOB_NAMESPACE": job.namespace,
        "DDP_ATTEMPT": str(attempt),
        "DDP_NODE_INDEX": INDEX,
        "DDP_RESULT_FILE": names.RESULT_FILE,
        "DDP_HEARTBEAT_FILE": names.HEARTBEAT_FILE,
        "OMP_NUM_THREADS": str(_threads(spec)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
    }
    if spec.checkpoint:
        ours["DDP_CHECKPOINT_DIR"] = f"{spec.checkpoint.mount_path}/{job.name}"
    if spec.checkpoint and profile.node_cache_variable:
        ours[profile.node_cache_variable] = (
            f"{spec.checkpoint.mount_path}/{job.name}/compile-cache/n{INDEX}"
        )
    if (
        settings.restricted
    ):  # an unknown uid has no home, and getpass.getuser() raises without a name
        ours |= {"HOME": names.HOME, "USER": "ddpjob", "LOGNAME": "ddpjob"}
    node = {"name": "DDP_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    given = [{"name": name, "value": value} for name, value in {**ours, **profile.env}.items()]
    return replace_by("name", [*given, node], list(spec.pod_fields.get("env") or []))


def _threads(spec: Spec) -> int:
    """Cores for each process: what the container was given, shared evenly; torch would otherwise take the whole node's."""
    resources = spec.pod_fields.get("resources") or {}
    given = (
        (resources.get("requests") or {}).get("cpu")
        or (resources.get("limits") or {}).get("cpu")
        or 0
    )
    return max(1, int(_cores(given) // spec.processes))


def _cores(quantity: Any) -> float:
    text = str(quantity)
    try:
        cores = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    except ValueError:
        return 0.0
    return cores if isfinite(cores) else 0.0


def _resources(spec: Spec) -> Dict:
    """The user's resources with the profile's devices, whose limits Kubernetes copies into requests."""
    user = spec.pod_fields.get("resources") or {}
    devices = profiles.devices(spec.accelerator, spec.nproc_per_node, user)
    merged: Dict = merge(
        {"limits": {name: str(count) for name, count in devices.items()}} if devices else {}, user
    )
    return merged


def _volumes(spec: Spec, settings: Settings) -> tuple[list[Dict], list[Dict]]:
    """Shared memory, the checkpoint claim and a home where there is none, then the user's; (volumes, mounts)."""
    own = [("ddpjob-shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})]  # 64 MiB otherwise
    if spec.checkpoint:
        claim = {"persistentVolumeClaim": {"claimName": spec.checkpoint.claim}}
        own.append(("ddpjob-checkpoint", spec.checkpoint.mount_path, claim))
    if settings.restricted:
        own.append(("ddpjob-home", names.HOME, {"emptyDir": {}}))
    mounts = list(spec.pod_fields.get("volumeMounts") or [])
    taken = {str(mount.get("mountPath")).rstrip("/") for mount in mounts}
    own = [volume for volume in own if volume[1] not in taken]
    volumes = [{"name": name, **source} for name, _, source in own]
    own_mounts: list[Any] = [{"name": name, "mountPath": path} for name, path, _ in own]
    return (
        merge_by("name", volumes, list(spec.pod_fields.get("volumes") or [])),
        merge_by("mountPath", own_mounts, mounts),
    )


def _affinity(profile: profiles.Profile, user: Dict) -> Dict:
    """The user's affinity and the right instance type, where nodes say theirs; where none does, the devices decide."""
    if not profile.instance_types:
        return user
    label, required = (
        "node.kubernetes.io/instance-type",
        "requiredDuringSchedulingIgnoredDuringExecution",
    )
    types = [
        {"key": label, "operator": "In", "values": list(profile.instance_types)},
        {"key": label, "operator": "DoesNotExist"},
    ]
    node = user.get("nodeAffinity") or {}
    asked = (node.get(required) or {}).get("nodeSelectorTerms") or [
        {}
    ]  # terms are alternatives: each gets the type
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), kind]}
        for term in asked
        for kind in types
    ]
    return {**user, "nodeAffinity": {**node, required: {"nodeSelectorTerms": terms}}}
