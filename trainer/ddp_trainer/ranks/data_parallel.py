"""A model on every rank: DistributedDataParallel, or its counterpart in a single process.

Both have the same methods, and both save and load the state dict of the model itself. So a script
works the same at every world size, and the keys of its checkpoints do not depend on it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddp_trainer.ranks.module_names import OwnStateDict

T = TypeVar("T")

# DDP's option for the synchronisation of buffers before each forward pass, and its name before
# torch 2.13.
SYNC_BUFFERS = "forward_sync_buffers"
FORMER_SYNC_BUFFERS = "broadcast_buffers"

# Buffers of BatchNorm. They are read in evaluations, but not in training.
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

# Makes a scalar of a model's output.
Loss = Callable[[Any], Tensor]


class DistributedModel(OwnStateDict, DistributedDataParallel):
    """DistributedDataParallel with the state dict of the model."""


class SingleModel(OwnStateDict):
    """The counterpart of DistributedDataParallel in a single process. It only calls the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients. A single process always does."""
        yield


def ddp_settings(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Return the settings of DistributedDataParallel for a model: those given, and our defaults.

    The synchronisation of buffers may be given under both of torch's names for it.
    """
    chosen = {"gradient_as_bucket_view": True, **settings}
    if not chosen.keys() & {SYNC_BUFFERS, FORMER_SYNC_BUFFERS} and not has_own_buffers(model):
        chosen[SYNC_BUFFERS] = False
    if SYNC_BUFFERS in chosen and SYNC_BUFFERS not in options_of_ddp():
        chosen[FORMER_SYNC_BUFFERS] = chosen.pop(SYNC_BUFFERS)
    return chosen


def options_of_ddp() -> Mapping[str, Any]:
    """Return the options of DDP in this release of torch, by name."""
    return inspect.signature(DistributedDataParallel.__init__).parameters


def has_own_buffers(model: nn.Module) -> bool:
    """Return True if a model has buffers other than the running statistics of torch's BatchNorm.

    Training may read such a buffer, for example a codebook or the range of an observer.
    """
    return any(
        name not in RUNNING_STATISTICS or not _is_known_batch_norm(module)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
    )


def _is_known_batch_norm(module: nn.Module) -> bool:
    # A subclass of the user may read the statistics in training, as batch renormalisation does.
    package = type(module).__module__.partition(".")[0]
    return isinstance(module, _BatchNorm) and package in ("torch", "ddp_trainer")


def accumulate(model: nn.Module, parts: Sequence[T]) -> Iterator[T]:
    """Yield the parts of a batch. Gradients are added up over the parts.

    The ranks exchange gradients only in the backward pass of the last part, so a batch costs one
    exchange. `model` is the result of `Runtime.wrap`, DistributedDataParallel, or a module of FSDP2
    (`fully_shard`). Run the forward and the backward pass of each part before the next one. With
    FSDP2 all ranks need the same number of parts, as `Shard.slices` has them.

    Raises ValueError if there is no part: a rank without samples takes part in the exchange too.
    """
    if not parts:
        raise ValueError("accumulate: expected at least one part of a batch, got none")
    for number, part in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else _without_exchange(model):
            yield part


@contextmanager
def _without_exchange(model: nn.Module) -> Iterator[None]:
    # FSDP2 has a switch instead of a context manager.
    switch = getattr(model, "set_requires_gradient_sync", None)
    if switch is None:
        with model.no_sync():  # type: ignore[operator]
            yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)


def rehearse(
    model: nn.Module, inputs: Sequence[Any], named_inputs: Mapping[str, Any], loss: Loss | None
) -> None:
    """Run forward and backward passes until DDP's buckets are final, and keep only these.

    The gradients are discarded, and the buffers, such as BatchNorm's statistics, are restored. See
    `Runtime.warm_up`.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # The second pass uses the buckets in their new order. With a static graph, DDP learns the order
    # in the second one only (seen with torch 2.13). A forward pass without its backward pass would
    # let DDP exchange gradients in the next one, also under no_sync.
    for _ in range(3 if getattr(model, "static_graph", False) else 2):
        output = model(*inputs, **named_inputs)
        torch.autograd.backward(_outputs_with_gradient(output) if loss is None else [loss(output)])
        # Views of the old buckets would keep these in memory.
        model.zero_grad()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _outputs_with_gradient(output: Any) -> list[Tensor]:
    """Return the sum of each tensor with a gradient in a model's output.

    The output is a tensor, or tuples, lists and dicts of tensors.
    """
    leaves = tree_leaves(output)
    sums = [leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sums:
        raise ValueError(
            f"the model's output has no tensor with a gradient, but is {type(output).__name__}; "
            "pass loss=, a function that makes a scalar of the output"
        )
    return sums
