"""Choose the size of a run on this machine: the user's size, or a size that fits the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob.core.api.readers import Dict, child, children
from ddpjob.core.api.resolved import Spec
from ddpjob.core.plan import counted

# Every machine runs this number of processes, so small jobs of several nodes keep their size.
ALWAYS_FIT = 4


@dataclass(frozen=True)
class Overrides:
    """Values in place of those in the manifest. None leaves a value as it is.

    With `runs_setup`, the pods run the setup of the job.
    """

    nodes: int | None = None
    nproc: int | None = None
    max_restarts: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    runs_setup: bool = False

    def apply(self, document: Dict) -> dict[str, Any]:
        """Return a copy of a DDPJob with the values, except its size."""
        spec = dict(child(document, "spec"))
        if self.max_restarts is not None:
            policy = child(spec, "failurePolicy")
            spec["failurePolicy"] = {**policy, "maxRestarts": self.max_restarts}
        if self.env:
            # A variable may refer to those before it, so each keeps its place.
            new = {name: {"name": name, "value": value} for name, value in self.env.items()}
            written = [new.pop(str(entry.get("name")), entry) for entry in children(spec, "env")]
            spec["env"] = [*written, *new.values()]
        return {**document, "spec": spec}


def fit(spec: Spec, wanted: Overrides, cores: int) -> tuple[tuple[int, int], str]:
    """Return the nodes and processes per node of a run, and a sentence if they are fewer.

    A size requested by the user stays. Processes per node are reduced before nodes.
    """
    nodes = wanted.nodes or spec.nodes
    nproc = wanted.nproc or spec.nproc_per_node
    limit = max(cores, ALWAYS_FIT)
    fitting = (nodes, nproc)
    if nodes * nproc > limit and wanted.nproc is None:
        fewer_nodes = nodes if wanted.nodes is not None else min(nodes, limit)
        fitting = (fewer_nodes, max(1, limit // fewer_nodes))
    if fitting == (nodes, nproc):
        return fitting, ""
    sentence = (
        f"the job has {nodes} x {nproc} processes, and this machine {counted(cores, 'core')}: "
        f"running {fitting[0]} x {fitting[1]}; --nodes and --nproc choose the size"
    )
    return fitting, sentence
