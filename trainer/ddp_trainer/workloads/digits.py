"""Handwritten digits: a small convolutional net reaches 98 % within seconds on a CPU, with data that need no download.

python -m ddp_trainer digits
torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer import data
from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.evaluation import evaluate
from ddp_trainer.interrupt import StopVote, leave
from ddp_trainer.models import DigitsNet, parameter_count
from ddp_trainer.options import DigitsOptions
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime, warm_up
from ddp_trainer.sampler import GlobalBatchSampler
from ddp_trainer.schedule import warm_up_then_cosine


def train(options: DigitsOptions, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    progress = Progress(runtime, options.log_every)
    global_batch = options.batch_size * runtime.world_size

    with progress.timed("data"):
        train_set, test_set = data.digits()

    with progress.timed("setup"):
        model = DigitsNet().to(runtime.device)
        ddp = runtime.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9, weight_decay=5e-4)
        sampler = GlobalBatchSampler(len(train_set), global_batch, runtime.rank, runtime.world_size, seed=options.seed)
        warm_up(ddp, torch.zeros(2, 1, 8, 8, device=runtime.device))
        checkpoints = Checkpoints(
            options.checkpoint_dir,
            runtime,
            parts={"model": model, "optimizer": optimizer, "sampler": sampler},
            identity={"workload": "digits"},
        )
        step = checkpoints.restore()

    def batch(images: data.Images, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images.pixels[indices]).to(runtime.device)
        labels = torch.from_numpy(images.labels[indices]).to(runtime.device)
        return pixels.float() / 16, labels

    progress.start(
        workload="digits",
        parameters=parameter_count(model),
        train_samples=len(train_set),
        test_samples=len(test_set),
        epochs=options.epochs,
        steps=step + sampler.batches_until(options.epochs),
        batch_size=global_batch,
        resumed_step=step,
    )
    if step and not sampler.batches_until(options.epochs):
        runtime.warn(
            f"training was complete at step {step} already; evaluating once more (more --epochs go on from it)"
        )

    vote = StopVote(runtime)

    def test(epoch: int) -> dict[str, float]:
        with progress.timed("evaluate"):
            scores = evaluate(
                model,
                lambda indices: batch(test_set, indices),
                len(test_set),
                global_batch,
                step=step,
                progress=progress,
                vote=vote,
            )
        if vote.agreed:
            leave(vote.agreed, step, vote=vote, checkpoints=checkpoints, progress=progress)
        progress.emit("eval", epoch=epoch, step=step, **scores)
        return {"accuracy": scores["accuracy"], "loss": scores["loss"]}

    result: dict[str, float] = {}
    while sampler.epoch < options.epochs:
        epoch = sampler.epoch
        model.train()
        for shard in sampler:
            rate = options.learning_rate * warm_up_then_cosine(sampler.epochs_done / options.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with progress.timed("data"):
                inputs, labels = batch(train_set, shard.indices)
            with progress.timed("forward"):
                loss_sum = F.cross_entropy(ddp(inputs), labels, reduction="sum")
            with progress.timed("backward"):
                # DDP takes the mean of the ranks' gradients; this makes it the mean over the samples of the batch,
                # also where the ranks have different numbers of them.
                (loss_sum * (runtime.world_size / shard.batch_size)).backward()  # type: ignore[no-untyped-call]
            with progress.timed("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            progress.step(step, epoch, loss_sum=loss_sum, samples=shard.batch_size, learning_rate=rate)
            if number := vote.at_step_boundary():
                leave(number, step, vote=vote, checkpoints=checkpoints, progress=progress)
            if step % options.checkpoint_every == 0:
                progress.save(checkpoints, step)
        result = test(epoch + 1)
    progress.save(checkpoints, step)
    progress.end(step, result or test(options.epochs))
