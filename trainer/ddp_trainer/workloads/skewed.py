"""Ranks of unequal speed, and ranks with unequal amounts of data.

The first command completes. In the second, the timeout names the slow rank. In the third, DDP's
Join lets the other ranks wait for the one with the most data.

torchrun --standalone --nproc-per-node 2 -m ddp_trainer skewed --skew 1 --timeout 5
torchrun --standalone --nproc-per-node 2 -m ddp_trainer skewed --skew 8 --timeout 5
torchrun --standalone --nproc-per-node 2 -m ddp_trainer skewed --uneven
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.cli.options import SkewedOptions
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.models import ToyModel

LEARNING_RATE = 0.001


def train(options: SkewedOptions, runtime: Runtime) -> None:
    """Run one of the two experiments. Every rank calls it.

    Raises UserError if there is only one process, and SlowRankError if a rank is slower than the
    timeout allows.
    """
    if runtime.world_size < 2:
        raise UserError("skewed needs at least two processes: use torchrun, or add --spawn 2")
    if options.uneven:
        uneven_inputs(options, runtime)
    else:
        unequal_speeds(options, runtime)


def unequal_speeds(options: SkewedOptions, runtime: Runtime) -> None:
    """Let the ranks sleep in every step, and report how long each waited for the others.

    Rank r sleeps r / (n - 1) of `options.skew` seconds before the step's all-reduce.
    """
    progress = Progress(runtime, options.log_every)
    model = ToyModel().to(runtime.device)
    ddp = runtime.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sleep_seconds = options.skew * runtime.rank / (runtime.world_size - 1)
    global_batch = options.batch_size * runtime.world_size

    # Without the warm-up, the second step would wait too, because DDP then rebuilds its buckets.
    runtime.warm_up(ddp, torch.zeros(2, 10, device=runtime.device))
    progress.start(
        workload="skewed", epochs=1, steps=options.steps, batch_size=global_batch, skew=options.skew
    )

    waited = 0.0
    for step in range(1, options.steps + 1):
        time.sleep(sleep_seconds)
        with progress.timed("forward"):
            inputs, targets = random_batch(options, runtime, step)
            loss_sum = F.mse_loss(ddp(inputs), targets, reduction="sum") / targets.shape[1]

        # The all-reduce of the gradients runs in the backward pass, so ranks wait there.
        began = time.perf_counter()
        with progress.timed("backward"):
            (loss_sum / options.batch_size).backward()  # type: ignore[no-untyped-call]
            runtime.hardware.wait()
        waited += time.perf_counter() - began
        with progress.timed("optimizer"):
            runtime.step(optimizer)
        progress.step(step, 0, loss_sum=loss_sum, samples=global_batch, learning_rate=LEARNING_RATE)

    # Report the mean: in each step, a rank waits as long as the slowest rank sleeps longer than it.
    waits = [round(seconds / options.steps, 4) for seconds in runtime.gather(waited)]
    progress.end(options.steps, {"seconds_waited_per_step": waits})


def uneven_inputs(options: SkewedOptions, runtime: Runtime) -> None:
    """Train with one to three times `options.steps` batches per rank, inside DDP's Join.

    Without Join, the rank with the most batches would wait forever in its next all-reduce. With
    Join, finished ranks still join the sums of the others. The other workloads do not need it,
    because their sampler splits every batch over the ranks.

    Raises UserError on XLA, and RuntimeError if the ranks' parameters differ at the end.
    """
    if not runtime.hardware.pairs:
        message = "--uneven: on XLA all ranks have to take the same steps; add --device cpu"
        raise UserError(message, is_common=True)
    progress = Progress(runtime, options.log_every)
    model = ToyModel().to(runtime.device)
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    my_batches = options.steps + 2 * options.steps * runtime.rank // (runtime.world_size - 1)
    batches = runtime.gather(my_batches)
    most_batches = max(batches)
    progress.start(workload="skewed", epochs=1, steps=most_batches, batches=batches)

    loss = torch.zeros(())
    with Join([ddp]):
        for step in range(1, my_batches + 1):
            inputs, targets = random_batch(options, runtime, step)
            loss = F.mse_loss(ddp(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            runtime.step(optimizer)
            progress.beat(step)

        # A finished rank must not be reported as the slow one.
        progress.beat(most_batches)
        if runtime.stragglers:
            runtime.stragglers.forget_passes()

    # At its end, Join copies the parameters of the rank with the most batches to all ranks.
    if not runtime.identical(model.parameters()):
        raise RuntimeError("the ranks' parameters differ after Join")
    losses = runtime.gather(float(loss))
    progress.end(
        most_batches, {"batches": batches, "last_losses": losses, "parameters_equal": True}
    )


def random_batch(options: SkewedOptions, runtime: Runtime, step: int) -> tuple[Tensor, Tensor]:
    """Return random inputs (N, 10) and targets (N, 5), fixed by seed, rank and step."""
    generator = torch.Generator().manual_seed(hash((options.seed, runtime.rank, step)))
    numbers = torch.randn(options.batch_size, 15, generator=generator).to(runtime.device)
    return numbers[:, :10], numbers[:, 10:]
