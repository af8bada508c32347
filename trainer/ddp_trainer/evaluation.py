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
from ddp_trainer.sampler import GlobalBatchSampler

Fetch = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]


def evaluate(
    model: nn.Module, fetch: Fetch, samples: int, batch_size: int, *, step: int, progress: Progress, vote: StopVote
) -> dict[str, Any]:
    """Mean loss and accuracy of the bare `model` over `samples` test samples. Every rank calls it.

    `fetch` turns indices of shape (k,) into inputs and labels on the model's device; `batch_size` is the global one.
    The shares are uneven and never padded, and only sums cross the ranks. Returns {"accuracy", "loss", "samples"}, or
    an empty dict when the ranks agreed in the middle to stop: a test set may take longer than a node's grace.
    """
    runtime = progress.runtime
    runtime.broadcast_buffers(model)
    runtime.hardware.end_step()  # not together with the first batch, which may be of another size on each rank
    sampler = GlobalBatchSampler(samples, batch_size, runtime.rank, runtime.world_size, shuffle=False)
    sums = torch.zeros(3, dtype=runtime.hardware.sums, device=runtime.device)  # loss, correct, counted
    model.eval()
    with torch.no_grad():
        for shard in sampler:
            if len(shard.indices):
                inputs, labels = fetch(shard.indices)
                logits = model(inputs)
                loss = F.cross_entropy(logits, labels, reduction="sum").to(sums.dtype)
                correct = (logits.argmax(1) == labels).to(sums.dtype).sum()
                sums += torch.stack([loss, correct, torch.full_like(loss, len(labels))])
            runtime.hardware.end_step()
            progress.beat(step)
            if vote.at_step_boundary():
                return {}
    loss_sum, correct_sum, counted = runtime.sum(sums).tolist()
    assert counted == samples
    return {"accuracy": correct_sum / counted, "loss": loss_sum / counted, "samples": samples}
