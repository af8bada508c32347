"""Random changes to training images, the same for an image of a batch whichever rank holds it."""

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.sampler import Shard


def shift_and_flip(
    pixels: Tensor, shard: Shard, *, seed: int, pixels_off: int = 4, flip: bool = True
) -> Tensor:
    """Shift each image of `pixels` (N, C, H, W) by up to `pixels_off` over black borders, and mirror half of them.

    The random numbers are drawn for the whole global batch, from the seed and the batch's place in the training, and
    each rank takes its part. So no generator has to be saved for a resume, and any number of ranks gives the same
    batch.
    """
    count, _, height, width = pixels.shape
    random = np.random.default_rng([seed, shard.epoch, shard.start])
    shifts = torch.from_numpy(
        random.integers(0, 2 * pixels_off + 1, (2, shard.batch_size))[:, shard.positions]
    )
    mirrored = torch.from_numpy(random.random(shard.batch_size)[shard.positions] < 0.5)

    rows = shifts[0, :, None] + torch.arange(height)
    columns = torch.arange(width).repeat(count, 1)
    if flip:
        columns[mirrored] = columns[mirrored].flip(1)
    columns += shifts[1, :, None]

    padded = torch.nn.functional.pad(pixels, (pixels_off,) * 4)
    image, rows, columns = (
        index.to(pixels.device)
        for index in (torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :])
    )
    return padded.movedim(1, 3)[image, rows, columns].movedim(
        3, 1
    )  # indexing moves the colours to the end
