"""CIFAR-10: ResNet-18 on 60,000 photographs of ten kinds of things.

python -m ddp_trainer cifar10 --data FOLDER                                                       the tutorial's recipe
torchrun --standalone --nproc-per-node 2 -m ddp_trainer cifar10 --data FOLDER --recipe fast       60 % after one epoch
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer.cli.options import Cifar10Options
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import Shard
from ddp_trainer.workloads.datasets import cifar10
from ddp_trainer.workloads.datasets.images import Images
from ddp_trainer.workloads.shared.augmentation import shift_and_flip
from ddp_trainer.workloads.shared.classification import Task, train_classifier
from ddp_trainer.workloads.shared.models import resnet18
from ddp_trainer.workloads.shared.schedule import constant, warm_up_then_cosine

MEAN, DEVIATION = (
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)  # of the training images, by colour


@dataclass(frozen=True)
class Recipe:
    """Settings that belong together; the flags of the first three change them one by one."""

    epochs: int
    batch_size: int  # per process
    learning_rate: float
    weight_decay: float
    nesterov: bool
    schedule: Callable[[float], float]
    shift: int  # pixels by which a training image is moved at most; within one epoch none is seen twice anyway
    zero_init_residual: bool
    precision: str


RECIPES = {
    "tutorial": Recipe(5, 256, 0.1, 1e-5, False, constant, 4, False, "fp32"),
    "fast": Recipe(1, 32, 0.1, 5e-4, True, warm_up_then_cosine, 0, True, "auto"),
}


def train(options: Cifar10Options, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    progress = Progress(runtime, options.log_every)
    recipe = RECIPES[options.recipe]
    options = replace(
        options,
        epochs=options.epochs or recipe.epochs,
        batch_size=options.batch_size or recipe.batch_size,
        learning_rate=options.learning_rate or recipe.learning_rate,
    )
    assert options.learning_rate is not None

    with progress.timed("setup"):
        train_set, test_set = runtime.node_by_node(lambda: cifar10.load(options.data))
        train_set, test_set = train_set.some(options.limit_train), test_set.some(options.limit_test)

        precision = recipe.precision if options.precision == "recipe" else options.precision
        bf16 = precision == "bf16" or (precision == "auto" and runtime.hardware.computes_in_bf16())
        model = resnet18(len(cifar10.CLASSES), options.stem, recipe.zero_init_residual).to(
            runtime.device
        )
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=options.learning_rate,
            momentum=0.9,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
            fused=runtime.hardware.fused_optimizers,
        )
        mean = torch.tensor(MEAN, device=runtime.device).view(3, 1, 1) * 255
        deviation = torch.tensor(DEVIATION, device=runtime.device).view(3, 1, 1) * 255

    def normalised(pixels: Tensor) -> Tensor:
        return (pixels.to(runtime.device) - mean) / deviation

    def labels(images: Images, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(images.labels[indices]).to(runtime.device)

    def fetch(shard: Shard) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(train_set.pixels[shard.indices])
        moved = shift_and_flip(pixels, shard, seed=options.seed, pixels_off=recipe.shift)
        return normalised(moved), labels(train_set, shard.indices)

    task = Task(
        name="cifar10",
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
        learning_rate=options.learning_rate,
        schedule=recipe.schedule,
        bf16=bf16,
        identity={"stem": options.stem, "recipe": options.recipe},
    )
    train_classifier(task, options, progress)
