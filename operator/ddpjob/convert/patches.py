"""Read the patches of a TrainJob for its runtime, and merge them into the template of the nodes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.convert.draft import Draft, names_of
from ddpjob.convert.runtime import INITIALIZERS, JOB_METADATA
from ddpjob.convert.table import Table, into, read_fields, used
from ddpjob.convert.trainer import NODE
from ddpjob.core.api.merge import MERGE_KEYS, merge
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    require_object,
    require_objects,
)

# The names of the job of the nodes. Older versions use the second one.
OF_NODES = (NODE, "trainer")


@dataclass(frozen=True)
class Patch:
    """A patch of the template of a node.

    `path` is its place in the TrainJob, and `spec` that of its fields of the pod.
    """

    template: Dict
    path: str
    spec: str


def read_patches(draft: Draft, spec: Dict, jobs: Sequence[str]) -> list[Patch]:
    """Return the patches for the nodes of a TrainJob, in their order. Remark on the others.

    `podSpecOverrides` and `podTemplateOverrides` are those of older versions. `jobs` are the names
    of the jobs of the runtime, if it is known. Raises SpecError for a patch of another job.
    """
    found: list[Patch] = []
    for path, one in _objects(spec, "runtimePatches"):
        found += _of_runtime(draft, one, path, jobs)
    for path, one in _objects(spec, "podTemplateOverrides"):
        if _is_for_nodes(draft, one, path, jobs):
            found.append(Patch(_without_targets(one), path, f"{path}.spec"))
    for path, one in _objects(spec, "podSpecOverrides"):
        if _is_for_nodes(draft, one, path, jobs):
            found.append(Patch({"spec": _without_targets(one)}, path, path))
    return found


def require_known(patches: Sequence[Patch], template: Dict) -> None:
    """Raise SpecError for a patch of a container that the template of the runtime does not have."""
    for patch in patches:
        for kind in ("containers", "initContainers"):
            known = _containers(template, kind)
            for index, name in enumerate(_containers(patch.template, kind)):
                if name not in known:
                    raise SpecError(
                        f"{patch.spec}.{kind}[{index}].name: the runtime has no container {name}, "
                        f"only {', '.join(known) or 'others'}; give the name of one of them"
                    )


def _containers(template: Dict, kind: str) -> list[str]:
    return names_of(children(child(template, "spec"), kind))


def patched(template: Dict, patches: Sequence[Patch], path: str) -> tuple[Dict, dict[str, str]]:
    """Return a template with its patches, and where its values are from, by their new paths.

    `path` is that of the template.
    """
    merged = template
    for patch in patches:
        merged = merge(merged, patch.template)
    # A variable with a new value goes to the end of its list, so the others move.
    sources = dict(_sources(template, merged, path, path, ""))
    for patch in patches:
        for key, value in patch.template.items():
            source = patch.spec if key == "spec" else f"{patch.path}.{key}"
            sources |= _sources(value, merged.get(key), f"{path}.{key}", source, key)
    return merged, sources


def _sources(
    before: Any, merged: Any, path: str, source: str, key: str
) -> Iterator[tuple[str, str]]:
    """Yield the path in the merged template of each value that is there, and its path before."""
    if before == merged:
        yield path, source
    elif isinstance(before, Mapping) and isinstance(merged, Mapping):
        for name, value in before.items():
            yield from _sources(value, merged.get(name), f"{path}.{name}", f"{source}.{name}", name)
    elif isinstance(before, list) and isinstance(merged, list) and key in MERGE_KEYS:
        names = [_name(one, key) for one in merged]
        for index, one in enumerate(before):
            name = _name(one, key)
            if name in names:
                place = names.index(name)
                here, there = f"{path}[{place}]", f"{source}[{index}]"
                yield from _sources(one, merged[place], here, there, key)


def _name(item: Any, key: str) -> Any:
    """Return the value by which an item of a list is merged."""
    return item.get(MERGE_KEYS[key]) if isinstance(item, Mapping) else item


def _objects(spec: Dict, key: str) -> Iterator[tuple[str, Dict]]:
    """Yield the objects of a list in the TrainJob with their paths."""
    for index, one in enumerate(require_objects(spec.get(key), f"spec.{key}")):
        yield f"spec.{key}[{index}]", one


def _without_targets(override: Dict) -> Dict:
    return {key: value for key, value in override.items() if key != "targetJobs"}


def _is_for_nodes(draft: Draft, override: Dict, path: str, jobs: Sequence[str]) -> bool:
    targets = names_of(children(override, "targetJobs"))
    for index, target in enumerate(children(override, "targetJobs")):
        at = f"{path}.targetJobs[{index}]"
        read_fields({"name": used}, draft, target, at)
        _require_job(targets[index], jobs, at)
    if not targets or any(name in OF_NODES for name in targets):
        return True
    draft.drop(path, dict(override), f"it is for {', '.join(targets)}: {INITIALIZERS}")
    return False


def _require_job(name: str, jobs: Sequence[str], path: str) -> None:
    """Raise SpecError for a job that the runtime does not have, if the runtime is known."""
    if jobs and name not in jobs:
        raise SpecError(
            f"{path}.name: the runtime has no job {name}, only {', '.join(jobs)}; give the name of "
            "one of them"
        )


def _of_runtime(draft: Draft, patch: Dict, path: str, jobs: Sequence[str]) -> list[Patch]:
    """Return the patches of the template of a node within a patch of the runtime."""
    found: list[Patch] = []

    def replicated(draft: Draft, value: Any, path: str) -> None:
        for index, one in enumerate(require_objects(value, path)):
            at = f"{path}[{index}]"
            _require_job(str(one.get("name", "")), jobs, at)
            if one.get("name") not in OF_NODES:
                draft.drop(at, dict(one), INITIALIZERS)
                continue
            read_fields(of_job, draft, one, at)

    def template(_draft: Draft, value: Any, path: str) -> None:
        found.append(Patch(require_object(value, path), path, f"{path}.spec"))

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
