"""One rank's part of a sharded checkpoint: its tensors are copied first and written later.

The training goes on after the copy. A thread writes the copy to a file, and tells rank 0 through
the rendezvous store what it has written.
"""

import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from ddp_trainer.checkpoint_file import copied_to_cpu
from ddp_trainer.errors import RetryableError
from ddp_trainer.runtime import Runtime

# Bytes that are read at a time for a checksum.
CHUNK = 1 << 20

# Seconds that rank 0 waits for the other ranks' shards after its own, and between two looks.
SHARDS_TIMEOUT = 600.0
LOOK_INTERVAL = 0.05


@dataclass(frozen=True)
class ShardFile:
    """The size in bytes and the CRC-32 of one rank's file."""

    size: int
    crc: int


class StagingWriter(HuggingFaceStorageWriter):
    """DCP's writer in two steps: it copies this rank's tensors first, and writes them later."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._staged: tuple[SavePlan, StagedTensors] | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Copy what the plan says. DCP then finds that there is nothing more to write."""
        self._staged = plan, StagedTensors(plan, planner)
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing

    def write(self) -> None:
        """Write the copies. No other rank takes part."""
        assert self._staged is not None
        plan, tensors = self._staged
        super().write_data(plan, tensors).wait()
        self._staged = None


class StagedTensors(DefaultSavePlanner):
    """Copies of the tensors of a plan, in the place of the planner that would find them."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Tensor] = {
            item.index: copied_to_cpu(planner.resolve_data(item)) for item in plan.items
        }

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index]


def write_shard(writer: StagingWriter, folder: Path | None, rank: int) -> dict[str, ShardFile]:
    """Write this rank's file. Return its name with size and CRC, or nothing if it has no tensor."""
    assert folder is not None
    writer.write()
    path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
    if not path.exists():
        return {}
    # DCP has written it, but does not flush the last bytes.
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {path.name: measure(path)}


def measure(path: Path) -> ShardFile:
    """Return the size and the CRC of a file. Raises OSError if it cannot be read."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return ShardFile(size, crc)


class Meeting:
    """Tells rank 0, through the rendezvous store, what the other ranks have written.

    A thread can use it while the ranks train, because it takes part in no collective.
    """

    def __init__(self, runtime: Runtime, key: str, abandoned: threading.Event) -> None:
        self.shards: dict[str, ShardFile] = {}
        self._rank = runtime.rank
        self._others = range(1, runtime.world_size)
        self._store: Store | None = runtime.store
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
        """Return what all ranks have written. Raises RetryableError if one failed."""
        found = dict(self.shards)
        deadline = time.monotonic() + SHARDS_TIMEOUT
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
