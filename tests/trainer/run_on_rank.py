"""Call the marked functions of a module on this rank, and save what they return.

python -m trainer.run_on_rank FOLDER MODULE
"""

import importlib
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_trainer.ranks.group import process_group

from .every_rank import FUNCTIONS, GROUP_IS_GONE, threads


def main(folder: Path, module: str) -> None:
    os.chdir(folder)
    importlib.import_module(module)
    torch.set_num_threads(1)
    functions = FUNCTIONS[module]
    with process_group(device="cpu", tune_cpu=True) as runtime:
        outcome = {name: function(runtime) for name, function in functions.items()}
        rank = runtime.rank
        group = weakref.ref(dist.group.WORLD) if runtime.world_size > 1 else lambda: None
    threads_of_gloo = [name for name in threads().values() if "gloo" in name]
    group_exists = group() is not None
    outcome[GROUP_IS_GONE] = not group_exists and not threads_of_gloo
    torch.save(outcome, f"rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
