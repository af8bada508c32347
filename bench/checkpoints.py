"""Memory and time of checkpoints, beside torch.distributed.checkpoint (DCP).

    python -m bench.checkpoints
    python -m bench.checkpoints --megabytes 341 --device cuda --disk /scratch

Each measurement runs in new processes: a model with `--megabytes` of weights, and AdamW. AdamW's
state is twice as large. Prints how much the peak memory of a rank grows during saves and a restore
(VmHWM of proc(5)), how long `save` blocks the training, the first time and later, and how many
seconds a later checkpoint takes until it is complete.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.ranks.group import process_group
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import peak_memory_mib

# Measured saves after the first one. The first also imports, allocates and checks.
SAVES = 5

# Rows and columns of each layer.
WIDTH = 1024


class Ours:
    """The checkpoints of this project."""

    def __init__(self, model: nn.Module, optimizer: Any, runtime: Runtime, folder: Path) -> None:
        parts = {"model": model, "optimizer": optimizer}
        self._checkpoints = Checkpoints(folder, runtime, parts)

    def save(self, step: int) -> None:
        self._checkpoints.save(step)

    def wait(self) -> None:
        self._checkpoints.wait()

    def restore(self) -> None:
        assert self._checkpoints.restore() > 0


class Dcp:
    """DCP's async_save and load, with its own format."""

    def __init__(self, model: nn.Module, optimizer: Any, runtime: Runtime, folder: Path) -> None:
        self._model = model
        self._optimizer = optimizer
        self._folder = folder
        self._writing: Future[Any] | None = None

    def save(self, step: int) -> None:
        self.wait()
        state = get_state_dict(self._model, self._optimizer)
        writing = async_save(
            dict(zip(("model", "optimizer"), state, strict=True)),
            checkpoint_id=self._folder / str(step),
        )
        assert isinstance(writing, Future)
        self._writing = writing

    def wait(self) -> None:
        if self._writing:
            self._writing.result()

    def restore(self) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        newest = max(self._folder.iterdir(), key=lambda path: int(path.name))
        load({"model": model, "optimizer": optimizer}, checkpoint_id=newest)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


KINDS: dict[str, type[Ours] | type[Dcp]] = {"ours": Ours, "dcp": Dcp}

# The measured cases: a name, the number of ranks, and flags.
CASES = (
    ("one rank", 1, ()),
    ("two ranks, not sharded", 2, ()),
    ("two ranks, FSDP2", 2, ("--sharded",)),
)
COLUMNS = {
    "save": "save: peak",
    "restore": "restore: peak",
    "first": "first save: blocked",
    "blocked": "save: blocked",
    "complete": "save: complete",
}
MEMORY = ("save", "restore")


class Peak:
    """The growth of this process's peak memory from now on, in MiB."""

    def __init__(self) -> None:
        # Reset the peak to the current resident memory.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = peak_memory_mib()

    def growth(self) -> float:
        return peak_memory_mib() - self._before


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, and an optimizer still without state."""
    layers = max(1, round(options.megabytes * 2**20 / (4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model.to(options.device)
    if options.sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one measurement on this rank."""
    with process_group(device=options.device) as runtime:
        model, optimizer = make(options)
        store = KINDS[options.kind](model, optimizer, runtime, options.folder)
        if options.restore:
            peak = Peak()
            store.restore()
            return {"restore": peak.growth()}
        model(torch.ones(1, WIDTH, device=options.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = Peak()
        blocked, complete = [], []
        for step in range(1, 2 + SAVES):
            dist.barrier()
            began = time.perf_counter()
            store.save(step)
            blocked.append(time.perf_counter() - began)
            store.wait()
            complete.append(time.perf_counter() - began)
        return {
            "save": peak.growth(),
            "first": blocked[0],
            "blocked": statistics.median(blocked[1:]),
            "complete": statistics.median(complete[1:]),
        }


def run(options: argparse.Namespace, folder: Path, *flags: str) -> dict[str, float]:
    """Measure in new processes. Return the largest value of all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = flags[flags.index("--ranks") + 1]
    command += ["--nproc-per-node", ranks, "-m", "bench.checkpoints", "--folder", str(folder)]
    command += ["--megabytes", str(options.megabytes), "--device", options.device, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: max(line[name] for line in lines) for name in lines[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=244.0, help="size of the weights")
    parser.add_argument("--ranks", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--disk", type=Path, help="where the files are written (default: /tmp)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--restore", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        # In one write, because the ranks share the pipe.
        sys.stdout.write(json.dumps(measure(options)) + "\n")
        sys.stdout.flush()
        return
    print(f"state of {3 * options.megabytes:.0f} MiB; MiB and seconds\n")
    print(f"| | {' | '.join(COLUMNS.values())} |\n|---|{'---|' * len(COLUMNS)}")
    for name, ranks, flags in CASES:
        for kind in KINDS:
            with tempfile.TemporaryDirectory(dir=options.disk) as folder:
                own = ("--kind", kind, "--ranks", str(ranks), *flags)
                found = run(options, Path(folder), *own)
                found |= run(options, Path(folder), *own, "--restore")
            cells = (f"{found[key]:.{0 if key in MEMORY else 2}f}" for key in COLUMNS)
            print(f"| {name}, {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
