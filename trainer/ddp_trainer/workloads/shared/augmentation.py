"""Random shifts and flips of training images, independent of the number of ranks."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_trainer.data.sampler import Shard


def shift_and_flip(
    pixels: Tensor, shard: Shard, *, seed: int, pixels_off: int = 4, flip: bool = True
) -> Tensor:
    """Return the images `pixels` (N, C, H, W), randomly shifted and mirrored.

    Each image moves by up to `pixels_off` pixels in both directions. The border is filled with
    zeros. If `flip` is set, half of the images are mirrored.

    The random numbers are drawn for the whole global batch, from the seed and the position of the
    batch in the training. Each rank takes its own part of them. A resumed run therefore needs no
    saved generator, and the batch is the same for any number of ranks.
    """
    count, _, height, width = pixels.shape

    # Draw for the global batch, then keep the numbers of this rank's images.
    random = np.random.default_rng([seed, shard.epoch, shard.start])
    all_shifts = random.integers(0, 2 * pixels_off + 1, (2, shard.batch_size))
    all_mirrored = random.random(shard.batch_size) < 0.5
    down, right = torch.from_numpy(all_shifts[:, shard.positions])
    mirrored = torch.from_numpy(all_mirrored[shard.positions])

    # Of each padded image, take the window at its shift.
    padded = F.pad(pixels, (pixels_off,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    moved = windows[torch.arange(count), :, down, right]
    if flip:
        moved[mirrored] = moved[mirrored].flip(3)
    return moved
