"""One model over two devices inside DDP: the tutorial's ToyMpModel, with its batches pipelined.

python -m ddp_trainer model_parallel
torchrun --standalone --nproc-per-node 2 -m ddp_trainer model_parallel        on GPUs: half as many as there are GPUs
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.cli.options import ModelParallelOptions
from ddp_trainer.errors import UserError
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import GlobalBatchSampler
from ddp_trainer.workloads.shared.models import ToyModel, parameter_count
from ddp_trainer.workloads.shared.pipeline import Accelerators, Devices, Pipeline, StandIns, drawing
from ddp_trainer.workloads.toy import SAMPLES, regression_data

DEVICES = 2  # that a process has to itself: rank r of a node has 2 r and 2 r + 1
TOLERANCE = 1e-5  # of the gradients' relative difference


def stages() -> list[nn.Module]:
    """The toy's two layers, with equal parameters at every call under one seed."""
    toy = ToyModel()
    return [
        nn.Sequential(OrderedDict(net1=toy.net1, relu=toy.relu)),
        nn.Sequential(OrderedDict(net2=toy.net2)),
    ]


def train(options: ModelParallelOptions, runtime: Runtime) -> None:
    """Train for `options.steps` steps. Raises UserError on wrong use."""
    if options.micro_batches > options.batch_size:
        raise UserError(
            f"--micro-batches {options.micro_batches} is more than the batch of {options.batch_size} samples has parts: "
            "give fewer, or a larger --batch-size"
        )
    progress = Progress(runtime, options.log_every)
    devices: Devices = StandIns() if runtime.device.type == "cpu" else Accelerators(runtime.device)
    inputs, targets = regression_data()

    with progress.timed("setup"):
        difference = difference_to_unpipelined(options, devices, inputs[: options.batch_size])
        model = Pipeline(stages(), devices, options.micro_batches)
        ddp = runtime.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
        global_batch = options.batch_size * runtime.world_size
        sampler = GlobalBatchSampler(
            SAMPLES, global_batch, runtime.rank, runtime.world_size, seed=options.seed
        )

    progress.start(
        workload="model_parallel",
        parameters=parameter_count(model),
        epochs=-(-options.steps // -(-SAMPLES // global_batch)),
        steps=options.steps,
        batch_size=global_batch,
        micro_batches=options.micro_batches,
    )
    lines = drawing(options.micro_batches, len(model.stages))
    progress.emit("pipeline", schedule=lines, gradient_difference=difference)
    runtime.warn("\n  ".join(["which micro-batch is where, tick by tick:", *lines]))

    step, loss_sum = 0, torch.zeros(())
    while step < options.steps:
        for shard in sampler:
            chosen = torch.from_numpy(shard.indices)
            with devices.watched():
                with progress.timed("forward"):
                    outputs = ddp(inputs[chosen])
                    wanted = devices.move(targets[chosen], len(model.stages) - 1)
                    loss_sum = F.mse_loss(outputs, wanted, reduction="sum") / wanted.shape[1]
                with progress.timed("backward"):
                    (loss_sum * (runtime.world_size / shard.batch_size)).backward()  # type: ignore[no-untyped-call]
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
    with devices.watched(), torch.no_grad():
        loss = F.mse_loss(model(inputs), devices.move(targets, len(model.stages) - 1))
    progress.end(step, {"loss": float(loss), "gradient_difference": difference})


def difference_to_unpipelined(
    options: ModelParallelOptions, devices: Devices, inputs: Tensor
) -> float:
    """‖p - q‖ / ‖q‖ of the gradients p with and q without micro-batches. Raises RuntimeError above TOLERANCE."""
    gradients = []
    for micro_batches in (options.micro_batches, 1):
        with torch.random.fork_rng(
            devices=[]
        ):  # so that both, and the model to be trained, begin with equal weights
            model = Pipeline(stages(), devices, micro_batches)
        with devices.watched():
            model(inputs).square().mean().backward()
        gradients.append(
            torch.cat([_gradient(parameter).flatten().cpu() for parameter in model.parameters()])
        )
    pipelined, plain = gradients
    difference = float((pipelined - plain).norm() / plain.norm())
    if difference > TOLERANCE:
        raise RuntimeError(
            f"gradients of the pipelined model differ by {difference:.1e}, above {TOLERANCE:g}"
        )
    return difference


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
