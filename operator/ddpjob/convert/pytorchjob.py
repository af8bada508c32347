"""A PyTorchJob of the Kubeflow Training Operator, kubeflow.org/v1, as a DDPJob."""

from collections.abc import Mapping
from typing import Any

from ddpjob.convert.draft import Conversion, Draft, Remark, require_integer
from ddpjob.convert.launch import (
    BY_HAND,
    set_default_processes,
    set_default_restarts,
    set_rendezvous,
)
from ddpjob.convert.nodes import OF_TORCHRUN, Origin, read_node
from ddpjob.convert.settle import settle_nodes
from ddpjob.convert.table import (
    Table,
    document_table,
    drop,
    into,
    keep,
    keep_integer,
    name_of,
    read_fields,
    used,
)
from ddpjob.core.api.merge import merge
from ddpjob.core.api.policy import FailurePolicy
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    quoted,
    require_object,
    require_objects,
)

API_VERSION = "kubeflow.org/v1"
KIND = "PyTorchJob"
CONTROLLER = "kubeflow.org/training-operator"
REPLICAS = "spec.pytorchReplicaSpecs"
ROLES = ("Master", "Worker")

# The queue of Volcano in the annotations of a pod.
QUEUE = "scheduling.volcano.sh/queue-name"

ORIGIN = Origin("pytorch", rf"{OF_TORCHRUN}|WORLD_SIZE|RANK|MASTER_ADDR|MASTER_PORT", ("RANK",))

RENDEZVOUS = "the operator sets the rendezvous, which is c10d"

# Fields of the job that a flag of torchrun in a template overrides.
DEFAULTS = ("nprocPerNode", "failurePolicy.maxRestarts")

# Policies of a replica to restart its pods.
RESTART = {"Always", "ExitCode", "OnFailure"}

# Fields of the program. Master and Worker must not differ in them.
PROGRAM = ("image", "args", "torchrun", "setup")


def convert(document: Dict, image: str = "") -> Conversion:
    """Return the DDPJob of a PyTorchJob, with another image if one is given. Raises SpecError."""
    draft = Draft.with_image(image)
    read_fields(document_table(into(SPEC)), draft, document, "")
    replicas = require_object(child(document, "spec").get("pytorchReplicaSpecs"), REPLICAS)
    _read_replicas(draft, replicas)
    _note_queue(draft)
    return Conversion(name_of(document), draft.document(), tuple(draft.remarks))


# Rows


def _clean_pods(draft: Draft, value: Any, path: str) -> None:
    # An empty string is the default, as in no other field.
    if value != "":
        draft.set("cleanPodPolicy", value, path)


def _queue(draft: Draft, value: Any, path: str) -> None:
    draft.pod_metadata.setdefault("annotations", {})[QUEUE] = value
    draft.sources[QUEUE] = path


def _note_queue(draft: Draft) -> None:
    """Note that only Volcano reads the queue, unless it schedules the pods."""
    if QUEUE in draft.sources and draft.get("scheduling.gang") != "Volcano":
        draft.note(
            draft.sources[QUEUE],
            "it is a queue of Volcano, which reads the annotation of the pods",
            "set scheduling: {gang: Volcano} too, or the label kueue.x-k8s.io/queue-name for Kueue",
        )


def _rendezvous_settings(draft: Draft, value: Any, path: str) -> None:
    for index, item in enumerate(require_objects(value, path)):
        at = f"{path}[{index}]"
        read_fields({"key": used, "value": used}, draft, item, at)
        set_rendezvous(draft, str(item.get("key", "")), str(item.get("value", "")), at)


def _elastic_size(draft: Draft, value: Any, path: str) -> None:
    draft.drop(path, value, "a DDPJob has one number of nodes, from the replicas", BY_HAND)


SCHEDULING: Table = {
    "queue": _queue,
    "priorityClass": keep("priorityClassName"),
    "minAvailable": drop("a gang is always all nodes of the job", "scheduling.gang"),
    "minResources": drop("a gang is always all nodes of the job", "scheduling.gang"),
    "scheduleTimeoutSeconds": drop(
        "a gang waits for room without a limit", "startupDeadlineSeconds"
    ),
}

