"""CIFAR-10: ResNet-18 on 60,000 photographs of ten classes.

The tutorial's recipe, and one that reaches 60 % after one epoch:

python -m ddp_trainer cifar10 --data FOLDER
torchrun --standalone --nproc-per-node 2 -m ddp_trainer cifar10 --data FOLDER --recipe fast
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ddp_trainer.cli.options import Cifar10Options
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.datasets import cifar10
from ddp_trainer.workloads.shared.batches import ImageBatches, Normaliser
from ddp_trainer.workloads.shared.classification import train_classifier
from ddp_trainer.workloads.shared.models import resnet18
from ddp_trainer.workloads.shared.schedule import constant, warm_up_then_cosine
from ddp_trainer.workloads.shared.task import Task

# Of the training images, for each colour, scaled to the range 0 to 1.
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Recipe:
    """The settings of a training. Flags can change the first three one by one."""

    epochs: int
    # Per process.
    batch_size: int
    learning_rate: float
    weight_decay: float
    nesterov: bool
    schedule: Callable[[float], float]
    # Largest shift of a training image, in pixels.
    shift: int
    zero_init_residual: bool
    precision: str


RECIPES = {
    "tutorial": Recipe(
        epochs=5,
        batch_size=256,
        learning_rate=0.1,
        weight_decay=1e-5,
        nesterov=False,
        schedule=constant,
        shift=4,
        zero_init_residual=False,
        precision="fp32",
    ),
    "fast": Recipe(
        epochs=1,
        batch_size=32,
        learning_rate=0.1,
        weight_decay=5e-4,
        nesterov=True,
        schedule=warm_up_then_cosine,
        # Within one epoch no image comes twice, so shifts would add nothing.
        shift=0,
        zero_init_residual=True,
        precision="auto",
    ),
}


def train(options: Cifar10Options, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, and report the result.

    Raises UserError on wrong use, and Interrupted after a signal.
    """
    progress = Progress(runtime, options.log_every)
    recipe = RECIPES[options.recipe]
    options = replace(
        options,
        epochs=options.epochs or recipe.epochs,
        batch_size=options.batch_size or recipe.batch_size,
    )
    rate = options.learning_rate or recipe.learning_rate

    with progress.timed("setup"):
        # The first process of a node decodes the images and fills the cache for the others.
        train_set, test_set = runtime.node_by_node(lambda: cifar10.load(options.data))
        train_set = train_set.some(options.limit_train)
        test_set = test_set.some(options.limit_test)

        bf16 = computes_in_bf16(options, recipe, runtime)
        model = resnet18(len(cifar10.CLASSES), options.stem, recipe.zero_init_residual)
        model = model.to(runtime.device)
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=rate,
            momentum=0.9,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
            fused=runtime.hardware.fused_optimizers,
        )
        normalise = Normaliser(MEAN, DEVIATION, runtime.device)

    train_batches = ImageBatches(train_set, normalise)
    task = Task(
        name="cifar10",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=train_set.pixels.shape[1:],
        fetch=lambda shard: train_batches.fetch_augmented(
            shard, seed=options.seed, pixels_off=recipe.shift
        ),
        fetch_test=ImageBatches(test_set, normalise).fetch,
        model=model,
        optimizer=optimizer,
        learning_rate=rate,
        schedule=recipe.schedule,
        bf16=bf16,
        identity={"stem": options.stem, "recipe": options.recipe},
    )
    train_classifier(task, options, progress)


def computes_in_bf16(options: Cifar10Options, recipe: Recipe, runtime: Runtime) -> bool:
    """Return True if convolutions are to be computed in bf16."""
    precision = recipe.precision if options.precision == "recipe" else options.precision
    if precision == "auto":
        return runtime.hardware.computes_in_bf16()
    return precision == "bf16"
