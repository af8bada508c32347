"""Handwritten digits: a small convolutional net reaches 98 % within seconds on a CPU, with data that need no download.

python -m ddp_trainer digits
torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer import data
from ddp_trainer.classification import Task, train_classifier
from ddp_trainer.models import DigitsNet
from ddp_trainer.options import DigitsOptions
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import Shard


def train(options: DigitsOptions, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    progress = Progress(runtime, options.log_every)

    with progress.timed("data"):
        train_set, test_set = data.digits()
    with progress.timed("setup"):
        model = DigitsNet().to(runtime.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9, weight_decay=5e-4)

    def fetch(images: data.Images, indices: NDArray[np.int64], shard: Shard | None = None) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images.pixels[indices]).to(runtime.device)
        return pixels.float() / 16, torch.from_numpy(images.labels[indices]).to(runtime.device)

    train_classifier(Task("digits", train_set, test_set, model, optimizer, fetch), options, progress)