RUN_POLICY: Table = {
    "cleanPodPolicy": _clean_pods,
    "ttlSecondsAfterFinished": keep_integer("ttlSecondsAfterFinished"),
    "activeDeadlineSeconds": keep_integer("activeDeadlineSeconds"),
    "backoffLimit": set_default_restarts,
    "suspend": keep("suspend"),
    "schedulingPolicy": into(SCHEDULING),
    "managedBy": drop("MultiKueue does not know DDPJobs", unless=(CONTROLLER,)),
}

ELASTIC_POLICY: Table = {
    "minReplicas": _elastic_size,
    "maxReplicas": _elastic_size,
    "maxRestarts": set_default_restarts,
    "nProcPerNode": set_default_processes,
    "rdzvConf": _rendezvous_settings,
    "rdzvBackend": drop(RENDEZVOUS, unless=("c10d",)),
    "rdzvHost": drop(RENDEZVOUS),
    "rdzvPort": drop(RENDEZVOUS),
    "rdzvId": drop(RENDEZVOUS),
    "standalone": drop(RENDEZVOUS, unless=(False,)),
    "metrics": drop("the operator makes no HorizontalPodAutoscaler", BY_HAND),
}

SPEC: Table = {
    "nprocPerNode": set_default_processes,
    "runPolicy": into(RUN_POLICY),
    "elasticPolicy": into(ELASTIC_POLICY),
    "pytorchReplicaSpecs": used,
}


# Replicas


def _read_replicas(draft: Draft, replicas: Dict) -> None:
    """Read Master and Worker. Their pods become nodes of one gang. Raises SpecError."""
    roles = {role: replicas[role] for role in ROLES if replicas.get(role) is not None}
    if not roles:
        raise SpecError(f"{REPLICAS}: has neither Master nor Worker, got {quoted(list(replicas))}")
    others = {role: value for role, value in replicas.items() if role not in roles}
    read_fields({}, draft, others, REPLICAS)
    counts = {role: _number_of(roles[role], f"{REPLICAS}.{role}") for role in roles}
    nodes = sum(counts.values())
    if not nodes:
        raise SpecError(f"{REPLICAS}: has no replicas; give Master or Worker at least one")
    draft.set("nodes", nodes, REPLICAS)
    policies = {str(roles[role].get("restartPolicy") or "") for role in roles}
    _remark_on_policies(draft, policies)
    drafts = {role: _read_role(draft, roles[role], role) for role in roles if counts[role]}
    for to in DEFAULTS:
        if draft.get(to) is not None:
            draft.remove(to)
    for role in roles:
        if role not in drafts:
            draft.drop(f"{REPLICAS}.{role}", roles[role], "it has no replicas")
    _merge(draft, drafts)
    # torchrun restarted its processes whatever the policy of the pods.
    if draft.get("failurePolicy.maxRestarts") is None:
        _set_restarts(draft, policies)


def _set_restarts(draft: Draft, policies: set[str]) -> None:
    """Set or note the budget of restarts of a job without a limit for them."""
    path = f"{REPLICAS}.*.restartPolicy"
    if policies == {"Never"}:
        draft.set("failurePolicy.maxRestarts", 0, path)
    elif policies & RESTART:
        draft.note(
            path,
            f"{', '.join(sorted(policies & RESTART))} restarted pods without a limit; a DDPJob "
            f"starts again {FailurePolicy().max_restarts} times after failures of the script",
            "set spec.failurePolicy.maxRestarts",
        )


def _number_of(role: Any, path: str) -> int:
    replicas = require_object(role, path).get("replicas")
    return 1 if replicas is None else require_integer(replicas, f"{path}.replicas")


def _read_role(draft: Draft, fields: Dict, role: str) -> Draft:
    """Return the draft from the template of a role, without fields of the whole job."""
    path = f"{REPLICAS}.{role}"
    own = Draft()
    for to in DEFAULTS:
        value = draft.get(to)
        if value is not None:
            own.set_default(to, value, draft.sources[to])
    read_fields({"replicas": used, "restartPolicy": used, "template": used}, own, fields, path)
    launch = read_node(own, fields.get("template"), f"{path}.template", ORIGIN)
    settle_nodes(launch, draft.get("nodes"))
    return own


