"""Images per second of the two arms, on random data, interleaved in one run so that both see the same machine."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ddp_trainer.cli.options import ThroughputOptions
from ddp_trainer.errors import UserError
from ddp_trainer.progress import Progress
from ddp_trainer.workloads.shared.gradient_arms import ARMS

WARM_UP = 1  # rounds that are not counted


@dataclass(frozen=True)
class Rates:
    """Images per second of all ranks together, one number a round."""

    mean: float
    median: float
    p90: float
    deviation: float
    variation: float  # deviation / mean, the CV

    @classmethod
    def of(cls, values: Sequence[float]) -> "Rates":
        """Their statistics; the deviation is the sample's (n - 1)."""
        mean = statistics.fmean(values)
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        p90 = (
            statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else mean
        )
        return cls(mean, statistics.median(values), p90, deviation, deviation / mean)


def compare(
    name: str,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    options: ThroughputOptions,
    progress: Progress,
) -> None:
    """Train `make()` in both arms in turns, `options.rounds` times `options.steps` steps each, and report.

    `shape` is that of one image. The data are random and new in every round: zeros would be quicker than life. The
    overhead is how much slower DDP's median is than the native arm's; a negative one means that DDP is faster.
    """
    runtime = progress.runtime
    if runtime.world_size < 2:
        raise UserError(
            "one process has no gradients to send: start two or more, by torchrun or --spawn 2"
        )
    layout = runtime.hardware.image_layout(bf16=False)
    arms, optimizers = {}, {}
    with progress.timed("setup"):
        for arm, kind in ARMS.items():
            torch.manual_seed(options.seed)  # equal weights in both
            model = make().to(runtime.device)
            model.to(memory_format=layout)  # type: ignore[call-overload]
            arms[arm] = kind(model, runtime)
            fused = runtime.hardware.fused_optimizers
            optimizers[arm] = torch.optim.SGD(
                model.parameters(), lr=1e-3, momentum=0.9, fused=fused
            )
            runtime.warm_up(arms[arm].module, torch.randn(2, *shape, device=runtime.device))
    images = options.steps * options.batch_size * runtime.world_size
    steps = (options.rounds + WARM_UP) * options.steps * len(arms)
    progress.start(
        workload=name, epochs=0, steps=steps, batch_size=options.batch_size * runtime.world_size
    )
    generator = torch.Generator().manual_seed(options.seed + runtime.rank)
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    step = 0
    for number in range(WARM_UP + options.rounds):
        inputs = torch.randn(options.batch_size, *shape, generator=generator).to(
            runtime.device, memory_format=layout
        )
        labels = torch.randint(0, 10, (options.batch_size,), generator=generator).to(runtime.device)
        order = (
            list(arms) if number % 2 else list(arms)[::-1]
        )  # so that neither always follows the other
        for arm in order:
            runtime.barrier()
            began = time.perf_counter()
            for _ in range(options.steps):
                with progress.timed("forward"):
                    loss = F.cross_entropy(arms[arm].module(inputs), labels)
                with progress.timed("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                    arms[arm].synchronise()
                with progress.timed("optimizer"):
                    runtime.step(optimizers[arm])
                step += 1
                progress.beat(step)
            runtime.hardware.wait()
            slowest = float(
                runtime.maximum(torch.tensor(time.perf_counter() - began, dtype=torch.float64))
            )
            rate = images / slowest
            progress.emit(
                "rate",
                arm=arm,
                round=number - WARM_UP + 1,
                step=step,
                images_per_second=round(rate, 2),
            )
            if number >= WARM_UP:
                rates[arm].append(rate)
    _report(progress, step, {arm: Rates.of(values) for arm, values in rates.items()})


def _report(progress: Progress, step: int, rates: dict[str, Rates]) -> None:
    overhead = 1 - rates["ddp"].median / rates["native"].median
    runtime = progress.runtime
    runtime.warn("images/s     mean   median      p90  deviation     CV")
    for arm, found in rates.items():
        runtime.warn(
            f"{arm:8} {found.mean:8.2f} {found.median:8.2f} {found.p90:8.2f} {found.deviation:10.2f} {found.variation:6.3f}"
        )
    runtime.warn(
        f"DDP is {abs(overhead):.2%} {'slower' if overhead > 0 else 'faster'} than the native loop"
    )
    table = {
        arm: {key: round(value, 4) for key, value in vars(found).items()}
        for arm, found in rates.items()
    }
    progress.end(step, {**table, "ddp_overhead": round(overhead, 4)})
