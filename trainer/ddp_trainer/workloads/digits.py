"""Handwritten digits: a small convolutional net that reaches 98 % within seconds on a CPU.

The data are part of the package.

python -m ddp_trainer digits
torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits
"""

import torch

from ddp_trainer.cli.options import DigitsOptions
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.datasets import digits
from ddp_trainer.workloads.shared.batches import ImageBatches, Normaliser
from ddp_trainer.workloads.shared.classification import train_classifier
from ddp_trainer.workloads.shared.models import DigitsNet
from ddp_trainer.workloads.shared.task import Task

# Pixels have values from 0 to 16. The range 0 to 1 is good enough for this net.
WHITE = 16


def train(options: DigitsOptions, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, and report the result.

    Raises UserError on wrong use, and Interrupted after a signal.
    """
    progress = Progress(runtime, options.log_every)

    with progress.timed("setup"):
        train_set, test_set = digits.load()
        model = DigitsNet().to(runtime.device)
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=options.learning_rate,
            momentum=0.9,
            weight_decay=5e-4,
            fused=runtime.hardware.fused_optimizers,
        )
        normalise = Normaliser([0.0], [1.0], runtime.device, white=WHITE)

    train_batches = ImageBatches(train_set, normalise)
    task = Task(
        name="digits",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=train_set.pixels.shape[1:],
        fetch=lambda shard: train_batches.fetch(shard.indices),
        fetch_test=ImageBatches(test_set, normalise).fetch,
        model=model,
        optimizer=optimizer,
        learning_rate=options.learning_rate,
    )
    train_classifier(task, options, progress)
