"""Handwritten digits: a small convolutional net reaches 98 % within seconds on a CPU, with data that need no download.

python -m ddp_trainer digits
torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer.cli.options import DigitsOptions
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.workloads.datasets import digits
from ddp_trainer.workloads.datasets.images import Images
from ddp_trainer.workloads.shared.classification import Task, train_classifier
from ddp_trainer.workloads.shared.models import DigitsNet


def train(options: DigitsOptions, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
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

    def inputs_and_labels(images: Images, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images.pixels[indices]).to(runtime.device)
        return pixels.float() / 16, torch.from_numpy(images.labels[indices]).to(runtime.device)

    task = Task(
        name="digits",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=train_set.pixels.shape[1:],
        fetch=lambda shard: inputs_and_labels(train_set, shard.indices),
        fetch_test=lambda indices: inputs_and_labels(test_set, indices),
        model=model,
        optimizer=optimizer,
        learning_rate=options.learning_rate,
    )
    train_classifier(task, options, progress)
