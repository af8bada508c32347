"""The training of an image classifier, from its data to its result: what every workload on images shares.

Read top to bottom it is a plain DDP loop. A workload brings its data, its model and its optimizer (`Task`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_trainer.batch_norm import batch_norm_at_rest, synchronise
from ddp_trainer.checkpoint import Checkpoints, save_atomically
from ddp_trainer.cli.options import ClassifierOptions
from ddp_trainer.errors import UserError
from ddp_trainer.evaluation import evaluate, without_repeats
from ddp_trainer.files import check_writable
from ddp_trainer.interrupt import StopVote, leave
from ddp_trainer.progress import Progress
from ddp_trainer.sampler import GlobalBatchSampler, Shard
from ddp_trainer.workloads.shared.gradient_arms import ARMS
from ddp_trainer.workloads.shared.models import has_batch_norm, parameter_count
from ddp_trainer.workloads.shared.schedule import warm_up_then_cosine

STEADY_SHARE = 8  # images whose statistics BatchNorm can go by


@dataclass(frozen=True)
class Task:
    """What a workload brings.

    `fetch` turns a shard's indices of shape (k,) into inputs and labels on the model's device, augmented; `fetch_test`
    does so with indices of the test set, as they are. `learning_rate` is the peak, which `schedule` multiplies by a
    factor for the progress from 0 to 1. `arm` is how the ranks are kept together, `identity` what checkpoints must
    agree in beside the name, `keep_best` whether the model's file is that of the best epoch instead of the last.
    """

    name: str
    samples: int
    test_samples: int
    image_shape: tuple[int, ...]
    fetch: Callable[[Shard], tuple[Tensor, Tensor]]
    fetch_test: Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: float
    schedule: Callable[[float], float] = warm_up_then_cosine
    arm: str = "ddp"
    bf16: bool = False
    keep_best: bool = False
    identity: Mapping[str, str | int] = field(default_factory=dict)


@dataclass
class Scores:
    """What was evaluated so far; part of the checkpoint, so that a resumed run still knows it. Epochs count from 1."""

    evaluated: int = 0  # the last epoch that was
    best_epoch: int = 0
    best_accuracy: float = -1.0
    best_weights: dict[str, Tensor] = field(
        default_factory=dict
    )  # of that epoch, with `keep_best`; on the CPU

    def state_dict(self) -> dict[str, Any]:
        """The fields by their names."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the fields."""
        vars(self).update(state)


def smallest_share(model: nn.Module, batch_size: int, samples: int) -> int:
    """How many images a rank gets at least of a batch, or none; `batch_size` is that of a rank.

    BatchNorm divides by the deviation of a channel's values. Where the network has shrunk an image to one pixel, two images
    are two values, whose deviation may be next to nothing: gradients become 1e4 times as large, and one step ruins the model.
    """
    return max(2, min(STEADY_SHARE, batch_size, samples)) if has_batch_norm(model) else 1


