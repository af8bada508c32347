"""Images per second of both gradient arms on random images.

The arms take turns within one run, so both run under the same conditions.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.cli.options import ThroughputOptions
from ddp_trainer.errors import UserError
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.gradient_arms import ARMS, Arm

# Uncounted rounds: the first steps also allocate memory and fill caches.
WARM_UP = 1


@dataclass(frozen=True)
class Benchmark:
    """The model of a benchmark. `image_shape` is the shape of one image, (C, H, W)."""

    name: str
    make_model: Callable[[], nn.Module]
    image_shape: tuple[int, ...]


@dataclass(frozen=True)
class Rates:
    """Statistics of the rounds' rates, in images per second of all ranks together."""

    mean: float
    median: float
    p90: float
    # The sample's standard deviation (n - 1), and its ratio to the mean (CV).
    deviation: float
    variation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Rates":
        mean = statistics.fmean(values)
        deviation = 0.0
        p90 = mean
        if len(values) > 1:
            deviation = statistics.stdev(values)
            p90 = statistics.quantiles(values, n=10, method="inclusive")[-1]
        return cls(mean, statistics.median(values), p90, deviation, deviation / mean)


@dataclass(frozen=True)
class _Contestant:
    """One arm with a model and an optimizer of its own."""

    arm: Arm
    optimizer: torch.optim.Optimizer


def compare(benchmark: Benchmark, options: ThroughputOptions, progress: Progress) -> None:
    """Train the benchmark's model in both arms in turns, and report the rates.

    There are `options.rounds` rounds. In a round, each arm takes `options.steps` steps. The images
    are random and new in each round, because computing with zeros can be faster. The overhead of
    DDP is how much lower its median rate is than the native arm's. It is negative if DDP is faster.
    Raises UserError if there is only one process.
    """
    runtime = progress.runtime
    if runtime.world_size < 2:
        raise UserError(
            "at least two processes are required: start them with torchrun or --spawn 2"
        )

    with progress.timed("setup"):
        contestants = _set_up(benchmark, options, progress)

    rounds = WARM_UP + options.rounds
    global_batch = options.batch_size * runtime.world_size
    progress.start(
        workload=benchmark.name,
        epochs=0,
        steps=rounds * options.steps * len(contestants),
        batch_size=global_batch,
    )

    rates: dict[str, list[float]] = {name: [] for name in contestants}
    generator = torch.Generator().manual_seed(options.seed + runtime.rank)
    step = 0
    for number in range(rounds):
        batch = _random_batch(benchmark, options, progress, generator)
        # The order changes from round to round, so neither arm always runs second.
        order = list(contestants)
        if number % 2 == 0:
            order.reverse()
        for name in order:
            seconds = _seconds_of_steps(contestants[name], batch, options.steps, step, progress)
            step += options.steps
            rate = options.steps * global_batch / seconds
            progress.emit(
                "rate",
                arm=name,
                round=number - WARM_UP + 1,
                step=step,
                images_per_second=round(rate, 2),
            )
            if number >= WARM_UP:
                rates[name].append(rate)
    _report(progress, step, {name: Rates.of(values) for name, values in rates.items()})


def _set_up(
    benchmark: Benchmark, options: ThroughputOptions, progress: Progress
) -> dict[str, _Contestant]:
    """Return both arms, their models with equal weights and in the hardware's memory layout."""
    runtime = progress.runtime
    contestants = {}
    for name, kind in ARMS.items():
        # The same seed gives both arms the same weights.
        torch.manual_seed(options.seed)
        model = benchmark.make_model().to(runtime.device)
        model.to(memory_format=runtime.hardware.image_layout(bf16=False))  # type: ignore[call-overload]
        arm = kind(model, runtime)
        fused = runtime.hardware.fused_optimizers
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        example = torch.randn(2, *benchmark.image_shape, device=runtime.device)
        runtime.warm_up(arm.module, example)
        contestants[name] = _Contestant(arm, optimizer)
    return contestants


def _random_batch(
    benchmark: Benchmark,
    options: ThroughputOptions,
    progress: Progress,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return this rank's random images (N, C, H, W) and labels (N,) on the device."""
    device = progress.runtime.device
    layout = progress.runtime.hardware.image_layout(bf16=False)
    images = torch.randn(options.batch_size, *benchmark.image_shape, generator=generator)
    labels = torch.randint(0, 10, (options.batch_size,), generator=generator)
    return images.to(device, memory_format=layout), labels.to(device)


def _seconds_of_steps(
    contestant: _Contestant,
    batch: tuple[Tensor, Tensor],
    steps: int,
    first_step: int,
    progress: Progress,
) -> float:
    """Train `steps` steps on one batch and return the seconds of the slowest rank."""
    runtime = progress.runtime
    inputs, labels = batch
    arm = contestant.arm
    runtime.barrier()
    began = time.perf_counter()
    for step in range(first_step, first_step + steps):
        with progress.timed("forward"):
            loss = F.cross_entropy(arm.module(inputs), labels)
        with progress.timed("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            arm.synchronise()
        with progress.timed("optimizer"):
            runtime.step(contestant.optimizer)
        progress.beat(step + 1)
    # Operations on a GPU may still be running, and ranks may end at different times.
    runtime.hardware.wait()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    return float(runtime.maximum(seconds))


def _report(progress: Progress, step: int, rates: dict[str, Rates]) -> None:
    """Print a table of the rates for people, and end the run with them as its result."""
    runtime = progress.runtime
    runtime.warn("images/s     mean   median      p90  deviation     CV")
    for name, rate in rates.items():
        runtime.warn(
            f"{name:8} {rate.mean:8.2f} {rate.median:8.2f} {rate.p90:8.2f} "
            f"{rate.deviation:10.2f} {rate.variation:6.3f}"
        )
    overhead = 1 - rates["ddp"].median / rates["native"].median
    comparison = "slower" if overhead > 0 else "faster"
    runtime.warn(f"DDP is {abs(overhead):.2%} {comparison} than the native loop")

    result: dict[str, object] = {}
    for name, rate in rates.items():
        result[name] = {key: round(value, 4) for key, value in vars(rate).items()}
    progress.end(step, result | {"ddp_overhead": round(overhead, 4)})
