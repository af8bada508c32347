"""Train a residual network on image folders, on any number of processes.

    python train.py --data cifar10
    torchrun --standalone --nproc-per-node 2 train.py --data cifar10 --workers 1

The folder has {train,test}/<class>/*.png or .jpg. Read the script from top to bottom: options, data
with transforms, model, and the training step by step. It needs torch, pillow and ddp_trainer. Copy
it to begin a training of your own.

The network is a short ResNet (He et al., Deep Residual Learning for Image Recognition, 2015).
"""

import argparse
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ddp_trainer import (
    Checkpoints,
    GlobalBatchSampler,
    Progress,
    Runtime,
    Shard,
    ShardLoader,
    StopVote,
    UserError,
    evaluate,
    evaluation_shards,
    process_group,
)
from ddp_trainer.run.batch_norm import batch_norm_for_empty_shard
from ddp_trainer.run.evaluation import Sums, classification_sums, without_repeats

# Mean and deviation of the pixels of each channel of CIFAR-10, from 0 to 255.
MEAN = (125.3, 123.0, 113.9)
DEVIATION = (63.0, 62.1, 66.7)


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with {train,test}/<class>/*.png or .jpg")
    add("--checkpoint-dir", default=os.environ.get("DDP_CHECKPOINT_DIR"), help="none: no resume")
    add("--epochs", type=int, default=5, help="passes over the images")
    add("--batch-size", type=int, default=128, help="images per step, over all processes")
    add("--image-size", type=int, default=32, help="height and width in pixels")
    add("--width", type=int, default=16, help="channels of the first stage")
    add("--learning-rate", type=float, default=0.1, help="highest rate of the cosine schedule")
    add("--workers", type=int, default=0, help="processes that load images for each process")
    add("--save-every", type=int, default=200, help="steps between two checkpoints")
    add("--log-every", type=int, default=20, help="steps between two reports of the loss")
    add("--seed", type=int, default=0)
    return parser.parse_args()


# Data


class Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The images of a folder with one folder for each class. `transform` makes tensors of them."""

    def __init__(self, folder: Path, size: int, *, augment: bool) -> None:
        self.classes = sorted(path.name for path in folder.glob("*") if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix in (".png", ".jpg", ".jpeg")
        ]
        self.size = size
        self.augment = augment
        if not self.files:
            raise UserError(f"--data: no images found in {folder}/<class>/*.png or .jpg")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image of shape (3, size, size), label)."""
        path, label = self.files[index]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((self.size, self.size)), np.float32)
        if self.augment:
            pixels = mirrored_or_not(shifted(pixels, self.size // 8))
        normalised = (pixels - MEAN) / DEVIATION
        return torch.from_numpy(
            np.ascontiguousarray(normalised.transpose(2, 0, 1), np.float32)
        ), label


def shifted(pixels: np.ndarray, most: int) -> np.ndarray:
    """Move an image by up to `most` pixels in each direction, and fill the border with zeros."""
    padded = np.pad(pixels, ((most, most), (most, most), (0, 0)))
    height, width, _ = pixels.shape
    top, left = np.random.randint(0, 2 * most + 1, 2)
    return padded[top : top + height, left : left + width]


def mirrored_or_not(pixels: np.ndarray) -> np.ndarray:
    """Mirror every second image. The loader seeds the generator for each image."""
    return pixels[:, ::-1] if np.random.random() < 0.5 else pixels


# Model


class Residual(nn.Module):
    """Two convolutions. Their result is added to the input."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(hidden)) + self.shortcut(x))


def make_model(width: int, classes: int) -> nn.Module:
    """Return a network of three residual blocks."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        Residual(4 * width, 8 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


# Training


def train(options: argparse.Namespace, runtime: Runtime) -> None:
    """Train, evaluate after each epoch, and report the accuracy."""
    progress = Progress(runtime, options.log_every, unit="images")

    with progress.timed("setup"):
        images = Images(options.data / "train", options.image_size, augment=True)
        test_images = Images(options.data / "test", options.image_size, augment=False)

        # BatchNorm needs several images on each rank, so a rank gets at least eight or none.
        sampler = GlobalBatchSampler(
            len(images),
            options.batch_size,
            runtime.rank,
            runtime.world_size,
            seed=options.seed,
            at_least=min(8, options.batch_size),
        )
        loader = ShardLoader(images, sampler, seed=options.seed, num_workers=options.workers)

        # Convolutions are fastest in the layout of the hardware. Convert the model before `wrap`.
        layout = runtime.hardware.image_layout(bf16=False)
        model = make_model(options.width, len(images.classes)).to(runtime.device)
        model.to(memory_format=layout)
        ddp = runtime.wrap(model)
        optimizer = torch.optim.SGD(
            model.parameters(), options.learning_rate, 0.9, weight_decay=5e-4, nesterov=True
        )
        shape = (2, 3, options.image_size, options.image_size)
        runtime.warm_up(ddp, torch.zeros(shape, device=runtime.device))

        # Continue from the newest checkpoint.
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        identity = {"vision": 1, "width": options.width}
        checkpoints = Checkpoints(options.checkpoint_dir, runtime, parts, identity)
        step = checkpoints.restore()

    progress.start(
        workload="vision",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_samples=len(images),
        epochs=options.epochs,
        steps=step + sampler.batches_until(options.epochs),
        batch_size=sampler.batch_size,
        resumed_step=step,
    )

    def sums_of(batch: tuple[Shard, list[Tensor]]) -> Sums:
        inputs, labels = (tensor.to(runtime.device) for tensor in batch[1])
        labels = without_repeats(labels, batch[0])
        return classification_sums(model(inputs.to(memory_format=layout)), labels)

    stop = StopVote(runtime, checkpoints, progress)

    def accuracy() -> float:
        shards = evaluation_shards(len(test_images), options.batch_size, runtime)
        batches = ShardLoader(test_images, shards, num_workers=options.workers)
        with progress.timed("evaluate"):
            sums = evaluate(model, batches, sums_of, progress=progress, vote=stop)
        if stop.agreed:
            # A resumed run repeats it if the step was saved before, or if it is the last.
            stop.leave(step)
        progress.emit(
            "eval", epoch=sampler.epoch, step=step, accuracy=sums["correct"] / sums["samples"]
        )
        return sums["correct"] / sums["samples"]

    found = math.nan
    while sampler.epoch < options.epochs:
        model.train()
        for shard, batch in loader:
            # The rate depends on images and not on steps. It is the one for the step's middle.
            middle = shard.start + shard.batch_size / 2
            done = (shard.epoch + middle / len(images)) / options.epochs
            rate = options.learning_rate * min(1.0, 10 * done) * math.cos(math.pi / 2 * done)
            for group in optimizer.param_groups:
                group["lr"] = rate

            # Take one step. A rank without images takes part in it too.
            inputs, labels = (tensor.to(runtime.device) for tensor in batch)
            with batch_norm_for_empty_shard(model, shard):
                logits = ddp(inputs.to(memory_format=layout))
                loss = F.cross_entropy(logits, labels, reduction="sum")
                (loss * (runtime.world_size / shard.batch_size)).backward()
            runtime.step(optimizer)
            step += 1
            size = shard.batch_size
            progress.step(step, shard.epoch, loss_sum=loss, samples=size, learning_rate=rate)

            # Stop if a rank got a signal. Save from time to time.
            stop.after_step(step)
            if step % options.save_every == 0:
                progress.save(checkpoints, step)

        # Evaluate, and keep the best checkpoint too: if the step is saved already, its score is
        # noted.
        found = accuracy()
        progress.save(checkpoints, step, score=found)
    progress.end(step, {"accuracy": accuracy() if math.isnan(found) else found})


def main() -> None:
    options = read_options()
    try:
        with process_group(seed=options.seed, tune_cpu=True) as runtime:
            train(options, runtime)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
