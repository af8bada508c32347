"""The size of a run on this machine: what the user asks for, or at most what the machine has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob.core.plan import counted
from ddpjob.core.readers import Dict, child, children
from ddpjob.core.spec import Spec

# Processes that any machine runs, so that small jobs of several nodes are not made smaller.
ALWAYS_FIT = 4


@dataclass(frozen=True)
class Overrides:
    """Values that take the place of those in the manifest. None leaves a value as it is."""

    nodes: int | None = None
    nproc: int | None = None
    max_restarts: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def apply(self, document: Dict) -> dict[str, Any]:
        """Return a copy of a DDPJob with the values."""
        spec = dict(child(document, "spec"))
        if self.nodes is not None:
            spec["nodes"] = self.nodes
        if self.nproc is not None:
            spec["nprocPerNode"] = self.nproc
        if self.max_restarts is not None:
            policy = child(spec, "failurePolicy")
            spec["failurePolicy"] = {**policy, "maxRestarts": self.max_restarts}
        if self.env:
            kept = [entry for entry in children(spec, "env") if entry.get("name") not in self.env]
            added = [{"name": name, "value": value} for name, value in self.env.items()]
            spec["env"] = [*kept, *added]
        return {**document, "spec": spec}


def fit(spec: Spec, wanted: Overrides, cores: int) -> tuple[Overrides, str]:
    """Return a size that the machine can run, and the sentence that says so if it is smaller.

    A size that the user asked for stays. Processes per node are reduced before nodes.
    """
    limit = max(cores, ALWAYS_FIT)
    nodes, nproc = spec.nodes, spec.nproc_per_node
    if nodes * nproc <= limit or wanted.nproc is not None:
        return wanted, ""
    if wanted.nodes is None:
        nodes = min(nodes, limit)
    nproc = max(1, limit // nodes)
    if (nodes, nproc) == (spec.nodes, spec.nproc_per_node):
        return wanted, ""
    sentence = (
        f"the job has {spec.nodes} x {spec.nproc_per_node} processes, and this machine "
        f"{counted(cores, 'core')}: running {nodes} x {nproc}; --nodes and --nproc choose the size"
    )
    return Overrides(nodes, nproc, wanted.max_restarts, wanted.env), sentence
