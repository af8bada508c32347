"""One rank's part of a sharded checkpoint: its tensors are copied first and written later.

The training goes on after the copy. A thread writes the copy to a file, and tells rank 0 through
the rendezvous store what it has written.
"""

import json
import os
import re
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from ddp_trainer.checkpoint.buffers import Buffers
from ddp_trainer.checkpoint.file import as_bytes, first_line
from ddp_trainer.errors import RetryableError
from ddp_trainer.ranks.runtime import Runtime

# Bytes read at a time for a checksum.
CHUNK = 1 << 20

# Seconds between two looks for what another rank has written.
LOOK_INTERVAL = 0.05

# The suffix of a shard. DCP's reader takes every file with it.
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ShardFile:
    """The size in bytes and the CRC-32 of one rank's file."""

    size: int
    crc: int


class Staging(StorageWriter):
    """A writer for torch.distributed.checkpoint (DCP). It only copies this rank's tensors.

    `write` writes the copies later, in the format of DCP's HuggingFaceStorageWriter. That class
    would make the whole file in memory first.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.items: list[WriteItem] = []
        self._buffers = buffers
        self._tensors: dict[str, Tensor] = {}
        # Where a tensor begins in the whole one, in each dimension.
        self._offsets: dict[str, list[int]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing. DCP calls it first."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing. The directory exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what the plan says. DCP then has nothing more to write."""
        self.copy(plan.items, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    @torch.no_grad()
    def copy(self, items: list[WriteItem], planner: SavePlanner) -> None:
        """Copy the tensors named by some items of a plan."""
        self.items = items
        for item in items:
            name = item.index.fqn
            assert item.tensor_data is not None
            assert name not in self._tensors, "a rank has several pieces of a tensor"
            self._tensors[name] = self._buffers.copied(planner.resolve_data(item))
            self._offsets[name] = list(item.tensor_data.chunk.offsets)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing. Each file has its own metadata."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def write(self, folder: Path, rank: int) -> dict[str, ShardFile]:
        """Write the copies to this rank's file. No other rank takes part.

        Return its name with size and CRC, or nothing if this rank has no tensor. Raises OSError.
        """
        if not self._tensors:
            return {}
        path = folder / f"shard-{rank + 1:05}{SUFFIX}"
        places = {name: {"saved_offsets": offsets} for name, offsets in self._offsets.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        _save_file(self._tensors, path, metadata)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        written = measure_written(path, self._tensors)
        self._tensors.clear()
        return {path.name: written}


def _save_file(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    try:
        save_file(tensors, path, dict(metadata))
    except SafetensorError as error:
        # Its text has the number of the error.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def measure(path: Path) -> ShardFile:
    """Return the size and the CRC of a file. Raises OSError if it cannot be read."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return ShardFile(size, crc)


def measure_written(path: Path, tensors: Mapping[str, Tensor]) -> ShardFile:
    """Return the size and the CRC of a shard from the tensors written to it.

    Only the head of the file is read: the length of a JSON object in 8 bytes, and the object with
    the places of the tensors.
    """
    with path.open("rb") as file:
        head = file.read(8)
        head += file.read(int.from_bytes(head, "little"))
    places = json.loads(head[8:])
    crc = zlib.crc32(head)
    for name in sorted(tensors, key=lambda name: places[name]["data_offsets"]):
        crc = zlib.crc32(as_bytes(tensors[name]).numpy().data, crc)
    return ShardFile(path.stat().st_size, crc)


class Meeting:
    """Tells rank 0, through the rendezvous store, what the other ranks have written.

    A thread can use it while the ranks train, because it takes part in no collective.

    - `key`: another one for each checkpoint.
    - `abandoned`: set it to let rank 0 wait for the others no longer.
    """

    def __init__(self, runtime: Runtime, key: str, abandoned: threading.Event) -> None:
        self.shards: dict[str, ShardFile] = {}
        self._rank = runtime.rank
        self._others = range(1, runtime.world_size)
        self._store: Store | None = runtime.store
        self._timeout = runtime.timeout
        self._key = key
        self._abandoned = abandoned

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell rank 0 at the end of the block what this rank has written, or its error."""
        error = ""
        try:
            yield
        except Exception as failure:
            error = str(failure)
            raise
        finally:
            if self._rank and self._store:
                shards = {name: [shard.size, shard.crc] for name, shard in self.shards.items()}
                self._store.set(f"{self._key}/{self._rank}", json.dumps([error, shards]))

    def collect(self) -> dict[str, ShardFile]:
        """Return what all ranks have written. Raises RetryableError if one failed.

        Rank 0 notices a dead rank when it has waited for as long as in a collective.
        """
        found = dict(self.shards)
        deadline = time.monotonic() + self._timeout
        for rank in self._others:
            assert self._store is not None
            key = f"{self._key}/{rank}"
            # A blocking read would keep the store from the other threads of this process.
            while not self._store.check([key]):
                if self._abandoned.wait(LOOK_INTERVAL) or time.monotonic() > deadline:
                    raise RetryableError(f"rank {rank} has not written its part of the checkpoint")
            error, shards = json.loads(self._store.get(key))
            self._store.delete_key(key)
            if error:
                raise RetryableError(f"rank {rank}: {error}")
            found |= {name: ShardFile(*numbers) for name, numbers in shards.items()}
        return found


@contextmanager
def plain_errors() -> Iterator[None]:
    """Hide the warnings of DCP, and raise RetryableError for its errors, on every rank.

    DCP imports deprecated modules of torch. Its errors are no Exceptions.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            message = f"rank {rank}: {first_line(failure)}"
            raise RetryableError(message, is_common=True) from error
