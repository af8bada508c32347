"""CIFAR-10: ResNet-18 on 60,000 photographs of ten kinds of things.

python -m ddp_trainer cifar10 --data FOLDER
torchrun --standalone --nproc-per-node 2 -m ddp_trainer cifar10 --data FOLDER
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer import data
from ddp_trainer.augmentation import crop_and_flip
from ddp_trainer.classification import Task, train_classifier
from ddp_trainer.models import ResNet18
from ddp_trainer.options import Cifar10Options
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import Shard

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, by colour


def train(options: Cifar10Options, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    progress = Progress(runtime, options.log_every)

    with progress.timed("data"):
        train_set, test_set = runtime.node_by_node(lambda: data.cifar10(options.data))
        train_set, test_set = train_set.some(options.limit_train), test_set.some(options.limit_test)
    with progress.timed("setup"):
        model = ResNet18(len(data.CIFAR10_CLASSES), options.stem).to(runtime.device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=options.learning_rate, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        mean = torch.tensor(MEAN, device=runtime.device).view(3, 1, 1)
        deviation = torch.tensor(DEVIATION, device=runtime.device).view(3, 1, 1)

    def fetch(images: data.Images, indices: NDArray[np.int64], shard: Shard | None = None) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images.pixels[indices]).to(runtime.device)
        labels = torch.from_numpy(images.labels[indices]).to(runtime.device)
        if shard:
            pixels = crop_and_flip(pixels, shard, seed=options.seed)
        return (pixels.float() / 255 - mean) / deviation, labels

    task = Task("cifar10", train_set, test_set, model, optimizer, fetch, identity={"stem": options.stem})
    train_classifier(task, options, progress)
