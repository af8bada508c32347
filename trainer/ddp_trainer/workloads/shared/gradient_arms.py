"""Two ways to average gradients over the ranks: DistributedDataParallel, and a plain all-reduce.

The plain way is the baseline for DDP.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from ddp_trainer.ranks.runtime import Runtime


class Arm(Protocol):
    """A way to train one model on several ranks.

    The training calls `module` in the forward pass, and `synchronise` after each backward pass.
    """

    module: nn.Module

    def synchronise(self) -> None:
        """Average the gradients over the ranks, unless the backward pass already did."""


class Ddp:
    """DDP: gradients are averaged bucket by bucket while the backward pass still runs."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.module: nn.Module = runtime.wrap(model)

    def synchronise(self) -> None:
        pass


class Native:
    """No DDP: after the backward pass one all-reduce averages all gradients as one flat tensor."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.module = model
        self._runtime = runtime

    def synchronise(self) -> None:
        if self._runtime.world_size == 1:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._runtime.sum(flat).div_(self._runtime.world_size)
        _spread(flat, gradients)


def _spread(flat: Tensor, gradients: list[Tensor]) -> None:
    """Copy the parts of `flat` back into `gradients`, in the same order."""
    sizes = [gradient.numel() for gradient in gradients]
    parts = torch.split_with_sizes(flat, sizes)
    shaped = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    # One call for all gradients is faster than one copy for each.
    torch._foreach_copy_(gradients, shaped)


ARMS: dict[str, type[Ddp] | type[Native]] = {"ddp": Ddp, "native": Native}
