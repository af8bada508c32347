"""Photographs of any size in folders by class, such as Hymenoptera: ants and bees, 397 of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_trainer.errors import UserError
from ddp_trainer.sampler import Shard
from ddp_trainer.workloads.datasets.images import (
    SEARCH_DEPTH,
    Labels,
    class_folders,
    image_files,
    open_image,
    the_one_below,
)

HELP = (
    "get hymenoptera_data.zip from https://download.pytorch.org/tutorial/hymenoptera_data.zip, unpack it, and give the "
    "folder with --data"
)
PARTS = ("train", "val")
STORED_PIXELS = 256  # of the shorter side
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop, as in torchvision's RandomResizedCrop
TRIES = 10


@dataclass(frozen=True)
class Photographs:
    """`pixels`: one tensor of shape (3, height, width) a photograph, 0 to 255; `labels` of shape (N,), from 0."""

    pixels: list[Tensor]
    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def middles(self, indices: np.ndarray, size: int) -> Tensor:
        """Their middles as a batch (k, 3, size, size): shorter side to size * 256 / 224, then cropped, as is usual."""
        cut = []
        for index in indices:
            _, height, width = self.pixels[index].shape
            side = min(height, width) * 224 / 256
            cut.append(
                _cut(self.pixels[index], (height - side) / 2, (width - side) / 2, side, side, size)
            )
        return torch.stack(cut) if cut else torch.empty(0, 3, size, size)

    def random_crops(self, shard: Shard, size: int, *, seed: int) -> Tensor:
        """Random crops of random area and shape, scaled to (k, 3, size, size), half of them mirrored.

        The random numbers are those of a photograph's place in the training, whichever rank holds it.
        """
        cut = []
        for position, index in zip(shard.positions, shard.indices, strict=True):
            random = np.random.default_rng([seed, shard.epoch, shard.start + position])
            _, height, width = self.pixels[index].shape
            crop = _cut(self.pixels[index], *_random_box(height, width, random), size)
            cut.append(crop.flip(2) if random.random() < 0.5 else crop)
        return torch.stack(cut) if cut else torch.empty(0, 3, size, size)


def load(folder: Path) -> tuple[Photographs, Photographs]:
    """{train,val}/<class>/<photograph> at or below `folder` as training and validation set.

    Raises UserError when nothing is found, or when what is found is no photograph.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: {HELP}")
    place = the_one_below(folder, _has_both_parts)
    if place is None:
        raise UserError(
            f"no train/<class>/ and val/<class>/ in {folder} or up to {SEARCH_DEPTH} folders below: {HELP}"
        )
    classes = tuple(path.name for path in class_folders(place / "train"))
    train, val = (_read(place / part, classes) for part in PARTS)
    return train, val


def _has_both_parts(folder: Path) -> bool:
    return all((folder / part).is_dir() and class_folders(folder / part) for part in PARTS)


def _read(part: Path, classes: tuple[str, ...]) -> Photographs:
    pixels, labels = [], []
    for class_folder in class_folders(part):
        if class_folder.name not in classes:
            raise UserError(
                f"{class_folder} is a class that train/ does not have ({', '.join(classes)}): remove it"
            )
        for path in image_files(class_folder):
            image = open_image(path, STORED_PIXELS)
            scale = STORED_PIXELS / min(image.size)
            if scale < 1:
                image = image.resize((round(image.width * scale), round(image.height * scale)))
            pixels.append(torch.from_numpy(np.array(image).transpose(2, 0, 1).copy()))
            labels.append(classes.index(class_folder.name))
    return Photographs(pixels, np.asarray(labels, np.int64), classes)


def _random_box(
    height: int, width: int, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """(top, left, height, width) of a random crop; the whole photograph where no try fits into it."""
    for _ in range(TRIES):
        area = height * width * random.uniform(*AREA)
        ratio = np.exp(random.uniform(*np.log(RATIO)))
        tall, wide = (area / ratio) ** 0.5, (area * ratio) ** 0.5
        if tall <= height and wide <= width:
            return random.uniform(0, height - tall), random.uniform(0, width - wide), tall, wide
    return 0.0, 0.0, float(height), float(width)


def _whole_pixels(start: float, length: float, most: int) -> slice:
    """At least one of `most` pixels."""
    first = min(round(start), most - 1)
    return slice(first, max(first + 1, round(start + length)))


def _cut(pixels: Tensor, top: float, left: float, height: float, width: float, size: int) -> Tensor:
    rows = _whole_pixels(top, height, pixels.shape[-2])
    columns = _whole_pixels(left, width, pixels.shape[-1])
    piece = pixels[None, :, rows, columns].float()
    return F.interpolate(piece, (size, size), mode="bilinear", antialias=True, align_corners=False)[
        0
    ]