def _remark_on_policies(draft: Draft, policies: set[str]) -> None:
    """Remark on restart policies without an equivalent in a budget of restarts."""
    path = f"{REPLICAS}.*.restartPolicy"
    source = draft.sources.get("failurePolicy.maxRestarts", "")
    if policies == {"Never"} and source.endswith("backoffLimit"):
        limit = draft.remove("failurePolicy.maxRestarts")
        draft.drop(source, limit, "restartPolicy is Never, so no pod was restarted")
    if "ExitCode" in policies:
        draft.drop(
            path,
            "ExitCode",
            "codes from 1 to 127 ended the job, and larger ones did not",
            "list the codes that end the job in failurePolicy.nonRetryableExitCodes",
        )
    if "Never" in policies and policies & RESTART:
        draft.drop(path, "Never", "all pods of a DDPJob start again together")
    for policy in sorted(policies - {"", "Never"} - RESTART):
        draft.drop(path, policy, "it is unknown")


def _merge(draft: Draft, roles: Mapping[str, Draft]) -> None:
    """Give the job the fields of its roles, and remark on differences. Raises SpecError."""
    first, chosen = next(iter(roles.items()))
    for key, value in chosen.spec.items():
        _take(draft, key, value, chosen)
    draft.pod, draft.trainer = chosen.pod, chosen.trainer
    draft.pod_metadata = merge(draft.pod_metadata, chosen.pod_metadata)
    # The metadata of a role has the labels of a queue from its pods.
    draft.metadata = merge(chosen.metadata, draft.metadata)
    draft.remarks += chosen.remarks
    known = {_without_role(remark, first) for remark in chosen.remarks}
    for role, other in roles.items():
        if role != first:
            draft.remarks += [one for one in other.remarks if _without_role(one, role) not in known]
            _compare(draft, chosen, other, (first, role))


def _take(draft: Draft, key: str, value: Any, role: Draft) -> None:
    """Give the job a field of a role. Objects are merged by their fields."""
    if isinstance(value, Mapping) and key in ("torchrun", "scheduling", "failurePolicy"):
        for inner, item in value.items():
            if inner == "rdzvConf":
                for name, setting in item.items():
                    draft.set(f"torchrun.rdzvConf.{name}", setting, REPLICAS)
            else:
                draft.set(f"{key}.{inner}", item, role.sources.get(f"{key}.{inner}", REPLICAS))
        return
    draft.set(key, value, role.sources.get(key, REPLICAS))


def _without_role(remark: Remark, role: str) -> tuple[str, ...]:
    place = f"{REPLICAS}.{role}"
    path, why = remark.path.replace(place, ""), remark.why.replace(place, "")
    return (path, why, remark.instead, remark.value)


def _compare(draft: Draft, chosen: Draft, other: Draft, roles: tuple[str, str]) -> None:
    """Remark on differences between two roles. Raises SpecError for another program."""
    first, second = roles
    ours, theirs = chosen.document(), other.document()
    for key in PROGRAM:
        mine, others = ours["spec"].get(key), theirs["spec"].get(key)
        if mine != others:
            raise SpecError(
                f"{REPLICAS}: {first} and {second} have different programs: {key} would be "
                f"{quoted(mine)} and {quoted(others)}; a DDPJob runs the same one on all nodes, so "
                "make them equal"
            )
    for path, mine, others in _differences(ours["spec"], theirs["spec"], "spec"):
        draft.drop(
            f"{REPLICAS}.{second}.template, which gives {path}",
            others,
            f"all nodes of a DDPJob are equal, and {first} has {quoted(mine)}",
            f"write what all nodes need into {path}",
        )


def _differences(mine: Any, others: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Return the paths of differences between two values, with both values."""
    if isinstance(mine, Mapping) and isinstance(others, Mapping):
        found = []
        for key in dict.fromkeys((*mine, *others)):
            found += _differences(mine.get(key), others.get(key), f"{path}.{key}")
        return found
    return [] if mine == others else [(path, mine, others)]
