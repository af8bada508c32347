"""MNIST with the network of PyTorch/XLA's examples: on real digits how accurate, on random ones how fast.

python -m ddp_trainer mnist --data FOLDER
torchrun --standalone --nproc-per-node 2 -m ddp_trainer mnist --data FOLDER --arm native
torchrun --standalone --nproc-per-node 2 -m ddp_trainer mnist --fake
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer.cli.options import MnistOptions
from ddp_trainer.errors import UserError
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import Shard
from ddp_trainer.workloads.datasets import mnist
from ddp_trainer.workloads.datasets.images import Images
from ddp_trainer.workloads.shared.augmentation import shift_and_flip
from ddp_trainer.workloads.shared.classification import Task, train_classifier
from ddp_trainer.workloads.shared.models import MnistNet
from ddp_trainer.workloads.shared.schedule import constant
from ddp_trainer.workloads.shared.throughput import compare

MEAN, DEVIATION = 0.1307, 0.3081  # of the 60,000 training images
RATE_PER_PROCESS = 0.01


def train(options: MnistOptions, runtime: Runtime) -> None:
    """Train on real data, or measure on random data. Raises UserError on wrong use, Interrupted after a signal."""
    progress = Progress(runtime, options.log_every)
    if options.fake:
        compare("mnist", MnistNet, (1, 28, 28), options, progress)
        return
    if options.data is None:
        raise UserError(
            "mnist needs real images (--data FOLDER) or random ones (--fake); give one of the two"
        )
    folder = options.data
    with progress.timed("setup"):
        train_set, test_set, is_split = runtime.together(lambda: mnist.load(folder))
    if is_split:
        runtime.warn(
            f"only the test set is in {folder}: {len(train_set)} of its images to train on, {len(test_set)} to test"
        )
    with progress.timed("setup"):
        model = MnistNet().to(runtime.device)
        rate = options.learning_rate or RATE_PER_PROCESS * runtime.world_size
        optimizer = torch.optim.SGD(
            model.parameters(), lr=rate, momentum=0.5, fused=runtime.hardware.fused_optimizers
        )

    def normalised(pixels: Tensor) -> Tensor:
        return (pixels.to(runtime.device).float() / 255 - MEAN) / DEVIATION

    def labels(images: Images, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(images.labels[indices]).to(runtime.device)

    def fetch(shard: Shard) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(train_set.pixels[shard.indices])
        shifted = shift_and_flip(pixels, shard, seed=options.seed, pixels_off=2, flip=False)
        return normalised(shifted), labels(train_set, shard.indices)

    task = Task(
        name="mnist",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=train_set.pixels.shape[1:],
        fetch=fetch,
        fetch_test=lambda chosen: (
            normalised(torch.from_numpy(test_set.pixels[chosen])),
            labels(test_set, chosen),
        ),
        model=model,
        optimizer=optimizer,
        learning_rate=rate,
        schedule=constant,
        arm=options.arm,
    )
    train_classifier(task, options, progress)
