"""Evaluation on all ranks: any function of sums, with each sample counted once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.run.progress import Progress

Batch = TypeVar("Batch")

# Sums over the samples of a batch, by name.
Sums = Mapping[str, Tensor | float]

# The label left out by F.cross_entropy.
IGNORED = -100


def without_repeats(labels: Tensor, shard: Shard) -> Tensor:
    """Return the labels of a shard, shape (k, …), with IGNORED in the place of repeats."""
    repeats = torch.from_numpy(~shard.real).to(labels.device)
    return labels.masked_fill(repeats.view(-1, *[1] * (labels.dim() - 1)), IGNORED)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    sums_of: Callable[[Batch], Sums],
    *,
    runtime: Runtime | None = None,
    progress: Progress | None = None,
    vote: StopVote | None = None,
) -> dict[str, float]:
    """Return the totals of the sums over all batches of all ranks. Every rank calls it.

    - `model`: the bare model, without its DDP wrapper. Its buffers are those of rank 0.
    - `batches`: this rank's own, such as the shards of `evaluation_shards`. With `vote`, all ranks
      must have equally many.
    - `sums_of`: makes the sums of a batch, such as the sum of the losses and the number of tokens.
      It runs without gradients and with the model in evaluation mode. It may return nothing for an
      empty batch.
    - `runtime`, or `progress`. One of them is required. The heartbeat of `progress` goes on.
    - `vote`: lets the ranks stop in the middle. The result is then empty, and `vote.agreed` is set:
      a test set may take longer than a node's grace period.

    Only sums are exchanged, in float64 where the device has it. So a function of sums, such as a
    mean, does not depend on the number of ranks.
    """
    runtime = _runtime_of(runtime or progress)
    hardware = runtime.hardware
    runtime.broadcast_buffers(model)
    zero = torch.zeros((), dtype=hardware.sums, device=runtime.device)
    # On XLA, run the broadcast now. Otherwise the first batch would have a different graph.
    hardware.end_step()
    if vote:
        vote.vote_at_next_step()
    totals: dict[str, Tensor] = {}
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            for name, value in sums_of(batch).items():
                term = torch.as_tensor(value, dtype=zero.dtype, device=zero.device)
                totals[name] = totals.get(name, zero) + term
            hardware.end_step()
            if progress:
                progress.beat()
            if vote and vote.at_step_boundary():
                return {}
    if vote:
        vote.vote_at_next_step()
    # A rank without samples may not know the names.
    names = sorted({name for own in runtime.gather(list(totals)) for name in own})
    if not names:
        return {}
    sums = runtime.sum(torch.stack([totals.get(name, zero) for name in names]))
    return dict(zip(names, sums.tolist(), strict=True))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation inside the block.

    Afterwards each module has its own mode again. For example, a BatchNorm may be frozen.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def evaluation_shards(
    samples: int,
    batch_size: int,
    runtime: Runtime | Progress | None = None,
    *,
    progress: Progress | None = None,
) -> GlobalBatchSampler:
    """Return the shards of one pass over `samples`, in their order. `batch_size` is global.

    `runtime`, or a `progress` with it, is required.
    """
    runtime = _runtime_of(runtime or progress)
    return GlobalBatchSampler(
        samples,
        batch_size,
        runtime.rank,
        runtime.world_size,
        shuffle=False,
        equal_shares=runtime.hardware.wants_equal_shapes,
    )


def _runtime_of(given: Runtime | Progress | None) -> Runtime:
    if given is None:
        raise TypeError("runtime=… or progress=… is required")
    return given.runtime if isinstance(given, Progress) else given


def classification_sums(logits: Tensor, labels: Tensor) -> Sums:
    """Return the sums of a classifier's losses and correct answers, and the number of samples.

    `logits` has shape (k, classes) and `labels` (k,). IGNORED labels do not count.
    """
    return {
        "loss": F.cross_entropy(logits, labels, reduction="sum"),
        "correct": (logits.argmax(1) == labels).sum(),
        "samples": (labels != IGNORED).sum(),
    }
