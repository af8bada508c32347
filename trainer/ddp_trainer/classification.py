"""The training of an image classifier, from its data to its result: what every workload on images shares.

Read top to bottom it is a plain DDP loop. A workload brings its data, its model and its optimizer (`Task`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.data import Images
from ddp_trainer.evaluation import evaluate
from ddp_trainer.interrupt import StopVote, leave
from ddp_trainer.models import has_batch_norm, parameter_count
from ddp_trainer.options import ClassifierOptions
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import batch_norm_at_rest, warm_up
from ddp_trainer.sampler import GlobalBatchSampler, Shard
from ddp_trainer.schedule import warm_up_then_cosine


class Fetch(Protocol):
    """Turns indices of shape (k,) into inputs and labels on the model's device; augmented where a `shard` is given."""

    def __call__(
        self, images: Images, indices: NDArray[np.int64], shard: Shard | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Task:
    """What a workload brings. `identity` is what its checkpoints must agree in, beside the name."""

    name: str
    train_set: Images
    test_set: Images
    model: nn.Module
    optimizer: torch.optim.Optimizer
    fetch: Fetch
    identity: Mapping[str, str | int] = field(default_factory=dict)


def train_classifier(task: Task, options: ClassifierOptions, progress: Progress) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    runtime, model, optimizer = progress.runtime, task.model, task.optimizer
    global_batch = options.batch_size * runtime.world_size

    with progress.timed("setup"):
        ddp = runtime.wrap(model)
        sampler = GlobalBatchSampler(
            len(task.train_set),
            global_batch,
            runtime.rank,
            runtime.world_size,
            seed=options.seed,
            at_least=2 if has_batch_norm(model) else 1,
        )
        warm_up(ddp, torch.zeros(2, *task.train_set.pixels.shape[1:], device=runtime.device))
        checkpoints = Checkpoints(
            options.checkpoint_dir,
            runtime,
            parts={"model": model, "optimizer": optimizer, "sampler": sampler},
            identity={"workload": task.name, **task.identity},
        )
        step = checkpoints.restore()

    progress.start(
        workload=task.name,
        parameters=parameter_count(model),
        train_samples=len(task.train_set),
        test_samples=len(task.test_set),
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
                lambda indices: task.fetch(task.test_set, indices),
                len(task.test_set),
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
                inputs, labels = task.fetch(task.train_set, shard.indices, shard)
            with batch_norm_at_rest(model, shard):
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
