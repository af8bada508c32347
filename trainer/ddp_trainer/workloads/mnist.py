"""MNIST with the network of PyTorch/XLA's examples: accuracy on real digits, speed on random ones.

python -m ddp_trainer mnist --data FOLDER
torchrun --standalone --nproc-per-node 2 -m ddp_trainer mnist --data FOLDER --arm native
torchrun --standalone --nproc-per-node 2 -m ddp_trainer mnist --fake
"""

import torch

from ddp_trainer.cli.options import MnistOptions
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.datasets import mnist
from ddp_trainer.workloads.datasets.images import Images
from ddp_trainer.workloads.shared.batches import ImageBatches, Normaliser
from ddp_trainer.workloads.shared.classification import train_classifier
from ddp_trainer.workloads.shared.models import MnistNet
from ddp_trainer.workloads.shared.schedule import constant
from ddp_trainer.workloads.shared.task import Task
from ddp_trainer.workloads.shared.throughput import Benchmark, compare

# Of the 60,000 training images, scaled to the range 0 to 1.
MEAN = (0.1307,)
DEVIATION = (0.3081,)

# The default learning rate for a step of --batch-size samples. It grows with the samples per step.
# So it is this times the number of processes, as in PyTorch/XLA's example, and stays if a resumed
# run keeps the samples per step.
RATE_PER_BATCH = 0.01


def train(options: MnistOptions, runtime: Runtime) -> None:
    """Train on real data, or measure on random data.

    Raises UserError on wrong use, and Interrupted after a signal.
    """
    progress = Progress(runtime, options.log_every)
    if options.fake:
        compare(Benchmark("mnist", MnistNet, (1, 28, 28)), options, progress)
        return

    with progress.timed("setup"):
        train_set, test_set = load_data(options, runtime)
        model = MnistNet().to(runtime.device)
        rate = options.learning_rate or RATE_PER_BATCH
        fused = runtime.hardware.fused_optimizers
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5, fused=fused)
        normalise = Normaliser(MEAN, DEVIATION, runtime.device)

    train_batches = ImageBatches(train_set, normalise)
    task = Task(
        name="mnist",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=train_set.pixels.shape[1:],
        fetch=lambda shard: train_batches.fetch_augmented(
            shard, seed=options.seed, pixels_off=2, flip=False
        ),
        fetch_test=ImageBatches(test_set, normalise).fetch,
        model=model,
        optimizer=optimizer,
        learning_rate=rate,
        rate_batch_size=None if options.learning_rate else options.batch_size,
        schedule=constant,
        arm=options.arm,
    )
    train_classifier(task, options, progress)


def load_data(options: MnistOptions, runtime: Runtime) -> tuple[Images, Images]:
    """Return the training and the test set. Raises UserError if --data has none of them."""
    if options.data is None:
        raise UserError(
            "mnist needs real images (--data FOLDER) or random ones (--fake): give one of the two",
            is_common=True,
        )
    folder = options.data
    train_set, test_set, is_split = runtime.run_on_all(lambda: mnist.load(folder))
    if is_split:
        runtime.warn(
            f"{folder} contains only the test set: training on {len(train_set)} of its images, "
            f"testing on {len(test_set)}"
        )
    return train_set, test_set
