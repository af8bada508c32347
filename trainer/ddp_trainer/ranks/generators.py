"""The random number generators of Python and numpy, beside those of torch."""

import random
from typing import Any

import numpy as np
import torch

# numpy takes seeds below this.
SEEDS = 2**32


def seed_all(seed: int) -> None:
    """Seed the generators of `random` and numpy."""
    random.seed(seed)
    np.random.seed(seed % SEEDS)


def read_states() -> dict[str, Any]:
    """Return the states of both generators, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return {
        "random": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [
            str(algorithm),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_states(states: dict[str, Any]) -> None:
    """Restore what `read_states` returned. Older checkpoints do not have it."""
    if "random" in states:
        version, numbers, gauss = states["random"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in states:
        algorithm, keys, *rest = states["numpy"]
        np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
