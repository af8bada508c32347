"""Call the marked functions of a module on each rank, and save what they return.

python -m trainer.run_on_rank MODULE           fork the ranks of each request, a line on stdin
python -m trainer.run_on_rank MODULE FOLDER    be a rank
"""

import gc
import importlib
import json
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_trainer.ranks.group import process_group
from ddpjob.agent import worker

from .every_rank import (
    FUNCTIONS,
    GROUP_IS_GONE,
    PRELOADED,
    threads,
    threads_before_the_group,
)


def serve(module: str) -> None:
    """Fork the ranks of each request, and print their exit codes. A fork returns after its work."""
    gc.disable()
    for name in (module, *PRELOADED.get(module.rpartition(".")[2], ())):
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        ranks = []
        for variables in request["variables"]:
            ranks.append(os.fork())
            if not ranks[-1]:
                prepare(Path(request["folder"]), variables)
                run(module, Path(request["folder"]))
                return
        statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
        print(json.dumps(list(map(os.waitstatus_to_exitcode, statuses))), flush=True)


def prepare(folder: Path, variables: dict[str, str]) -> None:
    """Give a fork what a new process would have: variables, output and random numbers."""
    gc.enable()
    os.environ.update(variables)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    worker.reseed()


def run(module: str, folder: Path) -> None:
    """Be a rank."""
    os.chdir(folder)
    importlib.import_module(module)
    torch.set_num_threads(1)
    functions = FUNCTIONS[module]
    threads_before_the_group.update(threads())
    with process_group(device="cpu", tune_cpu=True) as runtime:
        outcome = {name: function(runtime) for name, function in functions.items()}
        rank = runtime.rank
        group = weakref.ref(dist.group.WORLD) if runtime.world_size > 1 else lambda: None
    threads_of_gloo = [name for name in threads().values() if "gloo" in name]
    group_exists = group() is not None
    outcome[GROUP_IS_GONE] = not group_exists and not threads_of_gloo
    torch.save(outcome, f"rank-{rank}.pt")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(sys.argv[1], Path(sys.argv[2]))
    else:
        serve(sys.argv[1])
