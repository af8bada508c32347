"""A TrainJob of Kubeflow Trainer, trainer.kubeflow.org/v1alpha1, as a DDPJob.

A TrainJob has few fields itself. Its runtime has the rest, a JobSet with the template of the nodes.
The runtime is merged with the job as the Trainer does, and the result is read as any pod template.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpjob.convert.draft import Conversion, Draft
from ddpjob.convert.launch import set_default_processes
from ddpjob.convert.nodes import OF_TORCHRUN, Origin, read_node
from ddpjob.convert.patches import patched, read_patches, require_known
from ddpjob.convert.pods import find_trainer
from ddpjob.convert.runtime import (
    INIT_CONTAINER,
    INITIALIZERS,
    find_runtime,
    jobs_of,
    read_runtime,
    runtime_name,
)
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
    without_foreign,
)
from ddpjob.convert.trainer import NODE, sources_of, with_sources, with_trainer
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    require_object,
)

API_VERSION = "trainer.kubeflow.org/v1alpha1"
KIND = "TrainJob"
CONTROLLER = "trainer.kubeflow.org/trainjob-controller"

# The Trainer of Kubeflow gives torchrun its flags as variables.
ORIGIN = Origin(NODE, OF_TORCHRUN)


def convert(document: Dict, runtimes: Sequence[Dict], image: str = "") -> Conversion:
    """Return the DDPJob of a TrainJob and its runtime. Raises SpecError.

    `runtimes` are documents, possibly with its runtime. `image` replaces the image.
    """
    draft = Draft.with_image(image)
    spec = child(document, "spec")
    runtime = find_runtime(spec, runtimes)
    read_fields(document_table(into(SPEC)), draft, document, "")
    template: Dict = {"spec": {"containers": [{"name": NODE}]}}
    path = NODE
    if runtime:
        template, path = read_runtime(draft, runtime)
    else:
        draft.note(
            "spec.runtimeRef",
            f"the runtime {runtime_name(spec)} is not here, so what it sets is missing: the "
            "image, volumes and variables",
            "give its manifest with --runtime FILE",
        )
    patches = read_patches(draft, spec, jobs_of(runtime))
    if runtime:
        require_known(patches, template)
    template, of_patches = patched(template, patches, path)
    trainer = child(spec, "trainer")
    sources = of_patches
    try:
        sources = {**of_patches, **sources_of(template, trainer, path)}
        merged = with_trainer(draft, template, trainer, path)
        of_runtime = len(draft.remarks)
        if not runtime:
            _require_command(draft, merged, path)
        launch = read_node(draft, merged, path, ORIGIN)
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
        draft.pod_metadata[kind] = without_foreign(draft, require_object(value, path), path)

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
    # patches.py reads them. The last two are the names of older versions.
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
