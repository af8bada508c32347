"""Two ways to train one model on several ranks: DistributedDataParallel, and the plain way that it is measured against."""

from typing import Protocol

import torch
from torch import Tensor, nn

from ddp_trainer.runtime import Runtime


class Arm(Protocol):
    """`module` is what forward is called on; `synchronise` follows every backward pass."""

    module: nn.Module

    def synchronise(self) -> None:
        """Make the gradients of all ranks their mean, where the backward pass has not done so."""


class Ddp:
    """DDP: gradients are averaged bucket by bucket while the backward pass still runs."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.module = runtime.wrap(model)

    def synchronise(self) -> None:
        """See Arm."""


class Native:
    """Backward first; then all gradients in one flat tensor, averaged by one all-reduce."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.module, self._runtime = model, runtime

    def synchronise(self) -> None:
        """See Arm."""
        if self._runtime.world_size == 1:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._runtime.sum(flat).div_(self._runtime.world_size)
        _spread(flat, gradients)


def _spread(flat: Tensor, gradients: list[Tensor]) -> None:
    """Copy the parts of `flat` into the gradients that it was made of."""
    parts = torch.split_with_sizes(flat, [gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
    )


ARMS: dict[str, type[Ddp] | type[Native]] = {"ddp": Ddp, "native": Native}
