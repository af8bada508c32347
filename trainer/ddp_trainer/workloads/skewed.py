"""Ranks of unequal speed, and ranks with unequal amounts of data.

torchrun --standalone --nproc-per-node 2 -m ddp_trainer skewed --skew 1 --timeout 5     completes
torchrun --standalone --nproc-per-node 2 -m ddp_trainer skewed --skew 8 --timeout 5     names the slow rank
torchrun --standalone --nproc-per-node 2 -m ddp_trainer skewed --uneven                 Join waits for the longest
"""

import time

import torch
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.cli.options import SkewedOptions
from ddp_trainer.errors import UserError
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.workloads.shared.models import ToyModel

LEARNING_RATE = 0.001


def train(options: SkewedOptions, runtime: Runtime) -> None:
    """Run one of the two. Raises SlowRankError where a rank is slower than the time-out allows, UserError alone."""
    if runtime.world_size < 2:
        raise UserError(
            "ranks of unequal speed need at least two processes: start it with torchrun, or add --spawn 2"
        )
    (uneven_inputs if options.uneven else unequal_speeds)(options, runtime)


def unequal_speeds(options: SkewedOptions, runtime: Runtime) -> None:
    """Every step, rank r sleeps its share of the skew before it meets its peers in the all-reduce of the gradients."""
    progress = Progress(runtime, options.log_every)
    model = ToyModel().to(runtime.device)
    ddp = runtime.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    # Otherwise the second step, too, would wait: for the final order of DDP's buckets.
    runtime.warm_up(ddp, torch.zeros(2, 10, device=runtime.device))
    sleeps = options.skew * runtime.rank / (runtime.world_size - 1)
    global_batch = options.batch_size * runtime.world_size
    progress.start(
        workload="skewed", epochs=1, steps=options.steps, batch_size=global_batch, skew=options.skew
    )
    waited = 0.0
    for step in range(1, options.steps + 1):
        time.sleep(sleeps)
        with progress.timed("forward"):
            inputs, targets = _batch(options, runtime, step)
            loss_sum = F.mse_loss(ddp(inputs), targets, reduction="sum") / targets.shape[1]
        began = time.perf_counter()
        with progress.timed("backward"):
            (loss_sum / options.batch_size).backward()  # type: ignore[no-untyped-call]
            runtime.hardware.wait()
        waited += time.perf_counter() - began
        with progress.timed("optimizer"):
            runtime.step(optimizer)
        progress.step(step, 0, loss_sum=loss_sum, samples=global_batch, learning_rate=LEARNING_RATE)
    # A mean over the steps: what rank r waits in each is what it does not sleep.
    waits = [round(seconds / options.steps, 4) for seconds in runtime.gather(waited)]
    progress.end(options.steps, {"seconds_waited_per_step": waits})


def uneven_inputs(options: SkewedOptions, runtime: Runtime) -> None:
    """Between one and three times `steps` batches a rank. Inside Join, those that are through shadow the others' sums.

    Without Join the rank with most batches would wait for ever in its next all-reduce. (With a sampler that splits
    every batch over the ranks, as our other workloads do, nothing is uneven in the first place.)
    """
    if not runtime.hardware.pairs:
        raise UserError(
            "on XLA all ranks have to take the same steps, so --uneven cannot work: add --device cpu"
        )
    progress = Progress(runtime, options.log_every)
    model = ToyModel().to(runtime.device)
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    mine = options.steps + 2 * options.steps * runtime.rank // (runtime.world_size - 1)
    batches = runtime.gather(mine)
    progress.start(workload="skewed", epochs=1, steps=max(batches), batches=batches)
    loss = torch.zeros(())
    with Join([ddp]):
        for step in range(1, mine + 1):
            inputs, targets = _batch(options, runtime, step)
            loss = F.mse_loss(ddp(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            runtime.step(optimizer)
            progress.beat(step)
        progress.beat(max(batches))
        if runtime.stragglers:
            runtime.stragglers.rest()  # in that step: a rank that only shadows the others' sums is behind nobody
    # The ranks that were through have taken no more steps; Join gives all of them the last one's parameters.
    same = runtime.identical(model.parameters())
    if not same:
        raise RuntimeError("the ranks' parameters differ after Join")
    losses = runtime.gather(float(loss))
    progress.end(
        max(batches), {"batches": batches, "last_losses": losses, "parameters_equal": same}
    )


def _batch(
    options: SkewedOptions, runtime: Runtime, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs of shape (batch, 10) and targets of shape (batch, 5), fixed by seed, rank and step."""
    generator = torch.Generator().manual_seed(hash((options.seed, runtime.rank, step)))
    numbers = torch.randn(options.batch_size, 15, generator=generator).to(runtime.device)
    return numbers[:, :10], numbers[:, 10:]
