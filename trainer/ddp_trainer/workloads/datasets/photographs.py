"""Photographs of any size in one folder per class, such as Hymenoptera: 397 ants and bees."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer.data.sampler import Shard
from ddp_trainer.errors import UserError
from ddp_trainer.workloads.datasets.images import (
    SEARCH_DEPTH,
    Labels,
    class_folders,
    image_files,
    open_image,
    the_one_below,
)

HELP = (
    "get https://download.pytorch.org/tutorial/hymenoptera_data.zip, unpack it, and give the "
    "folder with --data"
)
PARTS = ("train", "val")

# The shorter side of larger photographs is reduced to this length, in pixels.
STORED_PIXELS = 256

# The side of a center crop as a share of the shorter side, as in torchvision's evaluation presets.
CENTER_SHARE = 224 / 256

# Limits of a random crop's share of the area and of its width / height, and the number of tries
# to find one that fits, all as in torchvision's RandomResizedCrop.
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10

# A box in a photograph: top, left, height and width in pixels.
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Photographs:
    """Photographs with labels.

    `pixels` has one tensor of shape (3, height, width) per photograph, with values from 0 to 255.
    `labels` has the shape (N,) and counts from 0 in the order of `classes`.
    """

    pixels: list[Tensor]
    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def center_crops(self, indices: NDArray[np.int64], size: int) -> Tensor:
        """Return the square centers of the photographs `indices` as a batch (k, 3, size, size).

        A square has 224 / 256 of the length of the shorter side.
        """
        crops = []
        for index in indices:
            _, height, width = self.pixels[index].shape
            side = min(height, width) * CENTER_SHARE
            box = ((height - side) / 2, (width - side) / 2, side, side)
            crops.append(_crop(self.pixels[index], box, size))
        return _stack(crops, size)

    def random_crops(self, shard: Shard, size: int, *, seed: int) -> Tensor:
        """Return random crops of a shard's photographs as a batch (k, 3, size, size).

        Area and shape of a crop are random, and half of the crops are mirrored. The random numbers
        depend on the position of the photograph in the training, not on the rank.
        """
        crops = []
        for position, index in zip(shard.positions, shard.indices, strict=True):
            random = np.random.default_rng([seed, shard.epoch, shard.start + position])
            _, height, width = self.pixels[index].shape
            crop = _crop(self.pixels[index], _random_box(height, width, random), size)
            crops.append(crop.flip(2) if random.random() < 0.5 else crop)
        return _stack(crops, size)


def load(folder: Path) -> tuple[Photographs, Photographs]:
    """Return the training and the validation set in {train,val}/<class>/ at or below `folder`.

    Raises UserError if nothing is found or a file is not an image.
    """
    if not folder.is_dir():
        raise UserError(f"--data: folder {folder} does not exist; {HELP}")
    place = the_one_below(folder, _has_both_parts)
    if place is None:
        raise UserError(
            f"--data: no train/<class>/ and val/<class>/ in {folder} or up to {SEARCH_DEPTH} "
            f"folders below; {HELP}"
        )
    classes = tuple(path.name for path in class_folders(place / "train"))
    train, val = (_read(place / part, classes) for part in PARTS)
    return train, val


def _has_both_parts(folder: Path) -> bool:
    return all((folder / part).is_dir() and class_folders(folder / part) for part in PARTS)


def _read(part: Path, classes: tuple[str, ...]) -> Photographs:
    pixels = []
    labels = []
    for class_folder in class_folders(part):
        name = class_folder.name
        if name not in classes:
            raise UserError(
                f"{class_folder}: not a class in train/ ({', '.join(classes)}); remove the folder"
            )
        for path in image_files(class_folder):
            pixels.append(_decode(path))
            labels.append(classes.index(name))
    return Photographs(pixels, np.asarray(labels, np.int64), classes)


def _decode(path: Path) -> Tensor:
    """Return a photograph (3, height, width), reduced to the stored size if it is larger."""
    image = open_image(path, STORED_PIXELS)
    scale = STORED_PIXELS / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)))
    return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())


def _random_box(height: int, width: int, random: np.random.Generator) -> Box:
    """Return a random box, or the whole photograph if no try fits into it."""
    for _ in range(TRIES):
        area = height * width * random.uniform(*AREA)
        ratio = np.exp(random.uniform(*np.log(RATIO)))
        box_height = (area / ratio) ** 0.5
        box_width = (area * ratio) ** 0.5
        if box_height <= height and box_width <= width:
            top = random.uniform(0, height - box_height)
            left = random.uniform(0, width - box_width)
            return top, left, box_height, box_width
    return 0.0, 0.0, float(height), float(width)


def _crop(pixels: Tensor, box: Box, size: int) -> Tensor:
    """Return the part `box` of a photograph, scaled to (3, size, size)."""
    top, left, height, width = box
    rows = _whole_pixels(top, height, pixels.shape[-2])
    columns = _whole_pixels(left, width, pixels.shape[-1])
    piece = pixels[None, :, rows, columns].float()
    scaled = F.interpolate(
        piece, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return scaled[0]


def _whole_pixels(start: float, length: float, available: int) -> slice:
    """Return the nearest whole pixels, at least one, of a range within `available` pixels."""
    first = min(round(start), available - 1)
    return slice(first, max(first + 1, round(start + length)))


def _stack(crops: list[Tensor], size: int) -> Tensor:
    """Return crops as one batch, also if a rank has none."""
    return torch.stack(crops) if crops else torch.empty(0, 3, size, size)
