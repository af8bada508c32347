"""How fast the trainer's steps are: side by side, in turns within one run, so that all see the same machine.

    python bench/training_speed.py scaling             ResNet-18: two ranks under DDP beside two independent processes
    python bench/training_speed.py small               small nets: plain DDP, and what each of the trainer's means gives
    python bench/training_speed.py tutorial --data FOLDER   CIFAR-10: a loop written as tutorials do, and ours

Two processes with one thread each, on random data but for `tutorial`. A turn's time is that of the slower rank; what counts
are medians over the turns. The first of the variants is there twice, under another name: the difference between it and itself
is noise, and smaller differences say nothing. Prints a table in markdown, and writes every turn to
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
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.arms import Native
from ddp_trainer.models import MnistNet, parameter_count, resnet18
from ddp_trainer.runtime import Runtime, process_group

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "training-speed"
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DROPPED = 3  # turns before the first that counts


class SmallNet(nn.Sequential):
    """Five convolutions with BatchNorm, 0.2 M parameters, for images of shape (3, 32, 32)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width, stride in ((32, 1), (64, 2), (64, 2), (96, 2), (96, 2)):
            layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@dataclass
class Variant:
    """What a step calls, the context that it runs in, what follows each backward pass, and which of the trainer's three means it has."""

    module: nn.Module
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    after_backward: Callable[[], None] = lambda: None
    batch_scheduling: bool = True
    channels_last: bool = True
    fused_optimizer: bool = True


Make = Callable[[nn.Module, Runtime], Variant]
AS_IN_TUTORIALS = {"batch_scheduling": False, "channels_last": False, "fused_optimizer": False}


def plain(model: nn.Module, _: Runtime) -> Variant:
    """DDP as tutorials use it."""
    return Variant(DistributedDataParallel(model), **AS_IN_TUTORIALS)


def with_bucket_view(model: nn.Module, _: Runtime) -> Variant:
    """The same, with gradients that are views of the buckets."""
    return Variant(DistributedDataParallel(model, gradient_as_bucket_view=True), **AS_IN_TUTORIALS)


def but_for(**means: bool) -> Make:
    """Our DDP without some of the three means."""
    return lambda model, runtime: Variant(runtime.wrap(model), **means)


def independent(model: nn.Module, _: Runtime) -> Variant:
    """No DDP: the ranks train each for itself, at the same time, with all three means."""
    return Variant(model)


def with_settings(**settings: object) -> Make:
    """Our DDP with some settings changed."""
    return lambda model, runtime: Variant(runtime.wrap(model, **settings))


def without_sync(model: nn.Module, runtime: Runtime) -> Variant:
    """Our DDP that never communicates: what is left to be gained."""
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    return Variant(ddp, context=ddp.no_sync)


def one_flat_all_reduce(model: nn.Module, runtime: Runtime) -> Variant:
    """No DDP: one all-reduce over all gradients after the backward pass."""
    arm = Native(model, runtime)
    return Variant(model, after_backward=arm.synchronise)


SMALL: dict[str, Make] = {
    "plain DDP": plain,
    "plain DDP again": plain,
    "+ bucket view": with_bucket_view,
    "+ buffers only where read": but_for(**AS_IN_TUTORIALS),
    "+ batch scheduling": but_for(channels_last=False, fused_optimizer=False),
    "+ channels last": but_for(fused_optimizer=False),
    "+ fused optimizer (ours)": with_settings(),
    "ours with static graph": with_settings(static_graph=True),
    "ours with buckets of 0.1 MB": with_settings(bucket_cap_mb=0.1),
    "one flat all-reduce": one_flat_all_reduce,
    "ours in no_sync": without_sync,
}
SCALING: dict[str, Make] = {
    "independent processes": independent,
    "independent processes again": independent,
    "DDP (ours)": with_settings(),
    "ours with static graph": with_settings(static_graph=True),
    "one flat all-reduce": one_flat_all_reduce,
    "plain DDP": plain,
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
            f"ResNet-18, {stem} stem, batch 32": Case(lambda stem=stem: resnet18(stem=stem), (3, 32, 32), 32, steps)
            for stem, steps in (("3x3", 2), ("torchvision", 12))
        }
    return {
        f"{name}, batch {batch}": Case(net, shape, batch, 320 // batch)
        for name, net, shape in (("MNIST net", MnistNet, (1, 28, 28)), ("0.2 M net", SmallNet, (3, 32, 32)))
        for batch in (8, 32)
    }


def measure(case: Case, variants: Mapping[str, Make], turns: int, runtime: Runtime) -> dict[str, list[float]]:
    """Seconds a step of each variant, one number a turn: the slower rank's."""
    made: dict[str, tuple[Variant, torch.optim.Optimizer]] = {}
    for name, make in variants.items():
        torch.manual_seed(0)
        model = case.make()
        variant = make(model, runtime)
        runtime.warm_up(variant.module, torch.randn(2, *case.shape))
        made[name] = variant, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=variant.fused_optimizer)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    generator = torch.Generator().manual_seed(runtime.rank)
    for turn in range(DROPPED + turns):
        inputs = torch.randn(case.batch_size, *case.shape, generator=generator)
        labels = torch.randint(0, 10, (case.batch_size,), generator=generator)
        names = list(variants) if turn % 2 else list(variants)[::-1]  # so that none always follows the same
        for name in names:
            took = _turn(*made[name], inputs, labels, case.steps, runtime)
            if turn >= DROPPED:
                seconds[name].append(took)
    return seconds


