"""Merge the trainer of a TrainJob into the template of its nodes. Tell where values are from."""

import re
from collections.abc import Mapping
from typing import Any

from ddpjob.convert.draft import Draft, names_of
from ddpjob.convert.pods import find_trainer
from ddpjob.core.api.readers import Dict, children, require_objects

# The name of the training job among the replicated jobs, and of its container. Older versions call
# both `trainer`.
NODE = "node"

# Fields of a container, each with its replacement among the fields of the trainer.
REPLACED = {
    "image": "image",
    "command": "command",
    "args": "args",
    "resources": "resourcesPerNode",
}


def with_trainer(draft: Draft, template: Dict, trainer: Dict, path: str) -> Dict:
    """Return the template of a node with the TrainJob's values in its container."""
    container, where = find_trainer(template.get("spec"), f"{path}.spec", NODE)
    ours = set(names_of(children(trainer, "env")))
    for index, one in enumerate(children(container, "env")):
        if one.get("name") in ours:
            draft.drop(f"{where}.env[{index}]", dict(one), "spec.trainer.env has it too")
    found = _merged(container, trainer)
    # These are replaced as a whole.
    for key, of_trainer in REPLACED.items():
        if trainer.get(of_trainer):
            found[key] = trainer[of_trainer]
            if container.get(key) and container[key] != trainer[of_trainer]:
                draft.drop(f"{where}.{key}", container[key], f"spec.trainer.{of_trainer} is set")
    containers = [
        found if one.get("name") == container.get("name") else one
        for one in children(template["spec"], "containers")
    ]
    return {**template, "spec": {**template["spec"], "containers": containers}}


def sources_of(template: Dict, trainer: Dict, path: str) -> dict[str, str]:
    """Return the fields of the TrainJob by the paths of their values in the merged template.

    `template` is the one before the merge.
    """
    container, where = find_trainer(template.get("spec"), f"{path}.spec", NODE)
    fields = {
        f"{where}.{key}": f"spec.trainer.{field}"
        for key, field in REPLACED.items()
        if trainer.get(field)
    }
    if trainer.get("args") and not (trainer.get("command") or container.get("command")):
        fields[f"{where}.command"] = "spec.trainer.args"
    if not container.get("env"):
        return {**fields, f"{where}.env": "spec.trainer.env"}
    # The variables of both places are in one list, merged by name.
    ours = names_of(children(trainer, "env"))
    for index, name in enumerate(names_of(children(_merged(container, trainer), "env"))):
        if name in ours:
            fields[f"{where}.env[{index}]"] = f"spec.trainer.env[{ours.index(name)}]"
    return fields


def _merged(container: Dict, trainer: Dict) -> dict[str, Any]:
    """Return a container with the variables of the TrainJob, each in the place of the old one.

    Kubernetes expands `$(NAME)` only for a variable before it.
    """
    if not trainer.get("env"):
        return dict(container)
    ours = require_objects(trainer["env"], "spec.trainer.env")
    by_name = dict(zip(names_of(ours), ours, strict=True))
    before = children(container, "env")
    kept = [by_name.pop(name, one) for name, one in zip(names_of(before), before, strict=True)]
    return {**container, "env": [*kept, *by_name.values()]}


def with_sources(text: str, sources: Mapping[str, str]) -> str:
    """Return a text with the paths of the merged template as those before the merge."""
    # The path of a field comes before that of the object with it.
    paths = "|".join(map(re.escape, sorted(sources, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({paths})(?!\w)", lambda found: sources[found[1]], text)
