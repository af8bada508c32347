"""The toy of PyTorch's DDP tutorial: Linear 10-10-5 on random numbers. Shows that a launch works, within a second.

python -m ddp_trainer toy
python -m ddp_trainer toy --spawn 2
torchrun --standalone --nproc-per-node 2 -m ddp_trainer toy
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.cli.options import ToyOptions
from ddp_trainer.cpu import keep_freed_memory
from ddp_trainer.interrupt import StopVote, leave
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import GlobalBatchSampler, Shard
from ddp_trainer.workloads.shared.models import ToyModel, parameter_count

SAMPLES = 1000
HIDDEN = {"small": 10, "wide": 1_000_000}
LEARNING_RATE = {
    "small": 1e-3,
    "wide": 1e-6,
}  # the sum over a million hidden values multiplies the slope of the loss


def regression_data() -> tuple[torch.Tensor, torch.Tensor]:
    """SAMPLES inputs of shape (10,) and what a fixed linear map makes of them, shape (5,).

    Each sample is drawn from its own global index, so it is the same whichever rank holds it.
    """
    inputs = np.stack(
        [
            np.random.default_rng([1, index]).standard_normal(10, np.float32)
            for index in range(SAMPLES)
        ]
    )
    targets = inputs @ np.random.default_rng(2).standard_normal((10, 5), np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def train(options: ToyOptions, runtime: Runtime) -> None:
    """Train for `options.steps` steps. Raises UserError on wrong use, Interrupted after a signal."""
    if options.model == "wide":
        # Gradients go back to Linux when they are freed, so that the peak is what was in use at one time. With memory that is
        # kept, equal runs differ by as much as the bucket view saves: the peak depends on which thread was quicker.
        keep_freed_memory(up_to=128 * 1024)
    progress = Progress(runtime, options.log_every)
    global_batch = options.batch_size * runtime.world_size
    learning_rate = options.learning_rate or LEARNING_RATE[options.model]

    with progress.timed("setup"):
        inputs, targets = (tensor.to(runtime.device) for tensor in regression_data())
        model = ToyModel(HIDDEN[options.model]).to(runtime.device)
        ddp = runtime.wrap(model, gradient_as_bucket_view=not options.no_bucket_view)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        share = SAMPLES, global_batch, runtime.rank, runtime.world_size
        equal = runtime.hardware.wants_equal_shapes
        sampler = GlobalBatchSampler(*share, seed=options.seed, equal_shares=equal)
        runtime.warm_up(ddp, inputs[:2])
        checkpoints = Checkpoints(
            options.checkpoint_dir,
            runtime,
            parts={"model": model, "optimizer": optimizer, "sampler": sampler},
            identity={"workload": "toy", "model": options.model},
        )
        step = checkpoints.restore()
        for group in optimizer.param_groups:
            group["lr"] = (
                learning_rate  # of this command line, not of the one that the checkpoint is from
            )
        progress.beat(step)

    batches = -(-SAMPLES // global_batch)
    progress.start(
        workload="toy",
        parameters=parameter_count(model),
        train_samples=SAMPLES,
        test_samples=0,
        epochs=-(-options.steps // batches),
        steps=max(step, options.steps),
        batch_size=global_batch,
        resumed_step=step,
    )
    if step >= options.steps:
        runtime.warn(
            f"training was complete at step {step} already; measuring once more (more --steps go on from it)"
        )

    def losses(module: nn.Module, shard: Shard) -> torch.Tensor:
        """The squared error of each sample, shape (k,); 0 for the repeats that are there for equal shapes alone."""
        chosen, real = (
            torch.from_numpy(array).to(runtime.device) for array in (shard.indices, shard.real)
        )
        return F.mse_loss(module(inputs[chosen]), targets[chosen], reduction="none").mean(1) * real

    vote = StopVote(runtime)
    while step < options.steps:
        epoch = sampler.epoch
        for shard in sampler:
            with progress.timed("forward"):
                loss_sum = losses(ddp, shard).sum()
            with progress.timed("backward"):
                # DDP takes the mean of the ranks' gradients; this makes it the mean over the samples of the batch,
                # also where the ranks have different numbers of them.
                (loss_sum * (runtime.world_size / shard.batch_size)).backward()  # type: ignore[no-untyped-call]
            with progress.timed("optimizer"):
                # Kept in memory, as while gradients are accumulated: what DDP's bucket view saves is a second copy of them.
                runtime.step(optimizer, set_to_none=False)
            step += 1
            if not runtime.identical(model.parameters()):
                raise RuntimeError(
                    f"the ranks' parameters differ after step {step}: DDP has not kept them equal"
                )
            progress.step(
                step,
                epoch,
                loss_sum=loss_sum,
                samples=shard.batch_size,
                learning_rate=learning_rate,
            )
            if number := vote.at_step_boundary():
                leave(number, step, vote=vote, checkpoints=checkpoints, progress=progress)
            if step % options.checkpoint_every == 0:
                progress.save(checkpoints, step)
            if step == options.steps:
                break
    progress.save(checkpoints, step)
    with progress.timed("evaluate"), torch.no_grad():
        total = torch.zeros((), dtype=runtime.hardware.sums, device=runtime.device)
        for shard in GlobalBatchSampler(*share, shuffle=False, equal_shares=equal):
            total += losses(model, shard).sum()
            runtime.hardware.end_step()
        result = {"loss": float(runtime.sum(total)) / SAMPLES}
    progress.end(step, result)
