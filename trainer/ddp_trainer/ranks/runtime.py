"""A process and its peers: rank, device, and the collectives for the other modules.

The same calls work for a single process, under `torchrun --standalone`, and in a container. A
single process has no process group, and every collective returns its argument.
"""

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

# This module must be imported before there is a process group. Its functions have the group at the
# time of the import as a default argument. If DDP imports it later, these references keep the group
# alive: `destroy_process_group` destroys nothing, gloo's threads continue, and sometimes one of
# them aborts a finished process (exit code -6).
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.data_parallel import (
    DistributedModel,
    Loss,
    SingleModel,
    ddp_settings,
    rehearse,
)
from ddp_trainer.ranks.hardware import Hardware
from ddp_trainer.ranks.stragglers import StragglerDetector

T = TypeVar("T")

# Bytes of a SHA-256 in an int64 without its sign.
DIGEST_BYTES = 7


@dataclass(frozen=True)
class Runtime:
    """One process of a training job.

    - `cpu_group`: the process group for tensors on the CPU; None for the default group.
    - `store`: the rendezvous store, with a prefix of its own; None for a process alone.
    - `timeout`: seconds that a rank waits for its peers.
    - `seconds`: the time spent on the start: import and rendezvous.
    - `at_leave`: called before the process leaves the group, with True after an exception. Peers
      may then be gone.
    - `is_writing`: each function returns True while a checkpoint is being written. Meanwhile the
      process is not ended after a signal.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hardware: Hardware = field(default_factory=Hardware)
    backend: str = "none"
    cpu_group: dist.ProcessGroup | None = None
    stragglers: StragglerDetector | None = None
    store: Store | None = None
    timeout: float = 1800.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    at_leave: list[Callable[[bool], None]] = field(default_factory=list, compare=False)
    is_writing: list[Callable[[], bool]] = field(default_factory=list, compare=False)

    @property
    def is_main(self) -> bool:
        """Return True on global rank 0. It writes checkpoints, progress and the result."""
        return self.rank == 0

    def warn(self, message: str) -> None:
        """Print a message to stderr on global rank 0."""
        if self.is_main:
            print(f"ddp-trainer: {message}", file=sys.stderr, flush=True)

    # Training

    def seed_rank(self, seed: int) -> None:
        """Seed the random number generators of this rank differently from those of the others.

        `process_group` seeds all ranks equally, so they make the same model. Call this afterwards
        if the model has dropout: with equal generators, the ranks would drop the same units for
        different samples.
        """
        numbers = np.random.SeedSequence([seed, self.rank])
        self.hardware.seed(int(numbers.generate_state(1)[0]))

    def wrap(self, model: nn.Module, **settings: Any) -> DistributedModel | SingleModel:
        """Return `model` in DistributedDataParallel, or in its counterpart in a single process.

        Both have `module`, `no_sync` and the state dict of the model itself. `settings` are DDP's
        own and override the defaults. Gradients are views of DDP's buckets, and are not copied
        there (`gradient_as_bucket_view`). This saves their memory once.

        **The buffers of rank 0 are the model's.** They are saved, and `broadcast_buffers` copies
        them to the other ranks before an evaluation. By default DDP also copies them before every
        forward pass, so all ranks train with the same ones. If BatchNorm's running statistics are
        the only buffers, this is off, because training does not read them. No buffer is ever sent
        to rank 0, so evaluations and checkpoints do not change the training, and a resumed run
        equals an uninterrupted one. As with DDP's default, running statistics see only rank 0's
        part of each batch.

        If training changes other buffers of the model, and you pass `forward_sync_buffers=False`
        (before torch 2.13 `broadcast_buffers=False`), each rank has its own. A checkpoint has those
        of rank 0 only, so a resumed run differs.
        """
        if self.world_size == 1:
            return SingleModel(model)
        # For 1x1 convolutions and those with one input channel, the strides of the gradients are
        # written differently, but the order of the numbers is the same.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        ddp = DistributedModel(model, **ddp_settings(model, **settings))
        self.watch(ddp)
        return ddp

    def watch(self, model: nn.Module) -> None:
        """Note the passes of a model in training, to name the slow rank after a timeout.

        `wrap` does this too. Call it for a model without `wrap`, such as one of FSDP2.
        """
        stragglers = self.stragglers
        if stragglers:
            # An evaluation of the same model is no step. It has no gradients.
            model.register_forward_pre_hook(
                lambda *_: stragglers.forward() if torch.is_grad_enabled() else None
            )
            model.register_forward_hook(
                lambda *_: stragglers.backward() if torch.is_grad_enabled() else None
            )

    def step(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool = True) -> None:
        """Take the optimizer's step and clear the gradients. On XLA, run the recorded step."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        self.hardware.end_step()

    def warm_up(
        self, model: nn.Module, *inputs: Any, loss: Loss | None = None, **named_inputs: Any
    ) -> None:
        """Run forward and backward passes on an example, and keep only the order of DDP's buckets.

        `inputs` and `named_inputs` are those of the model: a batch of at least two samples. `loss`
        makes a scalar of the model's output; by default, all tensors in it are summed. Give the
        loss of the training if it does not use all parameters, or if the graph is static. Every
        rank calls it.

        DDP first puts the gradients into buckets in the order of the parameters. After the first
        backward pass it puts them in the order of their completion. The order of summation in an
        all-reduce depends on the position in a bucket. So the first step of a process is rounded
        differently from all later ones, and a resumed run would differ from an unbroken one at its
        first step (by 4e-9 with four ranks). Here the first passes are discarded, so every real
        step uses the final buckets.

        Buffers (BatchNorm's statistics) and random number generators are restored.
        """
        with self.hardware.random_state_kept():
            rehearse(model, inputs, named_inputs, loss)
        self.hardware.end_step()
        if self.stragglers:
            self.stragglers.forget_passes()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers, such as BatchNorm's running statistics, to every rank.

        Every rank calls it.
        """
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0, group=self._group(buffer))

    # Collectives

    def sum(self, values: Tensor) -> Tensor:
        """Add up `values` over all ranks, in place. Every rank calls it.

        `values` has any shape; float64 gives exact counts.
        """
        if self.world_size > 1:
            dist.all_reduce(values, group=self._group(values))
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Take the elementwise maximum of `values` over all ranks, in place.

        Every rank calls it.
        """
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group(values))
        return values

    def identical(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if `tensors` have the same bits in the same order on all ranks.

        It compares 56 bits of a SHA-256 of each. Every rank calls it.
        """
        if self.world_size == 1:
            return True
        own = torch.tensor([_digest(tensor) for tensor in tensors])
        # The maxima of x and of -x add up to 0 only if all x are equal.
        extremes = self.maximum(torch.stack([own, -own]))
        return bool((extremes.sum(0) == 0).all())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.maximum(torch.zeros(1))

    def gather(self, item: T) -> list[T]:
        """Return the small picklable `item` of each rank, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.cpu_group)
        return items

    def broadcast(self, item: T | None) -> T:
        """Return the picklable `item` of rank 0 on every rank. The other ranks pass None."""
        box: list[Any] = [item]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]  # type: ignore[no-any-return]

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor on the CPU into the tensor of every rank.

        Every rank calls it.
        """
        if self.world_size > 1 and tensor.numel():
            dist.broadcast(tensor, src=0, group=self.cpu_group)

    def _group(self, values: Tensor) -> dist.ProcessGroup | None:
        return self.cpu_group if values.device.type == "cpu" else None

    # Actions that may fail on one rank

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank. If one rank raises an exception, every rank raises one.

        For example, a folder missing on one node ends the job everywhere with its message.
        Otherwise the other ranks would wait in their next collective. A UserError reaches all ranks
        as it is. Any other exception is a RetryableError on the other ranks.
        """
        result, failure, other = _attempt(action)
        self._raise_first(self.gather(failure), other)
        return result  # type: ignore[return-value]

    def gather_results(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank, and return the small picklable results of all.

        If one rank raises an exception, every rank raises one, as in `run_on_all`.
        """
        result, failure, other = _attempt(action)
        found = self.gather((result, failure))
        self._raise_first([failure for _, failure in found], other)
        return [result for result, _ in found]  # type: ignore[misc]

    def _raise_first(self, failures: list[UserError | None], own: Exception | None) -> None:
        """Raise `own`, an error other than UserError on this rank, or else the first failure."""
        if own:
            raise own
        for rank, found in enumerate(failures):
            if found is None:
                continue
            if rank == 0:
                found.is_common = True
                raise found
            kind = RetryableError if isinstance(found, RetryableError) else UserError
            raise kind(f"rank {rank}: {found}", is_common=True)

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, and return its small picklable result on every rank.

        If it raises an exception, every rank raises one, as in `run_on_all`.
        """
        outcome: tuple[T | None, UserError | None] | None = None
        other: Exception | None = None
        if self.is_main:
            own, error, other = _attempt(action)
            outcome = own, error
        result, failure = self.broadcast(outcome)
        if other:
            raise other
        if failure:
            failure.is_common = True
            raise failure
        return result  # type: ignore[return-value]

    def node_by_node(self, action: Callable[[], T]) -> T:
        """Run `action` like `run_on_all`, but first on one process of each node.

        It fills a cache for the others.
        """
        is_first = self.local_rank == 0
        first = self.run_on_all(lambda: action() if is_first else None)
        others = self.run_on_all(lambda: None if is_first else action())
        return first if is_first else others  # type: ignore[return-value]


def _attempt(action: Callable[[], T]) -> tuple[T | None, UserError | None, Exception | None]:
    """Return (the result, the failure for the other ranks, the error if it is no UserError)."""
    try:
        return action(), None, None
    except UserError as error:
        return None, error, None
    except Exception as error:
        return None, _as_user_error(error), error


def _as_user_error(error: Exception) -> UserError:
    """Return the other ranks' error for an exception not meant for users."""
    return RetryableError(f"{type(error).__name__}: {error}")


def _digest(tensor: Tensor) -> int:
    numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(numbers.data).digest()[:DIGEST_BYTES])
