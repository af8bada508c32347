"""Speed of the trainer's steps, measured in turns within one run, under the same conditions.

    python -m bench.training_speed scaling
    python -m bench.training_speed small
    python -m bench.training_speed tutorial --data FOLDER

scaling   ResNet-18: two ranks under DDP, compared with two independent processes
small     small nets: plain DDP, and the effect of each optimisation of the trainer
tutorial  CIFAR-10: the loop of the tutorials (bench/tutorial_loop.py), and ours

Two processes with one thread each train on random data (`tutorial` on real data). The time of a
turn is the slower rank's. Results are medians over the turns. The first variant is measured
twice under two names. The difference between the two is noise, so smaller differences mean nothing.

Equal processes differ too, by the position of their memory. So the turns are spread over several
starts. Some settings are fixed for a whole process. They are measured in another pair of processes,
started in turns. There, too, one variant is measured twice.

Prints a table in markdown. Writes every turn to build/training-speed/<experiment>.json.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.training_variants import CASES, EXPERIMENTS, Case, Step, Variant
from ddp_trainer.ranks.group import process_group
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.workloads.shared.models import parameter_count

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "training-speed"
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Turns before the first measured one.
DROPPED = 3

# Starts of each part of an experiment.
STARTS = 5

# Setting any tunable keeps the trainer from changing malloc; this one has its default value. See
# "Smaller choices" in docs/developers/design.md.
DEFAULT_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}

# Seconds per step of each variant, one number per turn.
Turns = dict[str, list[float]]


# --- In the two ranks.


@dataclass(frozen=True)
class Trainer:
    """A variant ready for training: its step, optimizer, memory layout and scheduling."""

    step: Step
    optimizer: torch.optim.Optimizer
    layout: torch.memory_format
    batch_scheduling: bool


def run_part(experiment: str, part_number: int, turns: int) -> None:
    """Measure one part of an experiment. Rank 0 writes the results of both ranks to part.json."""
    part = EXPERIMENTS[experiment][part_number]
    torch.set_num_threads(1)
    with process_group(tune_cpu=True) as runtime:
        if part.pinned and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            pin_to_core(cores[runtime.rank])
        found = {}
        for name, case in CASES[experiment].items():
            found[name] = measure(case, part.variants, turns, runtime)
        if runtime.is_main:
            write_results("part", found)


def measure(case: Case, variants: Mapping[str, Variant], turns: int, runtime: Runtime) -> Turns:
    """Return the seconds per step of each variant in each turn, of the slower rank."""
    trainers = {name: prepare(case, variant, runtime) for name, variant in variants.items()}
    seconds: Turns = {name: [] for name in variants}
    generator = torch.Generator().manual_seed(runtime.rank)
    for turn in range(DROPPED + turns):
        inputs = torch.randn(case.batch_size, *case.shape, generator=generator)
        labels = torch.randint(0, 10, (case.batch_size,), generator=generator)
        # The order changes from turn to turn, so no variant always follows the same one.
        names = list(variants)
        if turn % 2 == 0:
            names.reverse()
        for name in names:
            took = take_turn(trainers[name], (inputs, labels), case.steps, runtime)
            if turn >= DROPPED:
                seconds[name].append(took)
    return seconds


def prepare(case: Case, variant: Variant, runtime: Runtime) -> Trainer:
    """Return the variant with a model of the same weights as the others, after a warm-up."""
    torch.manual_seed(0)
    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    model = case.make().to(memory_format=layout)  # type: ignore[call-overload]
    step = variant.make(model, runtime)
    runtime.warm_up(step.module, torch.randn(2, *case.shape))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, fused=variant.fused_optimizer
    )
    return Trainer(step, optimizer, layout, variant.batch_scheduling)


def take_turn(
    trainer: Trainer, batch: tuple[Tensor, Tensor], steps: int, runtime: Runtime
) -> float:
    """Train `steps` steps on one batch and return the seconds per step of the slower rank."""
    inputs, labels = batch
    step = trainer.step
    set_scheduling(batch=trainer.batch_scheduling)
    runtime.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        with step.context():
            logits = step.module(inputs.to(memory_format=trainer.layout))
            F.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        step.after_backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    took = torch.tensor((time.perf_counter() - began) / steps, dtype=torch.float64)
    return float(runtime.maximum(took))


def set_scheduling(*, batch: bool) -> None:
    """Set the Linux scheduling of all threads of this process, gloo's included.

    The trainer uses SCHED_BATCH. The default is SCHED_OTHER.
    """
    if sys.platform != "linux":
        return
    policy = os.SCHED_BATCH if batch else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended since.
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))


def pin_to_core(core: int) -> None:
    """Keep all threads of this process, also later ones, on one core."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


# --- The experiments `scaling` and `small`.


def compare_variants(experiment: str, turns: int) -> None:
    """Start the parts of an experiment in turns, and print a table for each case."""
    cases = CASES[experiment]
    parts = EXPERIMENTS[experiment]
    seconds: dict[str, Turns] = {name: {} for name in cases}
    for start in range(STARTS):
        for number in range(len(parts)):
            measured = start_part(experiment, number, math.ceil(turns / STARTS))
            for name, found in measured.items():
                for variant, values in found.items():
                    seconds[name].setdefault(variant, []).extend(values)
            done = f"start {start + 1} of {STARTS}, part {number + 1} of {len(parts)}"
            print(done, file=sys.stderr)

    write_results(experiment, seconds)
    for name, case in cases.items():
        counted = len(next(iter(seconds[name].values())))
        parameters = parameter_count(case.make())
        print(f"\n{name}: {parameters:,} parameters, {counted} turns of {case.steps} steps\n")
        print("\n".join(table(seconds[name], case.batch_size * 2)), flush=True)