def _turn(
    variant: Variant, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor, steps: int, runtime: Runtime
) -> float:
    _schedule(batch=variant.batch_scheduling)
    runtime.barrier()
    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    began = time.perf_counter()
    for _ in range(steps):
        with variant.context():
            F.cross_entropy(variant.module(inputs.to(memory_format=layout)), labels).backward()
        variant.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    took = torch.tensor((time.perf_counter() - began) / steps, dtype=torch.float64)
    return float(runtime.maximum(took))


def _schedule(*, batch: bool) -> None:
    """Let Linux schedule all threads of this process, gloo's among them, as the trainer asks for it or as by default."""
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(int(thread), os.SCHED_BATCH if batch else os.SCHED_OTHER, os.sched_param(0))


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


def as_rank(experiment: str, turns: int) -> None:
    """What each of the two ranks does."""
    with process_group(threads=1) as runtime:
        results = {}
        for name, case in cases(experiment).items():
            seconds = measure(case, SCALING if experiment == "scaling" else SMALL, turns, runtime)
            results[name] = seconds
            if runtime.is_main:
                print(f"\n{name}: {parameter_count(case.make()):,} parameters, {turns} turns of {case.steps} steps\n")
                print("\n".join(table(seconds, case.batch_size * runtime.world_size)), flush=True)
        if runtime.is_main:
            _keep(experiment, results)


# --- tutorial


def tutorial(data: Path, runs: int, more: list[str]) -> None:
    """One epoch by both, in turns: seconds of its steps, the share that waits for data, the mean loss of its last fifth.

    The tutorial's loop reads an image when it is needed, ours the whole set before the first step: its first run decodes
    all files, the others find them in a cache.
    """
    programs = {
        "tutorial": [str(ROOT / "bench" / "tutorial_loop.py")],
        "ours": ["-m", "ddp_trainer", "cifar10", "--epochs", "1", "--precision", "auto", "--log-every", "5"],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for seed in range(runs):
        for name, program in programs.items():
            same = ["--data", str(data), "--seed", str(seed), "--batch-size", "32", "--stem", "3x3"]
            found[name].append(_epoch([*program, *same, *more]))  # a later flag wins
            print(f"{name:9} seed {seed}: {found[name][-1]}", flush=True)
    _keep("tutorial", found)
    first = statistics.median(run["steps"] for run in found["tutorial"])
    print("\n| | seconds of steps | times the tutorial's | waiting for data | loss of the last fifth |")
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
    late = [event["loss"] for event in events if event["event"] == "train" and event["step"] > 0.8 * event["steps"]]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["scaling", "small", "tutorial"])
    parser.add_argument("--turns", type=int, default=15, help="of each variant (default 15)")
    parser.add_argument("--data", type=Path, help="CIFAR-10's folder, for tutorial")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, for tutorial (default 3)")
    options, more = parser.parse_known_args()
    if options.experiment == "tutorial":
        if options.data is None:
            parser.error("tutorial needs --data FOLDER")
        tutorial(options.data, options.seeds, more)
    elif "RANK" in os.environ:
        as_rank(options.experiment, options.turns)
    else:
        sys.exit(subprocess.run([*TWO_RANKS, *sys.argv], env=_one_thread()).returncode)


if __name__ == "__main__":
    main()
