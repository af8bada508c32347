"""Checks of the parts saved by rank 0 for all ranks: they must be equal, unless they are sharded.

A checkpoint in one file has the state of rank 0. If another rank has another state, such as its own
stage of a pipeline, this state would be lost without a message. So the parameters of modules and
the state of optimizers are compared. Buffers are not: those of rank 0 are the model's.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime

if TYPE_CHECKING:
    from ddp_trainer.checkpoint.shards import ShardedState

# Checkpoints from one comparison to the next. A comparison reads all parameters once, and takes
# about as long as the copy for a checkpoint. If ranks differ from the start of the run on, the
# first comparison finds it.
COMPARE_EVERY = 50

# A tensor's bytes are read as integers of 8 bytes, in rows of so many. The sums of the columns are
# compared, and the rest of the tensor. The length is a prime number, so swapped rows of the tensor
# change the sums.
COLUMNS = 1021
INTEGER = 8


def sharded_state(parts: Mapping[str, Any], runtime: Runtime) -> "ShardedState | None":
    """Return the sharded parts, or None if there are none."""
    # A model of FSDP2 has parameters of a class in this module. Its import takes a while.
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from ddp_trainer.checkpoint.shards import ShardedState

    return ShardedState(parts, runtime) or None


def require_supported(parts: Mapping[str, Any]) -> None:
    """Raise UserError if a part is sharded by FSDP1: its checkpoints are not supported."""
    # A model of FSDP1 has a class in this module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, part in parts.items():
        modules = part.modules() if isinstance(part, nn.Module) else ()
        if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
            raise UserError(
                f"{name} is sharded by FullyShardedDataParallel (FSDP1), whose checkpoints are "
                "not supported; shard it by torch.distributed.fsdp.fully_shard (FSDP2)",
                is_common=True,
            )


def consolidate(parts: Mapping[str, Any]) -> None:
    """Bring the state of each ZeroRedundancyOptimizer to rank 0. Every rank calls it.

    Its state is spread over the ranks. At a load, each rank gets the whole state and keeps its own
    part.
    """
    for part in parts.values():
        if _is_spread(part):
            part.consolidate_state_dict(to=0)


def _is_spread(part: Any) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(part, module.ZeroRedundancyOptimizer)


def require_equal(parts: Mapping[str, Any], runtime: Runtime) -> None:
    """Raise UserError on every rank if a part differs between the ranks. Every rank calls it."""
    if runtime.world_size == 1:
        return
    own = {name: _digest(part) for name, part in parts.items() if not _is_spread(part)}
    found = runtime.gather(own)
    for name in own:
        ranks = [rank for rank, other in enumerate(found) if other.get(name) != found[0][name]]
        if ranks:
            raise UserError(
                f"the state of {name} on rank {ranks[0]} differs from that on rank 0, and only "
                "that of rank 0 would be saved; use PerRank if each rank has a state of its own, "
                "wrap the model if all ranks train the same one, or pass compare_ranks=False if "
                "the ranks are meant to differ for a while",
                is_common=True,
            )


def _digest(part: Any) -> str:
    """Return a digest of the names, the types and the bits of a part's tensors."""
    digest = hashlib.sha256()
    for name, tensor in _compared(part):
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(_fingerprint(tensor))
    return digest.hexdigest()


def _compared(part: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors to compare in a part: all ranks must have the same ones."""
    tensors: Iterator[tuple[str, Any]] = iter(())
    if isinstance(part, nn.Module):
        tensors = part.named_parameters()
    elif isinstance(part, Optimizer):
        tensors = _optimizer_state(part)
    for name, tensor in tensors:
        # Those of other kinds cannot be saved, or are not there yet.
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
            yield name, tensor


def _optimizer_state(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for name, value in sorted(state.items(), key=lambda item: str(item[0])):
            yield f"{index}.{name}", value


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> bytes:
    """Return numbers that depend on the bits of all elements of a tensor, and on their order.

    A tensor of a few KiB is returned as it is. Of a larger one, sums are made on its device, so
    little has to be copied. They overflow, but this does not matter.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.device.type not in ("cpu", "cuda"):
        # Other devices may not read a number as another type.
        tensor = tensor.cpu()
    data = tensor.resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % INTEGER:
        data = data.clone()
    whole = len(data) - len(data) % (COLUMNS * INTEGER)
    sums = data[:whole].view(torch.int64).view(-1, COLUMNS).sum(0)
    return sums.cpu().numpy().tobytes() + data[whole:].cpu().numpy().tobytes()
