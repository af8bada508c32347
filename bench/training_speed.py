"""How fast the trainer's steps are: side by side, in turns within one run, so that all see the same machine.

    python bench/training_speed.py scaling             ResNet-18: two ranks under DDP beside two independent processes
    python bench/training_speed.py small               small nets: plain DDP, and what each of the trainer's means gives
    python bench/training_speed.py tutorial --data FOLDER   CIFAR-10: a loop written as tutorials do, and ours

Two processes with one thread each, on random data but for `tutorial`. A turn's time is that of the slower rank; what counts
are medians over the turns. The first of the variants is there twice, under another name: the difference between it and itself
is noise, and smaller differences say nothing. Equal processes differ, too, by where their memory lies, so the turns are
spread over several starts. What cannot change within a process is measured in another pair of processes, started in turns;
there, too, one variant is measured twice. Prints a table in markdown, and writes every turn to
build/training-speed/<experiment>.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.process_group import process_group
from ddp_trainer.runtime import Runtime
from ddp_trainer.workloads.shared.gradient_arms import Native
from ddp_trainer.workloads.shared.models import MnistNet, parameter_count, resnet18

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "training-speed"
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DROPPED = 3  # turns before the first that counts
MALLOC_AS_IT_IS = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"
}  # its default; docs/decisions/0008-freed-memory.md
STARTS = 5  # of each part of an experiment


class SmallNet(nn.Sequential):
    """Five convolutions with BatchNorm, 0.2 M parameters, for images of shape (3, 32, 32)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width, stride in ((32, 1), (64, 2), (64, 2), (96, 2), (96, 2)):
            layers += [
                nn.Conv2d(channels, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@dataclass(frozen=True)
class Step:
    """What a step calls, the context that it runs in, and what follows each backward pass."""

    module: nn.Module
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    after_backward: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Variant:
    """How the ranks are kept together, and which of the trainer's other means a step has."""

    make: Callable[[nn.Module, Runtime], Step]
    batch_scheduling: bool = True
    channels_last: bool = True  # images and weights
    fused_optimizer: bool = True


def plain(model: nn.Module, _: Runtime) -> Step:
    """DDP as tutorials use it."""
    return Step(DistributedDataParallel(model))


def with_bucket_view(model: nn.Module, _: Runtime) -> Step:
    """The same, with gradients that are views of the buckets."""
    return Step(DistributedDataParallel(model, gradient_as_bucket_view=True))


def ours(model: nn.Module, runtime: Runtime) -> Step:
    """DDP as the trainer uses it."""
    return Step(runtime.wrap(model))


def static_graph(model: nn.Module, runtime: Runtime) -> Step:
    """Ours, told that the graph never changes."""
    return Step(runtime.wrap(model, static_graph=True))


def small_buckets(model: nn.Module, runtime: Runtime) -> Step:
    """Ours with buckets of 0.1 MB."""
    return Step(runtime.wrap(model, bucket_cap_mb=0.1))


def fp16_hook(model: nn.Module, runtime: Runtime) -> Step:
    """Ours with PyTorch's hook that sends gradients as fp16 (bf16 needs NCCL): half the bytes, less exact."""
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return Step(ddp)


def no_sync(model: nn.Module, runtime: Runtime) -> Step:
    """Ours, which never communicates: what is left to be gained."""
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    return Step(ddp, context=ddp.no_sync)


def one_flat_all_reduce(model: nn.Module, runtime: Runtime) -> Step:
    """No DDP: one all-reduce over all gradients after the backward pass."""
    arm = Native(model, runtime)
    return Step(model, after_backward=arm.synchronise)


def independent(model: nn.Module, _: Runtime) -> Step:
    """The ranks train each for itself, at the same time."""
    return Step(model)


TUTORIALS = {"batch_scheduling": False, "channels_last": False, "fused_optimizer": False}
SMALL_AS_MALLOC_DOES = {
    "plain DDP": Variant(plain, **TUTORIALS),
    "plain DDP again": Variant(plain, **TUTORIALS),
    "+ bucket view": Variant(with_bucket_view, **TUTORIALS),
    "+ buffers only where read": Variant(ours, **TUTORIALS),
    "+ batch scheduling": Variant(ours, channels_last=False, fused_optimizer=False),
    "+ channels last": Variant(ours, fused_optimizer=False),
    "+ fused optimizer": Variant(ours),
}
SMALL_IN_ANOTHER_PAIR = {"+ fused optimizer again": Variant(ours)}
SMALL = {
    "+ freed memory kept (ours)": Variant(ours),
    "ours with static graph": Variant(static_graph),
    "ours with buckets of 0.1 MB": Variant(small_buckets),
    "ours with gradients sent as fp16": Variant(fp16_hook),
    "one flat all-reduce": Variant(one_flat_all_reduce),
    "ours in no_sync": Variant(no_sync),
}
SCALING = {
    "independent processes": Variant(independent),
    "independent processes again": Variant(independent),
    "DDP (ours)": Variant(ours),
    "ours with static graph": Variant(static_graph),
    "one flat all-reduce": Variant(one_flat_all_reduce),
    "plain DDP": Variant(plain, **TUTORIALS),
}


@dataclass(frozen=True)
class Part:
    """Variants that take turns in one pair of processes. How malloc works is a matter of the whole process."""

    variants: Mapping[str, Variant]
    keeps_freed_memory: bool = True
    pinned: bool = False  # each rank to a core of its own


EXPERIMENTS = {
    "scaling": [Part(SCALING, pinned=True)],
    "small": [
        Part(SMALL_AS_MALLOC_DOES, keeps_freed_memory=False),
        Part(SMALL_IN_ANOTHER_PAIR, keeps_freed_memory=False),
        Part(SMALL),
    ],
}


@dataclass(frozen=True)
class Case:
    """A network, the shape of an image, images a step and rank, and steps a turn."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    steps: int


def cases(experiment: str) -> dict[str, Case]:
    """What an experiment goes through."""
    if experiment == "scaling":
        return {
            f"ResNet-18, {stem} stem, batch 32": Case(
                lambda stem=stem: resnet18(stem=stem), (3, 32, 32), 32, steps
            )
            for stem, steps in (("3x3", 2), ("torchvision", 12))
        }
    return {
        f"{name}, batch {batch}": Case(net, shape, batch, 320 // batch)
        for name, net, shape in (
            ("MNIST net", MnistNet, (1, 28, 28)),
            ("0.2 M net", SmallNet, (3, 32, 32)),
        )
        for batch in (8, 32)
    }


def measure(
    case: Case, variants: Mapping[str, Variant], turns: int, runtime: Runtime
) -> dict[str, list[float]]:
    """Seconds a step of each variant, one number a turn: the slower rank's."""
    made: dict[str, tuple[Step, torch.memory_format, torch.optim.Optimizer]] = {}
    for name, variant in variants.items():
        torch.manual_seed(0)
        layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        model = case.make().to(memory_format=layout)
        step = variant.make(model, runtime)
        runtime.warm_up(step.module, torch.randn(2, *case.shape))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-3, momentum=0.9, fused=variant.fused_optimizer
        )
        made[name] = step, layout, optimizer
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    generator = torch.Generator().manual_seed(runtime.rank)
    for turn in range(DROPPED + turns):
        inputs = torch.randn(case.batch_size, *case.shape, generator=generator)
        labels = torch.randint(0, 10, (case.batch_size,), generator=generator)
        names = (
            list(variants) if turn % 2 else list(variants)[::-1]
        )  # so that none always follows the same
        for name in names:
            _schedule(batch=variants[name].batch_scheduling)
            took = _turn(*made[name], inputs, labels, case.steps, runtime)
            if turn >= DROPPED:
                seconds[name].append(took)
    return seconds


def _turn(
    step: Step,
    layout: torch.memory_format,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    steps: int,
    runtime: Runtime,
) -> float:
    runtime.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        with step.context():
            F.cross_entropy(step.module(inputs.to(memory_format=layout)), labels).backward()
        step.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    took = torch.tensor((time.perf_counter() - began) / steps, dtype=torch.float64)
    return float(runtime.maximum(took))


def _schedule(*, batch: bool) -> None:
    """Let Linux schedule all threads of this process, gloo's among them, as the trainer asks for it or as by default."""
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(
                    int(thread), os.SCHED_BATCH if batch else os.SCHED_OTHER, os.sched_param(0)
                )


def _pin_to(core: int) -> None:
    """Keep all threads of this process, those to come too, on one core, so that none of them moves between two ranks' cores."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def table(seconds: Mapping[str, list[float]], images: int) -> Iterator[str]:
    """A table in markdown: medians, their ratio to the first variant, and the share of the fastest possible."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first, bound = next(iter(medians.values())), min(medians.values())
    yield "| | ms a step | images/s | times the first | share of the fastest | 10th to 90th percentile, ms |"
    yield "|---|---|---|---|---|---|"
    for name, median in medians.items():
        tenths = statistics.quantiles(seconds[name], n=10, method="inclusive")
        yield (
            f"| {name} | {median * 1e3:.2f} | {images / median:.0f} | {first / median:.2f} | {bound / median:.0%} "
            f"| {tenths[0] * 1e3:.2f} to {tenths[-1] * 1e3:.2f} |"
        )


def as_rank(experiment: str, part: int, turns: int) -> None:
    """What each of the two ranks does; rank 0 writes what both measured to `part.json`."""
    what = EXPERIMENTS[experiment][part]
    with process_group(threads=1) as runtime:
        if what.pinned and hasattr(os, "sched_setaffinity"):
            _pin_to(sorted(os.sched_getaffinity(0))[runtime.rank])
        found = {
            name: measure(case, what.variants, turns, runtime)
            for name, case in cases(experiment).items()
        }
        if runtime.is_main:
            _keep("part", found)


def side_by_side(experiment: str, turns: int) -> None:
    """Start the parts in turns, and print a table for each case."""
    made = cases(experiment)
    parts = EXPERIMENTS[experiment]
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in made}
    for start in range(STARTS):
        for number, part in enumerate(parts):
            program = [
                __file__,
                experiment,
                "--part",
                str(number),
                "--turns",
                str(-(-turns // STARTS)),
            ]
            environment = _one_thread() | ({} if part.keeps_freed_memory else MALLOC_AS_IT_IS)
            subprocess.run([*TWO_RANKS, *program], check=True, env=environment)
            for name, found in json.loads((OUT / "part.json").read_text()).items():
                for variant, values in found.items():
                    seconds[name].setdefault(variant, []).extend(values)
            print(
                f"start {start + 1} of {STARTS}, part {number + 1} of {len(parts)}", file=sys.stderr
            )
    _keep(experiment, seconds)
    for name, case in made.items():
        counted = len(next(iter(seconds[name].values())))
        print(
            f"\n{name}: {parameter_count(case.make()):,} parameters, {counted} turns of {case.steps} steps\n"
        )
        print("\n".join(table(seconds[name], case.batch_size * 2)), flush=True)


# --- tutorial


def tutorial(data: Path, runs: int, more: list[str]) -> None:
    """One epoch by both, in turns: seconds of its steps, the share that waits for data, the mean loss of its last fifth.

    The tutorial's loop reads an image when it is needed, ours the whole set before the first step: its first run decodes
    all files, the others find them in a cache.
    """
    programs = {
        "tutorial": [str(ROOT / "bench" / "tutorial_loop.py")],
        "ours": [
            "-m",
            "ddp_trainer",
            "cifar10",
            "--epochs",
            "1",
            "--precision",
            "auto",
            "--log-every",
            "5",
        ],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for seed in range(runs):
        for name, program in programs.items():
            same = ["--data", str(data), "--seed", str(seed), "--batch-size", "32", "--stem", "3x3"]
            found[name].append(_epoch([*program, *same, *more]))  # a later flag wins
            print(f"{name:9} seed {seed}: {found[name][-1]}", flush=True)
    _keep("tutorial", found)
    first = statistics.median(run["steps"] for run in found["tutorial"])
    print(
        "\n| | seconds of steps | times the tutorial's | waiting for data | loss of the last fifth |"
    )
    print("|---|---|---|---|---|")
    for name, values in found.items():
        middle = {key: statistics.median(run[key] for run in values) for key in values[0]}
        print(
            f"| {name} | {middle['steps']:.1f} | {first / middle['steps']:.2f} | {middle['data'] / middle['steps']:.1%} "
            f"| {statistics.fmean(run['loss'] for run in values):.4f} |"
        )


def _epoch(program: list[str]) -> dict[str, float]:
    """Run it on two ranks: seconds of its steps, of them waiting for data, mean loss of the last fifth."""
    done = subprocess.run(
        [*TWO_RANKS, *program],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_one_thread(),
    )
    *events, end = [json.loads(line) for line in done.stdout.splitlines()]
    spent = end["seconds"]
    late = [
        event["loss"]
        for event in events
        if event["event"] == "train" and event["step"] > 0.8 * event["steps"]
    ]
    return {
        "steps": sum(spent[phase] for phase in ("data", "forward", "backward", "optimizer")),
        "data": spent["data"],
        "loss": end["result"].get("final_loss") or statistics.fmean(late),
    }


def _one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _keep(experiment: str, results: object) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{experiment}.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=["scaling", "small", "tutorial"])
    parser.add_argument("--turns", type=int, default=15, help="of each variant (default 15)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # for the ranks that it starts
    parser.add_argument("--data", type=Path, help="CIFAR-10's folder, for tutorial")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each, for tutorial (default 3)"
    )
    options, more = parser.parse_known_args()
    if options.experiment == "tutorial":
        if options.data is None:
            parser.error("tutorial needs --data FOLDER")
        tutorial(options.data, options.seeds, more)
    elif options.part is not None:
        as_rank(options.experiment, options.part, options.turns)
    else:
        if options.turns < 2:
            parser.error("--turns: a median and its spread need at least 2")
        side_by_side(options.experiment, options.turns)


if __name__ == "__main__":
    main()
