"""BatchNorm on several ranks: on shards without samples, and over the global batch.

Plain BatchNorm under DDP normalises each rank's part of a batch by itself, as a loop over the parts would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import Shard


class SynchronisedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d whose statistics in training are those of all ranks' samples together, on any device.

    (torch.nn.SyncBatchNorm refuses tensors on the CPU.)

    Each rank's count, mean and sum of squared deviations are combined by the formula of Chan, Golub and LeVeque
    (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979), which subtracts no large numbers
    from each other. A rank may have no samples at all. Costs one all-reduce forward and one backward.
    """

    runtime: Runtime

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` of shape (N, C, …), N from 0 on. Every rank calls it."""
        if not self.training:
            return super().forward(input)
        at_least_float32 = torch.promote_types(
            input.dtype, torch.float32
        )  # as BatchNorm's own statistics
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input.to(at_least_float32)).to(input.dtype)

    def _normalise(self, input: Tensor) -> Tensor:
        mean, deviation2, count = self._statistics(input)
        variance = deviation2 / count
        if self.track_running_stats:
            self._remember(mean.detach(), (deviation2 / (count - 1)).detach())
        scale = torch.rsqrt(variance + self.eps)
        shift = -mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        shape = (1, -1) + (1,) * (input.dim() - 2)
        return input * scale.view(shape) + shift.view(shape)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and sum of squared deviations a channel, shape (C,), and the number of values in each channel."""
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        channels, values = input.shape[1], input.numel() // input.shape[1]
        if values:
            variance, mean = torch.var_mean(input, others, correction=0)
        else:  # zeros that still depend on the input: the backward pass, too, has to meet the other ranks
            variance = mean = input.sum(others)
        mine = torch.cat([mean, variance * values, mean.new_tensor([values])])
        rank, world_size = self.runtime.rank, self.runtime.world_size
        # Row r is what rank r has. Which row is ours is a tensor, so that on XLA all ranks record the same graph.
        rows = input.new_zeros(world_size, len(mine)).index_put(
            (torch.tensor([rank], device=input.device),), mine
        )
        rows = _SumOverRanks.apply(rows, self.runtime)  # type: ignore[no-untyped-call]
        means, deviations2, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:].detach()
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        return mean, (deviations2 + counts * (means - mean) ** 2).sum(0), total

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions from 2 on will do."""


class _SumOverRanks(torch.autograd.Function):
    """All-reduce that gradients pass through: every rank's result depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, runtime: Runtime) -> Tensor:
        ctx.runtime = runtime
        return runtime.sum(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.runtime.sum(gradient.clone()), None


def synchronise(model: nn.Module, runtime: Runtime) -> None:
    """Make every BatchNorm of `model` a synchronised one, in place; parameters and buffers stay the same objects."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SynchronisedBatchNorm
            module.runtime = runtime  # type: ignore[assignment]


@contextmanager
def batch_norm_at_rest(model: nn.Module, shard: Shard) -> Iterator[None]:
    """Let a model with BatchNorm run forward and backward on a shard without samples.

    A rank that got nothing of a batch still runs the model, on an empty tensor, to take part in the all-reduce with
    gradients of zero. Training on nothing would turn BatchNorm's running statistics into NaN, so it normalises by
    them instead. (A shard of one sample cannot be normalised at all: the sampler's `at_least=2` gives none.)
    """
    resting = []
    if len(shard.indices) == 0:
        resting = [module for module in model.modules() if _is_local(module)]
    for norm in resting:
        norm.eval()
    yield
    for norm in resting:
        norm.train()


def _is_local(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SynchronisedBatchNorm)
