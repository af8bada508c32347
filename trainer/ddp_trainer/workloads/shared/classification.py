"""Training of an image classifier, shared by all workloads on images.

`train_classifier` is a plain DDP loop. A workload brings its data, model and optimizer as a `Task`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.cli.options import ClassifierOptions
from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.errors import UserError
from ddp_trainer.files import check_writable
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.batch_norm import batch_norm_for_empty_shard, synchronise
from ddp_trainer.run.evaluation import without_repeats
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.gradient_arms import ARMS, Arm
from ddp_trainer.workloads.shared.model_evaluation import Evaluator, Scores, output_folders
from ddp_trainer.workloads.shared.models import has_batch_norm, parameter_count
from ddp_trainer.workloads.shared.task import Task, in_layout

# Fewest images of a rank for stable BatchNorm statistics; see `smallest_share`.
STEADY_SHARE = 8


def train_classifier(task: Task, options: ClassifierOptions, progress: Progress) -> None:
    """Train, evaluate after every epoch, and report the result. Every rank calls it.

    Raises UserError on wrong use, and Interrupted after a signal.
    """
    runtime = progress.runtime

    # Set up the data, the model and the checkpoints. Continue from the newest checkpoint.
    with progress.timed("setup"):
        task = in_layout(task, runtime.hardware.image_layout(bf16=task.bf16))
        sampler = training_sampler(task, options, runtime)
        arm = wrap_model(task, options, runtime)
        scores = Scores()
        checkpoints = open_checkpoints(task, options, runtime, sampler, scores)
        step = restore(checkpoints, options, progress)
    report_start(task, options, progress, sampler, step)

    # From here on, a signal makes all ranks stop after the same step.
    stop = StopVote(runtime, checkpoints, progress)
    evaluator = Evaluator(task, options, progress, checkpoints, scores, stop)
    evaluator.rewrite_best_model()

    result: dict[str, float] = {}
    while sampler.epoch < options.epochs:
        # Repeat an evaluation interrupted by a signal. The weights have not changed since.
        epoch = sampler.epoch
        if sampler.offset == 0 and scores.evaluated < epoch:
            evaluator.run(epoch, step)

        task.model.train()
        for shard in sampler:
            # Take one step on this rank's share of the next global batch.
            rate = set_learning_rate(task, sampler.batch_size, shard, options.epochs)
            loss_sum = train_step(task, arm, shard, progress)
            step += 1
            progress.step(
                step, epoch, loss_sum=loss_sum, samples=shard.batch_size, learning_rate=rate
            )

            # Stop if a rank received a signal.
            stop.after_step(step)

            # Save inside the epoch. At its end, the evaluation comes first.
            if step % options.checkpoint_every == 0 and sampler.offset < task.samples:
                progress.save(checkpoints, step)

        # Evaluate before saving, so the checkpoint contains the scores of its epoch.
        result = evaluator.run(epoch + 1, step)
        progress.save(checkpoints, step)

    # If the training was complete before this start, the result comes from a new evaluation.
    progress.end(step, result or evaluator.run(sampler.epoch, step))


def set_learning_rate(task: Task, batch_size: int, shard: Shard, epochs: int) -> float:
    """Set the optimizer's learning rate for the step on `shard`, and return it.

    `batch_size` is the batch size of a whole step over all ranks. The schedule is evaluated at the
    middle of the step.
    """
    middle = shard.epoch + (shard.start + shard.batch_size / 2) / task.samples
    peak = task.learning_rate
    if task.rate_batch_size:
        peak *= batch_size / task.rate_batch_size
    rate = peak * task.schedule(middle / epochs)
    for group in task.optimizer.param_groups:
        group["lr"] = rate
    return rate


def train_step(task: Task, arm: Arm, shard: Shard, progress: Progress) -> Tensor:
    """Train on one shard and return the sum of the losses of its samples. Every rank calls it."""
    runtime = progress.runtime
    autocast = torch.autocast(runtime.device.type, torch.bfloat16, enabled=task.bf16)

    # Repeated samples, added only to make the shares equal, do not count.
    with progress.timed("data"):
        inputs, labels = task.fetch(shard)
        labels = without_repeats(labels, shard)

    # A rank without samples takes part too, because DDP expects gradients from every rank.
    with batch_norm_for_empty_shard(task.model, shard):
        with progress.timed("forward"), autocast:
            loss_sum = F.cross_entropy(arm.module(inputs), labels, reduction="sum")

        # DDP averages the gradients over the ranks. The factor turns this into the mean over the
        # samples of the global batch, also if the ranks have different numbers of samples.
        with progress.timed("backward"):
            factor = runtime.world_size / shard.batch_size
            (loss_sum * factor).backward()  # type: ignore[no-untyped-call]
            arm.synchronise()

    with progress.timed("optimizer"):
        runtime.step(task.optimizer)
    return loss_sum


def smallest_share(model: nn.Module, batch_size: int, samples: int) -> int:
    """Return the minimum size of a rank's share of a batch, unless the share is empty.

    `batch_size` is the batch size of one rank. BatchNorm divides by the standard deviation of a
    channel's values. After the network has reduced an image to one pixel, two images are two
    values, and their deviation may be almost zero. The gradients then become 1e4 times as large,
    and one step ruins the model.
    """
    if not has_batch_norm(model):
        return 1
    return max(2, min(STEADY_SHARE, batch_size, samples))


def training_sampler(
    task: Task, options: ClassifierOptions, runtime: Runtime
) -> GlobalBatchSampler:
    """Return the sampler that shuffles and splits the training set."""
    batch_size = options.samples_per_step(runtime.world_size)
    share = max(1, batch_size // runtime.world_size)
    return GlobalBatchSampler(
        task.samples,
        batch_size,
        runtime.rank,
        runtime.world_size,
        seed=options.seed,
        at_least=smallest_share(task.model, share, task.samples),
        equal_shares=runtime.hardware.wants_equal_shapes,
        on_resize=options.on_resize,
    )


def wrap_model(task: Task, options: ClassifierOptions, runtime: Runtime) -> Arm:
    """Return the task's arm around its model, after a warm-up step.

    Raises UserError if --sync-batch-norm is given and the model has no BatchNorm.
    """
    if options.sync_batch_norm:
        if not has_batch_norm(task.model):
            message = f"--sync-batch-norm: {task.name} has no BatchNorm; omit the flag"
            raise UserError(message, is_common=True)
        synchronise(task.model, runtime)
    arm = ARMS[task.arm](task.model, runtime)
    runtime.warm_up(arm.module, torch.zeros(2, *task.image_shape, device=runtime.device))
    return arm


def open_checkpoints(
    task: Task,
    options: ClassifierOptions,
    runtime: Runtime,
    sampler: GlobalBatchSampler,
    scores: Scores,
) -> Checkpoints:
    """Return the run's checkpoints. Raises UserError if a folder cannot be written to."""
    checkpoint_folder, model_folder = output_folders(options)
    # Only rank 0 writes the model, but every rank has to stop if it cannot.
    runtime.run_on_all(
        lambda: check_writable(model_folder) if model_folder and runtime.is_main else None
    )
    identity = {"workload": task.name, **task.identity, "sync_batch_norm": options.sync_batch_norm}
    return Checkpoints(
        checkpoint_folder,
        runtime,
        parts={
            "model": task.model,
            "optimizer": task.optimizer,
            "sampler": sampler,
            "scores": scores,
        },
        identity=identity,
    )


