"""Random shifts and flips of training images that do not depend on the number of ranks."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_trainer.sampler import Shard


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

    # Compute which row and column of the padded image each pixel of the result comes from.
    rows = torch.arange(height) + down[:, None]
    columns = torch.arange(width).repeat(count, 1)
    if flip:
        columns[mirrored] = columns[mirrored].flip(1)
    columns += right[:, None]

    # Indexing three of four dimensions moves the channels to the end, so move them there before.
    padded = F.pad(pixels, (pixels_off,) * 4).movedim(1, 3)
    image = torch.arange(count)[:, None, None].to(pixels.device)
    row = rows[:, :, None].to(pixels.device)
    column = columns[:, None, :].to(pixels.device)
    return padded[image, row, column].movedim(3, 1)
