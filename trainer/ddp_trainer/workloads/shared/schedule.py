"""Learning rate schedules as functions of the progress of the training.

A function has no state, so a checkpoint needs no scheduler and cannot hold an outdated one.
"""

import math


def constant(progress: float) -> float:
    """Return 1: the learning rate stays at its peak."""
    return 1.0


def warm_up_then_cosine(progress: float, warm_up: float = 0.1) -> float:
    """Return the factor on the peak learning rate at `progress`, from 0 to 1, of the training.

    The factor rises linearly from 0 during the first `warm_up` of the training. Then it falls to 0
    on half a cosine (Goyal et al. 2017; Loshchilov and Hutter 2017). Callers pass the progress at
    the middle of a step, so neither the first nor the last step has a rate of 0.

    The progress comes from the position of the sampler, and checkpoints contain this position. So
    the progress is also right after a resume with another number of ranks.
    """
    if progress < warm_up:
        return progress / warm_up
    cosine_progress = (min(progress, 1.0) - warm_up) / (1 - warm_up)
    return 0.5 * (1 + math.cos(math.pi * cosine_progress))