def train_classifier(task: Task, options: ClassifierOptions, progress: Progress) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    runtime, model, optimizer = progress.runtime, task.model, task.optimizer
    model_dir = options.model_dir or options.checkpoint_dir
    global_batch = options.batch_size * runtime.world_size
    scores = Scores()

    with progress.timed("setup"):
        if options.sync_batch_norm:
            if not has_batch_norm(model):
                raise UserError(f"{task.name} has no BatchNorm: leave out --sync-batch-norm")
            synchronise(model, runtime)
        layout = runtime.hardware.image_layout(bf16=task.bf16)
        model.to(memory_format=layout)  # type: ignore[call-overload]
        arm = ARMS[task.arm](model, runtime)
        sampler = GlobalBatchSampler(
            task.samples,
            global_batch,
            runtime.rank,
            runtime.world_size,
            seed=options.seed,
            at_least=smallest_share(model, options.batch_size, task.samples),
            equal_shares=runtime.hardware.wants_equal_shapes,
        )
        runtime.warm_up(arm.module, torch.zeros(2, *task.image_shape, device=runtime.device))
        checkpoints = Checkpoints(
            options.checkpoint_dir or options.model_dir,
            runtime,
            parts={"model": model, "optimizer": optimizer, "sampler": sampler, "scores": scores},
            identity={
                "workload": task.name,
                **task.identity,
                "sync_batch_norm": options.sync_batch_norm,
            },
        )
        runtime.together(
            lambda: check_writable(model_dir) if model_dir and runtime.is_main else None
        )
        step = checkpoints.restore()
        progress.beat(step)
        if options.resume and not step:
            lacks = (
                f"and there is none in {checkpoints.folder}"
                if checkpoints.folder
                else "so a --checkpoint-dir too"
            )
            raise UserError(f"--resume needs a checkpoint, {lacks}; leave it out to begin anew")

    progress.start(
        workload=task.name,
        parameters=parameter_count(model),
        train_samples=task.samples,
        test_samples=task.test_samples,
        epochs=options.epochs,
        steps=step + sampler.batches_until(options.epochs),
        batch_size=global_batch,
        resumed_step=step,
        precision="bf16" if task.bf16 else "fp32",
    )
    if step and not sampler.batches_until(options.epochs):
        runtime.warn(
            f"training was complete at step {step} already; evaluating once more (more --epochs go on from it)"
        )

    model_file = model_dir / options.model_filename if model_dir else None
    if (
        model_file and scores.best_weights
    ):  # the folder may be another machine's now, and no further epoch better
        write_model(scores.best_weights, model_file, progress)

    vote = StopVote(runtime)
    autocast = torch.autocast(runtime.device.type, torch.bfloat16, enabled=task.bf16)

    def laid_out(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        return inputs.to(memory_format=layout), labels

    def test(epoch: int) -> dict[str, float]:
        with progress.timed("evaluate"), autocast:
            found = evaluate(
                model,
                lambda chosen: laid_out(task.fetch_test(chosen)),
                task.test_samples,
                global_batch,
                step=step,
                progress=progress,
                vote=vote,
            )
        if vote.agreed:
            leave(vote.agreed, step, vote=vote, checkpoints=checkpoints, progress=progress)
        progress.emit("eval", epoch=epoch, step=step, **found)
        scores.evaluated = epoch
        better = found["accuracy"] > scores.best_accuracy
        if better:
            scores.best_epoch, scores.best_accuracy = epoch, found["accuracy"]
        if better and task.keep_best:
            scores.best_weights = {
                name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()
            }
        if model_file and (better or not task.keep_best):
            with progress.timed("checkpoint"):
                write_model(model.state_dict(), model_file, progress)
        result = {"accuracy": found["accuracy"], "loss": found["loss"]}
        best = {"best_accuracy": scores.best_accuracy, "best_epoch": scores.best_epoch}
        return result | (best if task.keep_best else {})

    result: dict[str, float] = {}
    while sampler.epoch < options.epochs:
        epoch = sampler.epoch
        if sampler.offset == 0 and scores.evaluated < epoch:
            test(epoch)  # a signal came while this epoch was evaluated; the weights are still its
        model.train()
        for shard in sampler:
            middle = shard.epoch + (shard.start + shard.batch_size / 2) / task.samples
            rate = task.learning_rate * task.schedule(middle / options.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with progress.timed("data"):
                inputs, labels = laid_out(task.fetch(shard))
                labels = without_repeats(labels, shard)
            with batch_norm_at_rest(model, shard):
                with progress.timed("forward"), autocast:
                    loss_sum = F.cross_entropy(arm.module(inputs), labels, reduction="sum")
                with progress.timed("backward"):
                    # DDP takes the mean of the ranks' gradients; this makes it the mean over the samples of the batch,
                    # also where the ranks have different numbers of them.
                    (loss_sum * (runtime.world_size / shard.batch_size)).backward()  # type: ignore[no-untyped-call]
                    arm.synchronise()
            with progress.timed("optimizer"):
                runtime.step(optimizer)
            step += 1
            progress.step(
                step, epoch, loss_sum=loss_sum, samples=shard.batch_size, learning_rate=rate
            )
            if number := vote.at_step_boundary():
                leave(number, step, vote=vote, checkpoints=checkpoints, progress=progress)
            if step % options.checkpoint_every == 0 and sampler.offset < task.samples:
                progress.save(checkpoints, step)
        result = test(epoch + 1)
        progress.save(checkpoints, step)
    progress.end(step, result or test(sampler.epoch))


def write_model(weights: Mapping[str, Tensor], path: Path, progress: Progress) -> None:
    """Write a model's weights alone, whole or not at all, for use elsewhere; on rank 0. Raises UserError."""
    if progress.runtime.is_main:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(path, weights)
        except OSError as error:
            raise UserError(
                f"cannot write the model to {path}: {error.strerror or error}"
            ) from error
        progress.emit("model", path=str(path))
