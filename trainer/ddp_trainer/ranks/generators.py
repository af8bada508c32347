"""The random number generators of Python and numpy, beside those of torch."""

import ctypes
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# numpy takes seeds below this.
SEEDS = 2**32

# The state of numpy's generator MT19937: 624 numbers and a position, of 4 bytes each.
STATE_BYTES = (624 + 1) * 4


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
    """Restore the result of `read_states`. Older checkpoints do not have it."""
    if "random" in states:
        version, numbers, gauss = states["random"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in states:
        algorithm, keys, *rest = states["numpy"]
        np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))


def remember_numpy() -> Callable[[], None]:
    """Return a function that brings numpy's generator back to its present state.

    Seed the generator after this call, because the call may draw a number.

    `np.random.get_state` and `set_state` take 65 µs, because they copy number by number. This takes
    3 µs. It copies the memory of the generator. numpy gives other languages access to this memory.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937 or not _has_known_memory():
        return partial(np.random.set_state, np.random.get_state(legacy=False))
    before = ctypes.string_at(generator.ctypes.state_address, STATE_BYTES)
    # Normal numbers are made in pairs. If the second one of a pair waits for its use, it is drawn
    # now, and nothing else changes.
    waiting = float(np.random.standard_normal())
    if ctypes.string_at(generator.ctypes.state_address, STATE_BYTES) == before:
        keys, position = _numbers_in(before)
        return partial(np.random.set_state, ("MT19937", keys, position, 1, waiting))

    def restore() -> None:
        # A number waiting now must not be used later.
        np.random.seed(0)
        ctypes.memmove(generator.ctypes.state_address, before, STATE_BYTES)

    return restore


def _numbers_in(memory: bytes) -> tuple[NDArray[np.uint32], int]:
    """Return (the numbers, the position) of a generator."""
    numbers = np.frombuffer(memory, np.uint32)
    return numbers[:-1], int(numbers[-1])


@cache
def _has_known_memory() -> bool:
    """Return True if the memory of a generator begins with what its state has."""
    generator = np.random.MT19937(5)
    generator.random_raw(7)
    memory = ctypes.string_at(generator.ctypes.state_address, STATE_BYTES)
    keys, position = _numbers_in(memory)
    state = generator.state["state"]
    return position == state["pos"] and np.array_equal(keys, state["key"])