def start_part(experiment: str, number: int, turns: int) -> dict[str, Turns]:
    """Run one part on two ranks and return its results for each case."""
    environment = one_thread()
    if not EXPERIMENTS[experiment][number].keeps_freed_memory:
        environment |= DEFAULT_MALLOC
    flags = ["--part", str(number), "--turns", str(turns)]
    subprocess.run(
        [*TWO_RANKS, "-m", "bench.training_speed", experiment, *flags], check=True, env=environment
    )
    found: dict[str, Turns] = json.loads((OUT / "part.json").read_text())
    return found


def table(seconds: Turns, images: int) -> Iterator[str]:
    """Yield a table in markdown: medians, their ratio to the first, and to the fastest."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = next(iter(medians.values()))
    fastest = min(medians.values())
    yield (
        "| | ms a step | images/s | times the first | share of the fastest "
        "| 10th to 90th percentile, ms |"
    )
    yield "|---|---|---|---|---|---|"
    for name, median in medians.items():
        tenths = statistics.quantiles(seconds[name], n=10, method="inclusive")
        yield (
            f"| {name} | {median * 1e3:.2f} | {images / median:.0f} | {first / median:.2f} "
            f"| {fastest / median:.0%} | {tenths[0] * 1e3:.2f} to {tenths[-1] * 1e3:.2f} |"
        )


# --- The experiment `tutorial`.


def compare_with_tutorial(data: Path, runs: int, more: list[str]) -> None:
    """Train one epoch with both programs in turns, and print a table.

    The tutorial's loop decodes an image when it is needed. Ours decodes the whole set before the
    first step of its first run, and then uses a cache.
    """
    ours = ["-m", "ddp_trainer", "cifar10", "--epochs", "1", "--precision", "auto"]
    programs = {
        "tutorial": ["-m", "bench.tutorial_loop"],
        "ours": [*ours, "--log-every", "5"],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for seed in range(runs):
        for name, program in programs.items():
            same = ["--data", str(data), "--seed", str(seed), "--batch-size", "32", "--stem", "3x3"]
            # Of two equal flags the later one counts, so `more` comes last.
            found[name].append(run_epoch([*program, *same, *more]))
            print(f"{name:9} seed {seed}: {found[name][-1]}", flush=True)
    write_results("tutorial", found)

    first = statistics.median(run["steps"] for run in found["tutorial"])
    print("\n| | seconds of steps | times the tutorial's | waiting for data ", end="")
    print("| loss of the last fifth |")
    print("|---|---|---|---|---|")
    for name, values in found.items():
        steps = statistics.median(run["steps"] for run in values)
        data_seconds = statistics.median(run["data"] for run in values)
        loss = statistics.fmean(run["loss"] for run in values)
        print(
            f"| {name} | {steps:.1f} | {first / steps:.2f} | {data_seconds / steps:.1%} "
            f"| {loss:.4f} |"
        )


def run_epoch(program: list[str]) -> dict[str, float]:
    """Run a program on two ranks and return figures of its epoch.

    `steps` is the seconds of its steps, `data` the part of them spent waiting for data, and `loss`
    the mean loss of the last fifth of the steps.
    """
    done = subprocess.run(
        [*TWO_RANKS, *program],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=one_thread(),
    )
    *events, end = [json.loads(line) for line in done.stdout.splitlines()]
    seconds = end["seconds"]

    # The tutorial's loop reports the final loss itself. Ours reports the loss every few steps.
    loss = end["result"].get("final_loss")
    if not loss:
        reports = [event for event in events if event["event"] == "train"]
        late = [event["loss"] for event in reports if event["step"] > 0.8 * event["steps"]]
        loss = statistics.fmean(late)
    return {
        "steps": sum(seconds[phase] for phase in ("data", "forward", "backward", "optimizer")),
        "data": seconds["data"],
        "loss": loss,
    }


def one_thread() -> dict[str, str]:
    """Return this process's environment with one thread per process."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def write_results(experiment: str, results: object) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{experiment}.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=["scaling", "small", "tutorial"])
    parser.add_argument("--turns", type=int, default=15, help="turns per variant (default 15)")
    # For the ranks started by this script.
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="CIFAR-10's folder, for tutorial")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs per program, for tutorial (default 3)"
    )
    options, more = parser.parse_known_args()

    if options.experiment == "tutorial":
        if options.data is None:
            parser.error("tutorial requires --data FOLDER")
        compare_with_tutorial(options.data, options.seeds, more)
    elif options.part is not None:
        run_part(options.experiment, options.part, options.turns)
    elif options.turns < 2:
        parser.error(
            f"--turns: must be at least 2 for a median and its spread, got {options.turns}"
        )
    else:
        compare_variants(options.experiment, options.turns)


if __name__ == "__main__":
    main()
