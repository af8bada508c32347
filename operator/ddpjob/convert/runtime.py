"""Read the runtime of a TrainJob: a JobSet with the template of the nodes, and policies."""

from collections.abc import Sequence
from typing import Any

from ddpjob.convert.draft import Draft, names_of, require_integer
from ddpjob.convert.launch import BY_HAND, set_default_processes, set_default_restarts, set_restarts
from ddpjob.convert.table import (
    Table,
    default,
    drop,
    into,
    keep,
    keep_integer,
    labels_of_job,
    name_of,
    read_fields,
    used,
)
from ddpjob.convert.trainer import NODE
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    quoted,
    require_object,
    require_objects,
)

RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")

STEP = "trainer.kubeflow.org/trainjob-ancestor-step"

INITIALIZERS = "a DDPJob has no jobs before its pods"
INIT_CONTAINER = (
    "an init container in podTemplate.spec.initContainers, which downloads to a volume, or a claim "
    "that has the data"
)


def runtime_name(spec: Dict) -> str:
    reference = child(spec, "runtimeRef")
    return f"{reference.get('kind') or RUNTIMES[0]} {reference.get('name')}"


def find_runtime(spec: Dict, runtimes: Sequence[Dict]) -> Dict | None:
    """Return the runtime of a TrainJob, or None. Raises SpecError if only others are given."""
    wanted = runtime_name(spec)
    given = [name_of(one) for one in runtimes]
    for one, name in zip(runtimes, given, strict=True):
        if name == wanted:
            return one
    if given:
        raise SpecError(
            f"spec.runtimeRef: the runtime is {wanted}, and the files have {', '.join(given)}; "
            "give that runtime"
        )
    return None


def jobs_of(runtime: Dict | None) -> list[str]:
    """Return the names of the jobs of a runtime; none without it."""
    template = child(child(runtime or {}, "spec"), "template")
    return names_of(children(child(template, "spec"), "replicatedJobs"))


def read_runtime(draft: Draft, runtime: Dict) -> tuple[Dict, str]:
    """Read a runtime, and return the template of its nodes unread, with its path."""
    found: dict[str, Any] = {}

    def replicated(draft: Draft, value: Any, path: str) -> None:
        job, at = _job_of_nodes(draft, value, path)
        found["path"] = f"{at}.template.spec.template"
        template = child(child(job, "template"), "spec").get("template")
        found["template"] = require_object(template, found["path"])
        read_fields(REPLICATED_JOB, draft, job, at)

    table: Table = {
        "apiVersion": used,
        "kind": used,
        "metadata": into(RUNTIME_METADATA),
        "spec": into(
            {
                "mlPolicy": into(ML_POLICY),
                "podGroupPolicy": into(POD_GROUP_POLICY),
                "template": into(
                    {
                        "metadata": into(JOB_METADATA),
                        "spec": into({**JOB_SET, "replicatedJobs": replicated}),
                    }
                ),
            }
        ),
    }
    read_fields(table, draft, runtime, name_of(runtime))
    if not found.get("template"):
        raise SpecError(
            f"{name_of(runtime)}: spec.template.spec.replicatedJobs: has no job {NODE} with a "
            "template of a pod"
        )
    return found["template"], found["path"]


def _job_of_nodes(draft: Draft, value: Any, path: str) -> tuple[Dict, str]:
    """Return the training job among the replicated jobs, and its path. Remark on the others."""
    jobs = require_objects(value, path)
    trainings = [index for index, one in enumerate(jobs) if _trains(one)]
    if not trainings:
        found = names_of(jobs)
        raise SpecError(f"{path}: has no job {NODE}, which trains; found {quoted(found)}")
    chosen = trainings[0]
    for index, one in enumerate(jobs):
        if index != chosen:
            draft.drop(f"{path}[{index}]", dict(one), INITIALIZERS, INIT_CONTAINER)
    return jobs[chosen], f"{path}[{chosen}]"


def _trains(job: Dict) -> bool:
    template = child(job, "template")
    pod = child(child(template, "spec"), "template")
    steps = [child(child(one, "metadata"), "labels").get(STEP) for one in (template, pod)]
    return "trainer" in steps or job.get("name") in (NODE, "trainer")


def _other_policy(draft: Draft, value: Any, path: str) -> None:
    name = path.rpartition(".")[2]
    raise SpecError(
        f"{path}: is a runtime of {name}, and a DDPJob starts PyTorch by torchrun; give a runtime "
        "with mlPolicy.torch"
    )


