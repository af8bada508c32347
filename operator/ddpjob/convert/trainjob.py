"""A TrainJob of Kubeflow Trainer, trainer.kubeflow.org/v1alpha1, as a DDPJob.

A TrainJob has few fields itself. Its runtime has the rest, a JobSet with the template of the nodes.
The runtime is merged with the job as the Trainer does, and the result is read as any pod template.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpjob.convert.draft import Conversion, Draft, names_of, require_integer
from ddpjob.convert.launch import set_default_processes, set_default_restarts, set_restarts
from ddpjob.convert.nodes import read_node
from ddpjob.convert.pods import find_trainer
from ddpjob.convert.table import (
    Table,
    default,
    document_table,
    drop,
    into,
    keep,
    keep_integer,
    labels_of_job,
    name_of,
    read_fields,
    used,
)
from ddpjob.convert.trainer import NODE, sources_of, with_sources, with_trainer
from ddpjob.core.api.merge import merge
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    quoted,
    require_object,
    require_objects,
)

API_VERSION = "trainer.kubeflow.org/v1alpha1"
KIND = "TrainJob"
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
CONTROLLER = "trainer.kubeflow.org/trainjob-controller"

STEP = "trainer.kubeflow.org/trainjob-ancestor-step"

BY_HAND = "change spec.nodes while the job runs: a new attempt of that size"
INITIALIZERS = "a DDPJob has no jobs before its pods"
INIT_CONTAINER = (
    "an init container in podTemplate.spec.initContainers, which downloads to a volume, or a claim "
    "that has the data"
)


def convert(document: Dict, runtimes: Sequence[Dict], image: str = "") -> Conversion:
    """Return the DDPJob of a TrainJob and its runtime. Raises SpecError.

    `runtimes` are documents, possibly with its runtime. `image` replaces the image.
    """
    draft = Draft.with_image(image)
    spec = child(document, "spec")
    runtime = _find_runtime(spec, runtimes)
    read_fields(document_table(into(SPEC)), draft, document, "")
    template: Dict = {"spec": {"containers": [{"name": NODE}]}}
    path = NODE
    if runtime:
        template, path = _read_runtime(draft, runtime)
    else:
        draft.note(
            "spec.runtimeRef",
            f"the runtime {_runtime_name(spec)} is not here, so what it sets is missing: the "
            "image, volumes and variables",
            "give its manifest with --runtime FILE",
        )
    template = _patched(draft, template, spec, _names_in(template) if runtime else ())
    trainer = child(spec, "trainer")
    sources = sources_of(template, trainer, path)
    merged = with_trainer(draft, template, trainer, path)
    of_runtime = len(draft.remarks)
    try:
        if not runtime:
            _require_command(draft, merged, path)
        launch = read_node(draft, merged, path, NODE)
    except SpecError as error:
        raise SpecError(with_sources(str(error), sources)) from error
    draft.remarks[of_runtime:] = [
        replace(one, path=with_sources(one.path, sources), why=with_sources(one.why, sources))
        for one in draft.remarks[of_runtime:]
    ]
    if draft.get("nodes") is None and launch.nodes:
        draft.set("nodes", int(launch.nodes), launch.path)
    if launch.is_single and draft.get("nprocPerNode") not in (None, 1, "auto"):
        draft.note(
            launch.path,
            "the Trainer started python once in each pod; torchrun starts it "
            f"{draft.get('nprocPerNode')} times",
            "set spec.nprocPerNode to 1, if the script starts its processes itself",
        )
    return Conversion(name_of(document), draft.document(), tuple(draft.remarks))


# The TrainJob


def _labels(kind: str) -> Any:
    def row(draft: Draft, value: Any, path: str) -> None:
        draft.pod_metadata[kind] = dict(require_object(value, path))

    return row


TRAINER: Table = {
    "numNodes": keep_integer("nodes"),
    "numProcPerNode": set_default_processes,
    # They are merged into the container of the runtime.
    "image": used,
    "command": used,
    "args": used,
    "env": used,
    "resourcesPerNode": used,
}

SPEC: Table = {
    "runtimeRef": into({"name": used, "kind": used, "apiGroup": used}),
    "trainer": into(TRAINER),
    "initializer": drop(INITIALIZERS, INIT_CONTAINER),
    "suspend": keep("suspend"),
    "activeDeadlineSeconds": keep_integer("activeDeadlineSeconds"),
    "managedBy": drop("MultiKueue does not know DDPJobs", unless=(CONTROLLER,)),
    "labels": _labels("labels"),
    "annotations": _labels("annotations"),
    # `_patched` reads them. The last two are the names of older versions.
    "runtimePatches": used,
    "podTemplateOverrides": used,
    "podSpecOverrides": used,
}


def _require_command(draft: Draft, template: Dict, path: str) -> None:
    """Raise SpecError with advice if the command or the image is only in the runtime."""
    container, _ = find_trainer(template.get("spec"), f"{path}.spec", NODE)
    found = {
        "spec.trainer.command": container.get("command") or container.get("args"),
        "spec.trainer.image": container.get("image") or draft.get("image"),
    }
    for field, value in found.items():
        if not value:
            raise SpecError(
                f"{field}: is not set, so the runtime has it; give the manifest of the runtime "
                "with --runtime FILE, from kubectl get clustertrainingruntime NAME -o yaml"
            )


# Patches of the runtime


def _names_in(template: Dict) -> list[str]:
    """Return the names of the containers of a template."""
    return names_of(children(child(template, "spec"), "containers"))


def _require_known(override: Dict, path: str, containers: Sequence[str]) -> None:
    """Raise SpecError for a change of a container that the runtime does not have."""
    for index, name in enumerate(_names_in(override)):
        if containers and name not in containers:
            raise SpecError(
                f"{path}.spec.containers[{index}].name: the runtime has no container {name}, only "
                f"{', '.join(containers)}; give the name of one of them"
            )


def _patched(draft: Draft, template: Dict, spec: Dict, containers: Sequence[str]) -> Dict:
    """Return the template of a node with the patches of the TrainJob for it.

    `containers` are those of the runtime, if it is known.
    """
    for index, patch in enumerate(
        require_objects(spec.get("runtimePatches"), "spec.runtimePatches")
    ):
        path = f"spec.runtimePatches[{index}]"
        template = merge(template, _runtime_patch(draft, patch, path))
    overrides = require_objects(spec.get("podTemplateOverrides"), "spec.podTemplateOverrides")
    for index, override in enumerate(overrides):
        path = f"spec.podTemplateOverrides[{index}]"
        if _is_for_node(draft, override, path):
            _require_known(override, path, containers)
            rest = {key: value for key, value in override.items() if key != "targetJobs"}
            template = merge(template, rest)
    overrides = require_objects(spec.get("podSpecOverrides"), "spec.podSpecOverrides")
    for index, override in enumerate(overrides):
        if _is_for_node(draft, override, f"spec.podSpecOverrides[{index}]"):
            rest = {key: value for key, value in override.items() if key != "targetJobs"}
            template = merge(template, {"spec": rest})
    return template


def _is_for_node(draft: Draft, override: Dict, path: str) -> bool:
    targets = names_of(children(override, "targetJobs"))
    for index, target in enumerate(children(override, "targetJobs")):
        read_fields({"name": used}, draft, target, f"{path}.targetJobs[{index}]")
    if not targets or NODE in targets or "trainer" in targets:
        return True
    draft.drop(path, dict(override), f"it is for {', '.join(targets)}: {INITIALIZERS}")
    return False


def _runtime_patch(draft: Draft, patch: Dict, path: str) -> Dict:
    """Return the patch of the template of a node within a patch of the runtime."""
    found: dict[str, Any] = {}

    def replicated(draft: Draft, value: Any, path: str) -> None:
        for index, one in enumerate(require_objects(value, path)):
            at = f"{path}[{index}]"
            if one.get("name") not in (NODE, "trainer"):
                draft.drop(at, dict(one), INITIALIZERS)
                continue
            read_fields(of_job, draft, one, at)

    def template(_draft: Draft, value: Any, path: str) -> None:
        found.update(require_object(value, path))

    of_job: Table = {
        "name": used,
        "template": into({"metadata": into(JOB_METADATA), "spec": into({"template": template})}),
    }
    jobset = into({"metadata": into(JOB_METADATA), "spec": into({"replicatedJobs": replicated})})
    table: Table = {
        "manager": used,
        "time": used,
        "trainingRuntimeSpec": into({"template": jobset}),
    }
    read_fields(table, draft, patch, path)
    return found


# The runtime


def _runtime_name(spec: Dict) -> str:
    reference = child(spec, "runtimeRef")
    return f"{reference.get('kind') or RUNTIMES[0]} {reference.get('name')}"


def _find_runtime(spec: Dict, runtimes: Sequence[Dict]) -> Dict | None:
    """Return the runtime of a TrainJob, or None. Raises SpecError if only others are given."""
    wanted = _runtime_name(spec)
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


def _read_runtime(draft: Draft, runtime: Dict) -> tuple[Dict, str]:
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
    chosen = next((index for index, one in enumerate(jobs) if _trains(one)), None)
    if chosen is None:
        found = names_of(jobs)
        raise SpecError(f"{path}: has no job {NODE}, which trains; found {quoted(found)}")
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
    if path.endswith("minNodes") and draft.get("nodes") is None:
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
