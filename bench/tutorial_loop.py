"""CIFAR-10 as tutorials train it. bench/training_speed.py compares the trainer with this loop.

    torchrun --standalone --nproc-per-node 2 -m bench.tutorial_loop --data FOLDER

Pillow transforms one image at a time. The loop uses a DataLoader, a DistributedSampler and DDP, and
nothing else. FOLDER has image folders {train,test}/<class>/*. Prints one JSON line in the form of
the trainer's last event.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_trainer.workloads.cifar10 import DEVIATION, MEAN
from ddp_trainer.workloads.shared.models import resnet18


def crop_and_flip(image: Image.Image) -> Image.Image:
    """Return 32 x 32 pixels of the image with a black border of 4, mirrored half of the time."""
    left = random.randint(0, 8)
    top = random.randint(0, 8)
    image = ImageOps.expand(image, 4).crop((left, top, left + 32, top + 32))
    return ImageOps.mirror(image) if random.random() < 0.5 else image


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Images of shape (3, 32, 32) and the numbers of their classes."""

    def __init__(self, folder: Path, augment: bool, limit: int | None) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        files = []
        for number, name in enumerate(classes):
            for path in sorted((folder / name).iterdir()):
                files.append((path, number))

        # With a limit, choose images at even distances, to include all classes.
        chosen = np.linspace(0, len(files) - 1, limit or len(files)).astype(int)
        self.files = [files[index] for index in chosen]
        self.augment = augment
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.deviation = torch.tensor(DEVIATION).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = Image.open(path).convert("RGB")
        if self.augment:
            image = crop_and_flip(image)
        pixels = torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) / 255
        return (pixels - self.mean) / self.deviation, label


class Stopwatch:
    """Adds up the seconds of the phases of the steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
        self._last = time.perf_counter()

    def book(self, phase: str) -> None:
        """Add the time since the last call to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


def test_loss(model: nn.Module, test: Photographs) -> float:
    """Return the mean loss over the test set."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, labels in DataLoader(test, 256):
            total += F.cross_entropy(model(inputs), labels, reduction="sum").item()
    return total / len(test)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--stem", default="3x3")
    parser.add_argument("--limit-train", type=int)
    parser.add_argument("--limit-test", type=int)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    random.seed(options.seed + dist.get_rank())

    # Data, model and optimizer.
    train = Photographs(options.data / "train", True, options.limit_train)
    test = Photographs(options.data / "test", False, options.limit_test)
    sampler: DistributedSampler[int] = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(train, options.batch_size, sampler=sampler)
    model = resnet18(stem=options.stem)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)

    # Train for one epoch.
    losses = []
    stopwatch = Stopwatch()
    for inputs, labels in loader:
        stopwatch.book("data")
        loss = F.cross_entropy(ddp(inputs), labels)
        stopwatch.book("forward")
        loss.backward()  # type: ignore[no-untyped-call]
        stopwatch.book("backward")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        stopwatch.book("optimizer")

    # The mean loss of the last fifth of the steps, over both ranks.
    last_fifth = losses[-(len(losses) // 5) :]
    final = torch.stack(last_fifth).mean() / dist.get_world_size()
    dist.all_reduce(final)

    of_test = test_loss(model, test)
    if dist.get_rank() == 0:
        result = {"final_loss": float(final), "loss": of_test}
        print(json.dumps({"event": "end", "result": result, "seconds": stopwatch.seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