def _elastic_size(draft: Draft, value: Any, path: str) -> None:
    if path.endswith("minNodes") and not draft.get("nodes"):
        # As many nodes as are certain.
        draft.set("nodes", require_integer(value, path), path)
    draft.drop(path, value, "a DDPJob has one number of nodes", BY_HAND)


def _gang(choice: str, table: Table) -> Any:
    def row(draft: Draft, value: Any, path: str) -> None:
        draft.set("scheduling.gang", choice, path)
        read_fields(table, draft, value, path)

    return row


def _labels_of_parent(draft: Draft, value: Any, path: str) -> None:
    """Give the job the labels of a JobSet or a Job, except for those of the Trainer itself."""
    labels = {key: text for key, text in require_object(value, path).items() if key != STEP}
    if labels:
        draft.metadata["labels"] = {**labels, **draft.metadata.get("labels", {})}


RUNTIME = "it is of the runtime, not of the job"
OF_THE_GANG = "the gang restarts together"
ITS_SERVICE = "the operator makes the job's Service"

RUNTIME_METADATA: Table = {
    "name": used,
    **{
        key: drop(RUNTIME)
        for key in (
            *("namespace", "labels", "annotations", "uid", "resourceVersion", "generation"),
            *("creationTimestamp", "managedFields", "finalizers", "ownerReferences"),
        )
    },
}

# The trainer of the job overrides what the runtime has.
ML_POLICY: Table = {
    "numNodes": default(keep_integer("nodes"), "nodes"),
    "torch": into(
        {
            "numProcPerNode": default(set_default_processes, "nprocPerNode"),
            "elasticPolicy": into(
                {
                    "maxRestarts": set_default_restarts,
                    "minNodes": _elastic_size,
                    "maxNodes": _elastic_size,
                    "metrics": drop("the operator makes no HorizontalPodAutoscaler", BY_HAND),
                }
            ),
        }
    ),
    **dict.fromkeys(("mpi", "flux", "jax", "xgboost"), _other_policy),
}

POD_GROUP_POLICY: Table = {
    "coscheduling": _gang(
        "Coscheduling",
        {
            "scheduleTimeoutSeconds": drop(
                "a gang waits for room without a limit", "startupDeadlineSeconds"
            )
        },
    ),
    "volcano": _gang(
        "Volcano",
        {"networkTopology": drop("Volcano's levels are not in a DDPJob", "scheduling.topology")},
    ),
}

# The labels of a JobSet and of a Job. A queue of Kueue belongs to the DDPJob.
JOB_METADATA: Table = {
    "labels": _labels_of_parent,
    "annotations": labels_of_job("annotations"),
    "creationTimestamp": drop("the API server sets it"),
}

JOB_SET: Table = {
    "failurePolicy": into(
        {
            "maxRestarts": set_restarts,
            "rules": drop(OF_THE_GANG, "failurePolicy.nonRetryableExitCodes"),
            "restartStrategy": drop(OF_THE_GANG, "spec.recovery"),
        }
    ),
    "successPolicy": drop("a DDPJob is complete when all its nodes are"),
    "startupPolicy": drop("all pods of a DDPJob are created at once"),
    "network": drop(ITS_SERVICE),
    "coordinator": drop("torchrun finds the nodes"),
    "suspend": keep("suspend"),
    "ttlSecondsAfterFinished": keep_integer("ttlSecondsAfterFinished"),
    "managedBy": drop("no other controller manages the pods"),
    "volumeClaimPolicies": drop("the operator makes no claims", "a claim of your own in volumes"),
}

JOB: Table = {
    "activeDeadlineSeconds": keep_integer("activeDeadlineSeconds"),
    "backoffLimit": drop(OF_THE_GANG, "failurePolicy.maxRestarts"),
    "podFailurePolicy": drop(OF_THE_GANG, "failurePolicy.nonRetryableExitCodes"),
    "ttlSecondsAfterFinished": keep_integer("ttlSecondsAfterFinished"),
    "completionMode": drop("each pod of a DDPJob has an index", unless=("Indexed",)),
    "parallelism": drop("nodes has their number", unless=(1,)),
    "completions": drop("nodes has their number", unless=(1,)),
    "template": used,
}

REPLICATED_JOB: Table = {
    "name": used,
    "replicas": drop("nodes has their number", unless=(1,)),
    "dependsOn": drop(INITIALIZERS),
    "groupName": drop("a DDPJob is one group"),
    "template": into({"metadata": into(JOB_METADATA), "spec": into(JOB)}),
}
