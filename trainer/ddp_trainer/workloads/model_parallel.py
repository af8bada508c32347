"""One model over two devices inside DDP: the tutorial's ToyMpModel, with pipelined batches.

On GPUs, start half as many processes as there are GPUs:

python -m ddp_trainer model_parallel
torchrun --standalone --nproc-per-node 2 -m ddp_trainer model_parallel
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.cli.options import ModelParallelOptions
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.models import ToyModel, parameter_count
from ddp_trainer.workloads.shared.pipeline import Devices, Pipeline, drawing
from ddp_trainer.workloads.toy import SAMPLES, regression_data

# Devices per process. Rank r of a node has the devices 2 r and 2 r + 1.
DEVICES = 2

# The largest accepted relative difference of the gradients.
TOLERANCE = 1e-5


def stages() -> list[nn.Module]:
    """Return the two layers of the toy. The same seed gives the same parameters."""
    toy = ToyModel()
    return [
        nn.Sequential(OrderedDict(net1=toy.net1, relu=toy.relu)),
        nn.Sequential(OrderedDict(net2=toy.net2)),
    ]


def train(options: ModelParallelOptions, runtime: Runtime) -> None:
    """Train for `options.steps` steps and report the loss over all samples. Every rank calls it.

    Raises UserError on wrong use, and RuntimeError if micro-batches change the gradients.
    """
    check_micro_batches(options)
    progress = Progress(runtime, options.log_every)
    global_batch = options.batch_size * runtime.world_size
    inputs, targets = regression_data()

    devices = Devices(runtime.device)
    with progress.timed("setup"):
        difference = difference_to_unpipelined(options, devices, inputs[: options.batch_size])
        model = Pipeline(stages(), devices, options.micro_batches)
        last_device = len(model.stages) - 1
        ddp = runtime.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
        sampler = GlobalBatchSampler(
            SAMPLES, global_batch, runtime.rank, runtime.world_size, seed=options.seed
        )
    report_start(options, progress, model, difference)

    step = 0
    while step < options.steps:
        for shard in sampler:
            chosen = torch.from_numpy(shard.indices)
            # The outputs are on the last device, so the targets have to be moved there.
            with progress.timed("forward"):
                outputs = ddp(inputs[chosen])
                wanted = devices.move(targets[chosen], last_device)
                loss_sum = F.mse_loss(outputs, wanted, reduction="sum") / wanted.shape[1]

            # The factor turns DDP's mean over the ranks into the mean over the samples.
            with progress.timed("backward"):
                factor = runtime.world_size / shard.batch_size
                (loss_sum * factor).backward()  # type: ignore[no-untyped-call]
            with progress.timed("optimizer"):
                runtime.step(optimizer)
            step += 1
            progress.step(
                step,
                shard.epoch,
                loss_sum=loss_sum.to(runtime.device),
                samples=shard.batch_size,
                learning_rate=options.learning_rate,
            )
            if step == options.steps:
                break

    with torch.no_grad():
        loss = F.mse_loss(model(inputs), devices.move(targets, last_device))
    progress.end(step, {"loss": float(loss), "gradient_difference": difference})


def check_micro_batches(options: ModelParallelOptions) -> None:
    """Raise UserError if a batch has fewer samples than micro-batches."""
    if options.micro_batches > options.batch_size:
        raise UserError(
            f"--micro-batches {options.micro_batches} is more than the batch of "
            f"{options.batch_size} samples: use at most {options.batch_size}, or a larger "
            "--batch-size",
            is_common=True,
        )


def report_start(
    options: ModelParallelOptions, progress: Progress, model: Pipeline, difference: float
) -> None:
    """Report the size of the run, and draw the schedule of the pipeline."""
    runtime = progress.runtime
    global_batch = options.batch_size * runtime.world_size
    batches_per_epoch = math.ceil(SAMPLES / global_batch)
    progress.start(
        workload="model_parallel",
        parameters=parameter_count(model),
        epochs=math.ceil(options.steps / batches_per_epoch),
        steps=options.steps,
        batch_size=global_batch,
        micro_batches=options.micro_batches,
    )
    lines = drawing(options.micro_batches, len(model.stages))
    progress.emit("pipeline", schedule=lines, gradient_difference=difference)
    runtime.warn("\n  ".join(["micro-batch on each device, one column per tick:", *lines]))


def difference_to_unpipelined(
    options: ModelParallelOptions, devices: Devices, inputs: Tensor
) -> float:
    """Return ‖p - q‖ / ‖q‖ for the gradients p with and q without micro-batches.

    Raises RuntimeError if it is larger than TOLERANCE.
    """
    pipelined = pipeline_gradients(options.micro_batches, devices, inputs)
    plain = pipeline_gradients(1, devices, inputs)
    difference = float((pipelined - plain).norm() / plain.norm())
    if difference > TOLERANCE:
        raise RuntimeError(
            f"gradients of the pipelined model differ by {difference:.1e}, above {TOLERANCE:g}"
        )
    return difference


def pipeline_gradients(micro_batches: int, devices: Devices, inputs: Tensor) -> Tensor:
    """Return all gradients of a new model on `inputs` as one flat tensor on the CPU."""
    # Forking restores the random state, so every model begins with the same weights.
    with torch.random.fork_rng(devices=[]):
        model = Pipeline(stages(), devices, micro_batches)
    model(inputs).square().mean().backward()

    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad.flatten().cpu())
    return torch.cat(gradients)
