"""The learning rate as a function of the progress, so that a schedule has no state that could be lost or outdated."""

import math


def constant(progress: float) -> float:
    """The peak learning rate all the time."""
    return 1.0


def warm_up_then_cosine(progress: float, warm_up: float = 0.1) -> float:
    """Factor on the peak learning rate at `progress` of the training, from 0 to 1.

    Linear from 0 during the first `warm_up` of the training, then half a cosine down to 0 (Goyal et al. 2017;
    Loshchilov and Hutter 2017). Taken in the middle of a step, so that neither the first nor the last one is wasted at 0.
    The progress comes from the sampler's position: saved with it, and right also after a resume with another number of
    ranks.
    """
    if progress < warm_up:
        return progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - warm_up) / (1 - warm_up)))
