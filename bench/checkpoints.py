"""Memory and time of checkpoints, beside torch.distributed.checkpoint (DCP).

    python bench/checkpoints.py
    python bench/checkpoints.py --megabytes 200 --ranks 4

Each measurement runs in new processes: a model of `--megabytes` of weights, with AdamW, whose state
is twice as large. Prints how much the peak memory of a rank grows while it saves and restores
(VmHWM of proc(5)), how long `save` keeps the training waiting, and after how many seconds the
checkpoint is complete.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.group import process_group
from ddp_trainer.progress import STATUS, peak_memory_mib
from ddp_trainer.runtime import Runtime

# Saves that are measured. The first one is not: it also imports and checks.
SAVES = 3


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
        self._writing = dcp.async_save(
            dict(zip(("model", "optimizer"), state, strict=True)),
            checkpoint_id=self._folder / str(step),
        )

    def wait(self) -> None:
        if self._writing:
            self._writing.result()

    def restore(self) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        newest = max(self._folder.iterdir(), key=lambda path: int(path.name))
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=newest)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


KINDS = {"ours": Ours, "dcp": Dcp}


def growth_of_peak(action: Callable[[], None]) -> float:
    """Return by how many MiB the peak memory of this process grows while `action` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = float(
        next(line for line in STATUS.read_text().splitlines() if "VmRSS" in line).split()[1]
    )
    action()
    return peak_memory_mib() - before / 2**10


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one measurement on this rank."""
    with process_group(device="cpu") as runtime:
        width = 1024
        layers = max(1, round(options.megabytes * 2**20 / (4 * width * width)))
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        if options.sharded:
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        store = KINDS[options.kind](model, optimizer, runtime, options.folder)
        if options.restore:
            return {"restore": growth_of_peak(store.restore)}
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        store.save(1)
        store.wait()
        blocked, complete = [], []

        def save_all() -> None:
            for step in range(2, 2 + SAVES):
                dist.barrier()
                began = time.perf_counter()
                store.save(step)
                blocked.append(time.perf_counter() - began)
                store.wait()
                complete.append(time.perf_counter() - began)

        growth = growth_of_peak(save_all)
        return {
            "save": growth,
            "blocked": sorted(blocked)[SAVES // 2],
            "complete": sorted(complete)[SAVES // 2],
        }


def run(options: argparse.Namespace, folder: Path, *flags: str) -> dict[str, float]:
    """Measure in new processes. Return the largest value of all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), __file__, "--folder", str(folder)]
    command += ["--megabytes", str(options.megabytes), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: max(line[name] for line in lines) for name in lines[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=244.0, help="size of the weights")
    parser.add_argument("--ranks", type=int, default=2)
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
    print(f"state of {3 * options.megabytes:.0f} MiB, {options.ranks} ranks; MiB and seconds\n")
    print(
        "| | save: peak | restore: peak | save: blocked | save: complete |\n|---|---|---|---|---|"
    )
    for sharded in ((), ("--sharded",)):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                flags = ("--kind", kind, *sharded)
                saved = run(options, Path(folder), *flags)
                restored = run(options, Path(folder), *flags, "--restore")
            name = f"{kind}, {'FSDP2' if sharded else 'not sharded'}"
            print(
                f"| {name} | {saved['save']:.0f} | {restored['restore']:.0f} | "
                f"{saved['blocked']:.2f} | {saved['complete']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
