"""BatchNorm with several ranks: over the global batch, and on shards without samples.

Under DDP, plain BatchNorm normalises each rank's part of a batch separately.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_trainer.data.sampler import Shard
from ddp_trainer.ranks.runtime import Runtime


@dataclass(frozen=True)
class Ranks:
    """The ranks of a BatchNorm: it sees the samples of all of them.

    A copy of the model in this process has the same ranks. A process group cannot be written to a
    file, so a model read from one has this process alone until `synchronise` is called.
    """

    runtime: Runtime = field(default_factory=Runtime)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self

    def __reduce__(self) -> tuple[type["Ranks"], tuple[()]]:
        return Ranks, ()


class SynchronisedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d with the statistics of all ranks' samples, on any device.

    torch.nn.SyncBatchNorm refuses tensors on the CPU.

    The counts, means and sums of squared deviations of the ranks are combined by the formula of
    Chan, Golub and LeVeque (Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979). It does not subtract large numbers. A rank may have no samples. The cost is
    one all-reduce in the forward pass and one in the backward pass.
    """

    ranks: Ranks

    @property
    def runtime(self) -> Runtime:
        """Return this process and its peers."""
        return self.ranks.runtime

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` of shape (N, C, …), with N from 0 on. Every rank calls it.

        Raises ValueError on every rank if each channel has fewer than two values. With several
        ranks on an accelerator this is not checked, because every step would wait for the device.
        """
        if not self.training:
            return super().forward(input)
        # BatchNorm's own statistics have at least float32 too.
        dtype = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input.to(dtype)).to(input.dtype)

    def _normalise(self, input: Tensor) -> Tensor:
        mean, squares, count = self._statistics(input)
        if input.device.type == "cpu" or self.runtime.world_size == 1:
            _require_two_values(int(count), input)
        if self.track_running_stats:
            self._update_running(mean.detach(), (squares / (count - 1)).detach())
        scale = torch.rsqrt(squares / count + self.eps)
        shift = -mean * scale
        if self.affine:
            scale = scale * self.weight
            shift = shift * self.weight + self.bias
        shape = (1, -1) + (1,) * (input.dim() - 2)
        return input * scale.view(shape) + shift.view(shape)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean, sum of squared deviations, count) over all ranks.

        The first two have shape (C,). The count is the number of values in each channel.
        """
        rows = _SumOverRanks.apply(  # type: ignore[no-untyped-call]
            self._place_in_rows(self._local_statistics(input)), self.runtime
        )
        channels = input.shape[1]
        means = rows[:, :channels]
        squares = rows[:, channels:-1]
        counts = rows[:, -1:].detach()
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        return mean, (squares + counts * (means - mean) ** 2).sum(0), total

    def _local_statistics(self, input: Tensor) -> Tensor:
        """Return this rank's means, sums of squared deviations and count, shape (2 C + 1,)."""
        values = input.numel() // input.shape[1]
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        if values:
            variance, mean = torch.var_mean(input, others, correction=0)
        else:
            # These zeros depend on the input, so this rank joins the backward all-reduce.
            mean = input.sum(others)
            variance = mean
        return torch.cat([mean, variance * values, mean.new_tensor([values])])

    def _place_in_rows(self, local: Tensor) -> Tensor:
        """Return zeros of shape (world size, len(local)) with `local` in this rank's row.

        The rank is a tensor, so all ranks record the same graph on XLA.
        """
        rank = torch.tensor([self.runtime.rank], device=local.device)
        rows = local.new_zeros(self.runtime.world_size, len(local))
        return rows.index_put((rank,), local)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions from 2 on."""


def _require_two_values(count: int, input: Tensor) -> None:
    if count < 2:
        raise ValueError(
            "expected more than 1 value per channel over all ranks when training, got input of "
            f"shape {tuple(input.shape)} on this rank; use larger batches, or drop the last one"
        )


class _SumOverRanks(torch.autograd.Function):
    """All-reduce with gradients: each rank's result depends on each rank's input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, runtime: Runtime) -> Tensor:
        ctx.runtime = runtime
        return runtime.sum(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.runtime.sum(gradient.clone()), None


def synchronise(model: nn.Module, runtime: Runtime) -> None:
    """Make every BatchNorm of `model` a SynchronisedBatchNorm, in place.

    Parameters and buffers stay the same objects. The model can be copied and pickled, as for an
    average of its weights (`torch.optim.swa_utils.AveragedModel`).
    """
    ranks = Ranks(runtime)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SynchronisedBatchNorm
            module.ranks = ranks  # type: ignore[assignment]


@contextmanager
def batch_norm_for_empty_shard(model: nn.Module, shard: Shard) -> Iterator[None]:
    """Let a model with BatchNorm run forward and backward on a shard without samples.

    A rank without samples runs the model on an empty tensor, so it joins the all-reduce with
    gradients of zero. Training on no samples would turn BatchNorm's running statistics into NaN, so
    inside this block BatchNorm normalises by them instead. A shard of one sample cannot be
    normalised at all: `at_least=2` of the sampler avoids it.
    """
    local: list[nn.Module] = []
    if len(shard.indices) == 0:
        local = [module for module in model.modules() if _is_local(module) and module.training]
    for norm in local:
        norm.eval()
    try:
        yield
    finally:
        for norm in local:
            norm.train()


def _is_local(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SynchronisedBatchNorm)
