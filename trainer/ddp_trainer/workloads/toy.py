"""The toy of PyTorch's DDP tutorial: Linear 10-10-5 on random numbers.

It tests a launch within a second.
`train` is a complete loop with checkpoints and signals. Copy it to begin a workload of your own.

python -m ddp_trainer toy
python -m ddp_trainer toy --spawn 2
torchrun --standalone --nproc-per-node 2 -m ddp_trainer toy
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.cli.options import ToyOptions
from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.ranks.cpu import keep_freed_memory
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.models import ToyModel, parameter_count

SAMPLES = 1000
HIDDEN = {"small": 10, "wide": 1_000_000}

# In the wide model, the sum over a million hidden values multiplies the gradient of the loss.
LEARNING_RATE = {"small": 1e-3, "wide": 1e-6}


def regression_data() -> tuple[Tensor, Tensor]:
    """Return SAMPLES inputs of shape (10,) and their targets of shape (5,), a linear map of them.

    Each sample is drawn from its own global index, so it is the same on every rank.
    """
    samples = [
        np.random.default_rng([1, index]).standard_normal(10, np.float32)
        for index in range(SAMPLES)
    ]
    inputs = np.stack(samples)
    targets = inputs @ np.random.default_rng(2).standard_normal((10, 5), np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def train(options: ToyOptions, runtime: Runtime) -> None:
    """Train for `options.steps` steps and report the loss over all samples. Every rank calls it.

    Raises UserError on wrong use, Interrupted after a signal, and RuntimeError if the ranks'
    parameters differ after a step.
    """
    progress = Progress(runtime, options.log_every)
    global_batch = options.samples_per_step(runtime.world_size)
    learning_rate = options.learning_rate or LEARNING_RATE[options.model]
    if options.model == "wide":
        return_freed_gradients()

    # Data, model and optimizer. Every rank begins with the same weights.
    with progress.timed("setup"):
        inputs, targets = (tensor.to(runtime.device) for tensor in regression_data())
        model = ToyModel(HIDDEN[options.model]).to(runtime.device)
        ddp = runtime.wrap(model, gradient_as_bucket_view=not options.no_bucket_view)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        sampler = split_over_ranks(runtime, global_batch, seed=options.seed)
        sampler.on_resize = options.on_resize
        runtime.warm_up(ddp, inputs[:2])

        # Continue from the newest checkpoint. Save the bare model, not the DDP wrapper.
        checkpoints = Checkpoints(
            options.checkpoint_dir,
            runtime,
            parts={"model": model, "optimizer": optimizer, "sampler": sampler},
            identity={"workload": "toy", "model": options.model},
        )
        step = checkpoints.restore()
        progress.beat(step)

        # The rate of this command line replaces the one in the checkpoint.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    report_start(options, progress, parameter_count(model), sampler.batch_size, step)

    stop = StopVote(runtime, checkpoints, progress)
    while step < options.steps:
        epoch = sampler.epoch
        for shard in sampler:
            with progress.timed("forward"):
                loss_sum = sample_losses(ddp, inputs, targets, shard).sum()

            # DDP averages the gradients over the ranks. The factor turns this into the mean over
            # the samples of the batch, also if the ranks have different numbers of samples.
            with progress.timed("backward"):
                factor = runtime.world_size / shard.batch_size
                (loss_sum * factor).backward()  # type: ignore[no-untyped-call]

            # Gradients stay in memory, as in a run that accumulates them. DDP's bucket view saves
            # a second copy of them.
            with progress.timed("optimizer"):
                runtime.step(optimizer, set_to_none=False)
            step += 1

            # DDP keeps the parameters equal on all ranks. Check this after every step.
            if not runtime.identical(model.parameters()):
                raise RuntimeError(f"the ranks' parameters differ after step {step}")
            progress.step(
                step,
                epoch,
                loss_sum=loss_sum,
                samples=shard.batch_size,
                learning_rate=learning_rate,
            )

            # Stop if a rank received a signal. Save a checkpoint from time to time.
            stop.after_step(step)
            if step % options.checkpoint_every == 0:
                progress.save(checkpoints, step)
            if step == options.steps:
                break

    progress.save(checkpoints, step)
    with progress.timed("evaluate"):
        loss = mean_loss(model, inputs, targets, split_over_ranks(runtime, global_batch), runtime)
    progress.end(step, {"loss": loss})


def return_freed_gradients() -> None:
    """Return the memory of freed gradients to Linux, to make the peak memory comparable.

    If the process kept freed memory, its peak would depend on the timing of its threads. Equal
    runs would then differ by as much as the bucket view saves.
    """
    keep_freed_memory(up_to=128 * 1024)


def split_over_ranks(
    runtime: Runtime, global_batch: int, seed: int | None = None
) -> GlobalBatchSampler:
    """Return a sampler over all samples, shuffled if there is a `seed`."""
    return GlobalBatchSampler(
        SAMPLES,
        global_batch,
        runtime.rank,
        runtime.world_size,
        seed=seed or 0,
        shuffle=seed is not None,
        equal_shares=runtime.hardware.wants_equal_shapes,
    )


def report_start(
    options: ToyOptions, progress: Progress, parameters: int, global_batch: int, step: int
) -> None:
    """Report the size of the run. Warn if a checkpoint shows that it is complete already."""
    batches_per_epoch = math.ceil(SAMPLES / global_batch)
    progress.start(
        workload="toy",
        parameters=parameters,
        train_samples=SAMPLES,
        test_samples=0,
        epochs=math.ceil(options.steps / batches_per_epoch),
        steps=max(step, options.steps),
        batch_size=global_batch,
        resumed_step=step,
    )
    if step >= options.steps:
        progress.runtime.warn(
            f"training was complete at step {step}: only measuring the loss again; to train on, "
            "use more --steps"
        )


def sample_losses(module: nn.Module, inputs: Tensor, targets: Tensor, shard: Shard) -> Tensor:
    """Return the squared error of each sample of a shard, shape (k,).

    Repeated samples, added only to make the shares equal, have a loss of 0.
    """
    chosen = torch.from_numpy(shard.indices).to(inputs.device)
    real = torch.from_numpy(shard.real).to(inputs.device)
    errors = F.mse_loss(module(inputs[chosen]), targets[chosen], reduction="none")
    return errors.mean(1) * real


def mean_loss(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    sampler: GlobalBatchSampler,
    runtime: Runtime,
) -> float:
    """Return the mean loss over all samples, each counted once. Every rank calls it."""
    total = torch.zeros((), dtype=runtime.hardware.sums, device=runtime.device)
    with torch.no_grad():
        for shard in sampler:
            total += sample_losses(model, inputs, targets, shard).sum()
            runtime.hardware.end_step()
    return float(runtime.sum(total)) / SAMPLES
