"""Batches of images in memory as normalised inputs and labels on the model's device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_trainer.data.sampler import Shard
from ddp_trainer.workloads.datasets.images import Images, Labels
from ddp_trainer.workloads.shared.augmentation import shift_and_flip

Batch = tuple[Tensor, Tensor]


class Normaliser:
    """Moves batches to the device and normalises the pixels of each channel.

    The training set's pixels then have mean 0 and standard deviation 1 in each channel.

    `mean` and `deviation` have one number per channel, for pixels scaled to the range 0 to 1.
    `white` is the largest value of a pixel before it is scaled.
    """

    def __init__(
        self,
        mean: Sequence[float],
        deviation: Sequence[float],
        device: torch.device,
        white: int = 255,
    ) -> None:
        self.device = device
        # The scale to 0..1 is part of both constants, so a batch takes two operations, not three.
        self._mean = torch.tensor(mean, device=device).view(-1, 1, 1) * white
        self._deviation = torch.tensor(deviation, device=device).view(-1, 1, 1) * white

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return `pixels` (N, C, H, W) of any type as normalised float32 on the device."""
        return (pixels.to(self.device) - self._mean) / self._deviation

    def labels(self, chosen: Labels) -> Tensor:
        """Return the labels `chosen`, shape (k,), as a tensor on the device."""
        return torch.from_numpy(chosen).to(self.device)


class ImageBatches:
    """Fetches batches of `images` by their indices."""

    def __init__(self, images: Images, normalise: Normaliser) -> None:
        self._images = images
        self._normalise = normalise

    def fetch(self, indices: NDArray[np.int64]) -> Batch:
        """Return the inputs (k, C, H, W) and labels (k,) of `indices` (k,), unchanged."""
        pixels = torch.from_numpy(self._images.pixels[indices])
        return self._normalise(pixels), self._normalise.labels(self._images.labels[indices])

    def fetch_augmented(
        self, shard: Shard, *, seed: int, pixels_off: int, flip: bool = True
    ) -> Batch:
        """Return the inputs and labels of a shard, randomly shifted and mirrored.

        `shift_and_flip` describes the arguments.
        """
        pixels = torch.from_numpy(self._images.pixels[shard.indices])
        moved = shift_and_flip(pixels, shard, seed=seed, pixels_off=pixels_off, flip=flip)
        return self._normalise(moved), self._normalise.labels(self._images.labels[shard.indices])
