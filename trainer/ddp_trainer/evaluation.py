"""Accuracy and loss over a whole test set, every image counted exactly once at any number of ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_trainer.interrupt import StopVote
from ddp_trainer.progress import Progress
from ddp_trainer.sampler import GlobalBatchSampler, Shard

IGNORED = -100  # a label that F.cross_entropy leaves out
Fetch = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]


def without_repeats(labels: Tensor, shard: Shard) -> Tensor:
    """Those labels of a shard, shape (k,), that count; IGNORED in the place of the others."""
    return labels.masked_fill(torch.from_numpy(~shard.real).to(labels.device), IGNORED)


def evaluate(
    model: nn.Module,
    fetch: Fetch,
    samples: int,
    batch_size: int,
    *,
    step: int,
    progress: Progress,
    vote: StopVote,
) -> dict[str, Any]:
    """Mean loss and accuracy of the bare `model` over `samples` test samples. Every rank calls it.

    `fetch` turns indices of shape (k,) into inputs and labels on the model's device; `batch_size` is the global one.
    Only sums cross the ranks. Returns {"accuracy", "loss", "samples"}, or an empty dict when the ranks agreed in the middle
    to stop: a test set may take longer than a node's grace.
    """
    runtime = progress.runtime
    runtime.broadcast_buffers(model)
    runtime.hardware.end_step()  # not together with the first batch, which would be another graph than the others
    sampler = GlobalBatchSampler(
        samples,
        batch_size,
        runtime.rank,
        runtime.world_size,
        shuffle=False,
        equal_shares=runtime.hardware.wants_equal_shapes,
    )
    sums = torch.zeros(
        3, dtype=runtime.hardware.sums, device=runtime.device
    )  # loss, correct, counted
    model.eval()
    vote.soon()
    with torch.no_grad():
        for shard in sampler:
            if len(shard.indices):
                inputs, labels = fetch(shard.indices)
                labels = without_repeats(labels, shard)
                logits = model(inputs)
                loss = F.cross_entropy(logits, labels, reduction="sum").to(sums.dtype)
                correct = (logits.argmax(1) == labels).to(sums.dtype).sum()
                counted = (labels != IGNORED).to(sums.dtype).sum()
                sums += torch.stack([loss, correct, counted])
            runtime.hardware.end_step()
            progress.beat(step)
            if vote.at_step_boundary():
                return {}
    vote.soon()
    loss_sum, correct_sum, number = runtime.sum(sums).tolist()
    assert number == samples
    return {"accuracy": correct_sum / number, "loss": loss_sum / number, "samples": samples}