def restore(checkpoints: Checkpoints, options: ClassifierOptions, progress: Progress) -> int:
    """Load the newest checkpoint and return its step, or 0 if there is none.

    Raises UserError if --resume is given and there is no checkpoint.
    """
    step = checkpoints.restore()
    progress.beat(step)
    if options.resume and step == 0:
        if checkpoints.folder:
            problem = f"no checkpoint found in {checkpoints.folder}"
        else:
            problem = "--checkpoint-dir is required"
        message = f"--resume: {problem}; omit --resume to start from step 0"
        raise UserError(message, is_common=True)
    return step


def report_start(
    task: Task,
    options: ClassifierOptions,
    progress: Progress,
    sampler: GlobalBatchSampler,
    step: int,
) -> None:
    """Report the size of the run. Warn if a checkpoint shows that it is complete already."""
    steps_left = sampler.batches_until(options.epochs)
    progress.start(
        workload=task.name,
        parameters=parameter_count(task.model),
        train_samples=task.samples,
        test_samples=task.test_samples,
        epochs=options.epochs,
        steps=step + steps_left,
        batch_size=sampler.batch_size,
        resumed_step=step,
        precision="bf16" if task.bf16 else "fp32",
    )
    if step > 0 and steps_left == 0:
        progress.runtime.warn(
            f"training was complete at step {step}: only evaluating again; to train on, use more "
            "--epochs"
        )
