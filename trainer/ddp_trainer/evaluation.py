"""Accuracy and loss over a test set. Each sample counts exactly once at any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_trainer.interrupt import StopVote
from ddp_trainer.progress import Progress
from ddp_trainer.sampler import GlobalBatchSampler, Shard

# A label that F.cross_entropy leaves out.
IGNORED = -100

# Turns indices of shape (k,) into inputs and labels on the model's device.
Fetch = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]


def without_repeats(labels: Tensor, shard: Shard) -> Tensor:
    """Return the labels of a shard, shape (k,), with IGNORED in the place of repeats."""
    return labels.masked_fill(torch.from_numpy(~shard.real).to(labels.device), IGNORED)


@dataclass(frozen=True)
class EvaluationSet:
    """Samples to evaluate on. `batch_size` is the size of a global batch."""

    fetch: Fetch
    samples: int
    batch_size: int


def evaluate(
    model: nn.Module, data: EvaluationSet, *, step: int, progress: Progress, vote: StopVote
) -> dict[str, Any]:
    """Return accuracy and mean loss of `model` over `data`. Every rank calls it.

    `model` is the bare model, without its DDP wrapper. Only sums are exchanged between the ranks.

    Returns {"accuracy", "loss", "samples"}. If the ranks agree to stop in the middle, it returns an
    empty dict: a test set may take longer than a node's grace period.
    """
    runtime = progress.runtime
    hardware = runtime.hardware
    runtime.broadcast_buffers(model)
    # On XLA, run the broadcast now. Otherwise the first batch would have a different graph.
    hardware.end_step()
    sampler = GlobalBatchSampler(
        data.samples,
        data.batch_size,
        runtime.rank,
        runtime.world_size,
        shuffle=False,
        equal_shares=hardware.wants_equal_shapes,
    )
    # Sums of the loss, of correct samples, and of counted samples.
    sums = torch.zeros(3, dtype=hardware.sums, device=runtime.device)
    model.eval()
    vote.soon()
    with torch.no_grad():
        for shard in sampler:
            if len(shard.indices):
                sums += _sums_of(model, data.fetch, shard, sums.dtype)
            hardware.end_step()
            progress.beat(step)
            if vote.at_step_boundary():
                return {}
    vote.soon()
    loss_sum, correct_sum, counted = runtime.sum(sums).tolist()
    assert counted == data.samples
    return {"accuracy": correct_sum / counted, "loss": loss_sum / counted, "samples": data.samples}


def _sums_of(model: nn.Module, fetch: Fetch, shard: Shard, dtype: torch.dtype) -> Tensor:
    """Return the sums of loss, correct and counted samples of a shard, shape (3,)."""
    inputs, labels = fetch(shard.indices)
    labels = without_repeats(labels, shard)
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(1) == labels).to(dtype).sum()
    counted = (labels != IGNORED).to(dtype).sum()
    return torch.stack([loss.to(dtype), correct, counted])
