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

# Seconds until a directory that rank 0 made must be visible to the other ranks.
VISIBLE_TIMEOUT = 30.0

# What decides which rank writes which piece of a tensor, by its name: the shape, the type, and how
# it is distributed over which ranks.
Layout = dict[str, tuple[Any, ...]]


class ShardWriter:
    """Writes the sharded checkpoints of one start. Every rank calls its method.

    The ranks plan together which of them writes what. As long as all tensors keep their layout,
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
        """Copy the tensors that this rank has to write, and return a function that writes them.

        The function needs no other rank at the same time, so a thread may call it. On rank 0 it
        also writes `state`, which has all that is not sharded, and completes the checkpoint. The
        copies are not complete at the return.
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
        # What every rank has, such as BatchNorm's statistics, is that of rank 0.
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
    """Wait until this rank sees the directory that rank 0 made. Raises UserError if it does not.

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
