"""Former paths of modules, for scripts of release 0.1, such as `ddp_trainer.runtime`.

May import no other package.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

# A former name in `ddp_trainer`, and the name of the module now.
MOVED = {
    "batch_norm": "run.batch_norm",
    "checkpoint_folder": "checkpoint.folder",
    "checkpoint_list": "checkpoint.listing",
    "checkpoint_parts": "checkpoint.parts",
    "data_parallel": "ranks.data_parallel",
    "evaluation": "run.evaluation",
    "group": "ranks.group",
    "interrupt": "run.interrupt",
    "loader": "data.loader",
    "process_group": "ranks.group",
    "progress": "run.progress",
    "runtime": "ranks.runtime",
    "sampler": "data.sampler",
    "weights": "checkpoint.weights",
}


class MovedModules:
    """Finds and loads a module by its former path. The module itself exists only once."""

    def find_spec(
        self, path: str, search: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = path.rpartition(".")
        if package == __package__ and name in MOVED:
            # mypy expects the base class of importlib.abc. Its import takes time at every start.
            return ModuleSpec(path, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        moved = import_module(f"{__package__}.{MOVED[name]}")
        # The importer sets `ddp_trainer.process_group` to the result. It must stay the function.
        if name == "process_group":
            moved = moved.process_group
            vars(moved)["process_group"] = moved
        # The importer takes what it finds here instead of the empty `module`.
        sys.modules[module.__name__] = moved
