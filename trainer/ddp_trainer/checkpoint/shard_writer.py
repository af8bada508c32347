"""Writing a checkpoint of a sharded model: every rank copies its part, and a thread writes it."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ddp_trainer.checkpoint.buffers import Buffers
from ddp_trainer.checkpoint.folder import CheckpointFolder, Target
from ddp_trainer.checkpoint.shards import (
    SHAPES,
    SHARDS,
    ShardedState,
    tensors_of,
    without_tensors,
)
from ddp_trainer.checkpoint.staging import LOOK_INTERVAL, Meeting, Staging, plain_errors
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.runtime import Runtime

# Seconds until a directory made by rank 0 must be visible to the other ranks.
VISIBLE_TIMEOUT = 30.0

# The shape, the type and the distribution over the ranks of each tensor, by its name. They decide
# how a plan assigns the pieces of the tensor to ranks.
Layout = dict[str, tuple[Any, ...]]


class ShardWriter:
    """Writes the sharded checkpoints of one start. Every rank calls its method.

    The ranks plan together what each of them writes. As long as all tensors keep their layout,
    the plan of the last checkpoint is used again, because planning takes about as long as the copy.

    - `abandoned`: set it to let rank 0 wait for the others no longer.
    - `buffers`: where the tensors are copied to.
    """

    def __init__(
        self,
        runtime: Runtime,
        files: CheckpointFolder,
        abandoned: threading.Event,
        buffers: Buffers,
    ) -> None:
        self._runtime = runtime
        self._files = files
        self._abandoned = abandoned
        self._buffers = buffers
        self._layout: Layout | None = None
        self._items: list[WriteItem] = []

    def stage(
        self, sharded: ShardedState, target: Target, state: dict[str, Any]
    ) -> Callable[[], None]:
        """Copy this rank's share of the tensors, and return a function to write the copies.

        The function needs no other rank at the same time, so a thread may call it. On rank 0 it
        also writes `state`, with everything outside the shards, and completes the checkpoint. The
        copies are complete after `Buffers.finish`.
        """
        draft = target.draft
        assert draft is not None
        rank = self._runtime.rank
        states: dict[str, dict[str, Any]] = {}

        def read() -> bool:
            _require_visible(draft, is_first=target.number == 1)
            states.update(sharded.read_saved())
            return layout_of(tensors_of(states)) == self._layout

        # One rank may have other tensors than before, such as the first state of an optimizer.
        has_plan = all(self._runtime.gather_results(read))
        tensors = tensors_of(states)
        staging = self._copied(tensors) if has_plan else self._planned(tensors)
        for name, part in states.items():
            state["parts"][name] = without_tensors(part)
        state[SHAPES] = {name: list(tensor.shape) for name, tensor in tensors.items()}
        meeting = Meeting(self._runtime, f"{draft}/{target.number}", self._abandoned)

        def write() -> None:
            with meeting.reporting(), self._files.explained(f"cannot write {target.path}"):
                meeting.shards = staging.write(draft, rank)
            if rank == 0:
                state[SHARDS] = {
                    name: [shard.size, shard.crc] for name, shard in meeting.collect().items()
                }
                self._files.commit(target, state)

        return write

    def _copied(self, tensors: dict[str, Tensor]) -> Staging:
        """Copy what this rank has to write by the plan of the last checkpoint."""
        staging = Staging(self._buffers)
        planner = DefaultSavePlanner()
        planner.set_up_planner(tensors)
        staging.copy(self._items, planner)
        return staging

    def _planned(self, tensors: dict[str, Tensor]) -> Staging:
        """Plan with the other ranks what each of them has to write, and copy it."""
        self._layout = None
        staging = Staging(self._buffers)
        # Rank 0 writes tensors common to all ranks, such as BatchNorm's statistics.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        with plain_errors():
            save(
                tensors,
                storage_writer=staging,
                planner=planner,
                process_group=self._runtime.cpu_group,
            )
        self._layout, self._items = layout_of(tensors), staging.items
        return staging


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return what a plan depends on."""
    return {
        name: (
            tensor.shape,
            tensor.dtype,
            *((tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()),
        )
        for name, tensor in tensors.items()
    }


def _require_visible(draft: Path, *, is_first: bool) -> None:
    """Wait until this rank sees the directory made by rank 0. Raises UserError if it does not.

    If it has seen one before, the storage has failed, and another attempt may succeed.
    """
    deadline = time.monotonic() + VISIBLE_TIMEOUT
    while not draft.is_dir():
        if time.monotonic() > deadline:
            kind = UserError if is_first else RetryableError
            raise kind(
                f"{draft} was made by rank 0 and is not visible here; a sharded model needs a "
                "folder that all nodes share, such as a ReadWriteMany claim"
            )
        time.sleep(LOOK_INTERVAL)
