"""Samples for the tests of several ranks, and the difference of two models."""

import numpy as np
import torch

FEATURES = 6

Tensors = torch.Tensor | dict[str, torch.Tensor]


def samples(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of shape (count, FEATURES) and labels of shape (count,), the same each time."""
    inputs = np.random.default_rng(3).standard_normal((count, FEATURES), np.float32)
    return torch.from_numpy(inputs).to(dtype), torch.arange(count) % 10


def difference(found: Tensors, expected: Tensors) -> float:
    """Return the norm of the difference, relative to the norm of `expected`.

    If `expected` is the state of a model, only its tensors are compared.
    """
    if isinstance(expected, dict):
        found = joined([found[name] for name in expected])
        expected = joined(list(expected.values()))
    return float((found - expected).norm() / expected.norm())


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])
