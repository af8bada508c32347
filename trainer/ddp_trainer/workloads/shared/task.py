"""An image classification task: what a workload hands to `train_classifier`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_trainer.data.sampler import Shard
from ddp_trainer.workloads.shared.schedule import warm_up_then_cosine


@dataclass(frozen=True)
class Task:
    """The data, model, optimizer and settings of a workload."""

    name: str
    samples: int
    test_samples: int
    image_shape: tuple[int, ...]
    # Returns a shard's augmented inputs (k, C, H, W) and labels (k,) on the model's device.
    fetch: Callable[[Shard], tuple[Tensor, Tensor]]
    # Returns the unchanged test inputs and labels of indices (k,) on the model's device.
    fetch_test: Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    # The peak rate. `schedule` maps the progress, from 0 to 1, to a factor on it.
    learning_rate: float
    schedule: Callable[[float], float] = warm_up_then_cosine
    # The peak rate is meant for so many samples per step over all ranks. With another number, the
    # rate changes in proportion. None: the peak rate is the same for every number.
    rate_batch_size: int | None = None
    # How gradients are averaged: a key of `gradient_arms.ARMS`.
    arm: str = "ddp"
    bf16: bool = False
    # Write the weights of the best epoch instead of the last.
    keep_best: bool = False
    # Settings that must equal the checkpoint's, in addition to the name.
    identity: Mapping[str, str | int] = field(default_factory=dict)


def in_layout(task: Task, layout: torch.memory_format) -> Task:
    """Return `task` with its model and all its batches in the memory `layout`."""
    task.model.to(memory_format=layout)  # type: ignore[call-overload]

    def fetch(shard: Shard) -> tuple[Tensor, Tensor]:
        inputs, labels = task.fetch(shard)
        return inputs.to(memory_format=layout), labels

    def fetch_test(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        inputs, labels = task.fetch_test(indices)
        return inputs.to(memory_format=layout), labels

    return replace(task, fetch=fetch, fetch_test=fetch_test)
