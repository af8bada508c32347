"""Checkpoints: one file per step, written by global rank 0 as a whole or not at all.

A thread writes the file while the training goes on. Rank 0 also reads the files, and sends the
tensors to the other ranks one by one. So only its node needs the folder, and all ranks resume from
the same bytes even if a shared file system shows its nodes different contents for a while. If FSDP2
shards the model, every rank writes its own part instead (checkpoint_shards.py). Everything with
`state_dict` and `load_state_dict` can be saved. A start takes the folder over from the starts
before it (claim.py), which then can write nothing there any more.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ddp_trainer.checkpoint_file import (
    FORMAT,
    StoredTensor,
    as_bytes,
    map_leaves,
    read_structure,
    save_atomically,
)
from ddp_trainer.checkpoint_folder import (
    GONE,
    INDEX,
    Best,
    CheckpointFolder,
    Fault,
    Retention,
    write_and_report,
)
from ddp_trainer.checkpoint_parts import (
    PerRank,
    Stateful,
    copied_state,
    explained_misfit,
    load_part,
    require_format,
    require_identity,
    require_part,
    require_ranks,
)
from ddp_trainer.claim import SHARDED
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.runtime import Runtime

if TYPE_CHECKING:
    from ddp_trainer.checkpoint_shards import ShardedState

# Called with the step, the path, and the seconds from the call of `save` to the complete file.
OnWritten = Callable[[int, Path, float], None]

KEEP_TWO = Retention()


class Checkpoints:
    """The checkpoints of one job in `folder`, or none if `folder` is None.

    - `parts` are saved, and restored in place, under their names. A model may be in its DDP wrapper
      or not. Of a model that FSDP2 shards, and of its optimizer, every rank writes its own part.
      All nodes must then share the folder. Of a part in `PerRank`, the state of each rank is saved.
    - `identity` says what the checkpoint belongs to, such as {"workload": "digits"}. A checkpoint
      with another identity is refused.
    - `retention` says which checkpoints are kept.

    `restore`, or the first `save` without it, takes the folder over. A process that had it before
    gets TakenOver from its next `save`. So call `restore` at the start, and only to train: to look
    at a checkpoint of a running job, use torch.load.
    """

    def __init__(
        self,
        folder: Path | str | None,
        runtime: Runtime,
        parts: Mapping[str, Stateful | PerRank],
        identity: Mapping[str, str | int] | None = None,
        retention: Retention = KEEP_TWO,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.runtime = runtime
        self.identity = dict(identity or {})
        self._parts: dict[str, Stateful] = {}
        self._rank_parts: dict[str, Stateful] = {}
        for name, part in parts.items():
            if isinstance(part, PerRank):
                self._rank_parts[name] = part.part
            else:
                self._parts[name] = part
        self._newest: Path | None = None
        self._files = CheckpointFolder(Path(folder or ""), retention)
        # One thread, so that two checkpoints are never written at the same time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # True on all ranks if a write is under way. Only ranks that write have the future.
        self._is_writing = False
        self._is_waiting = False
        self._write: Future[None] | None = None
        self._abandoned = threading.Event()
        self._number_of_saves = 0
        self._has_restored = False
        runtime.at_leave.append(self._leave)
        runtime.is_writing.append(self._is_under_way)

    @property
    def newest(self) -> Path | None:
        """Return the checkpoint that was last saved or restored; None before."""
        return self._newest

    @property
    def best(self) -> Best | None:
        """Return the written checkpoint with the highest score, if any has one, on rank 0."""
        return self._files.best

    # Saving

    def save(
        self, step: int, *, score: float | None = None, on_written: OnWritten | None = None
    ) -> Path | None:
        """Save the state after `step`. Every rank calls it.

        It returns when the state is copied. A thread then writes the copy. The next `save`, `wait`
        and the end of `process_group` wait until it is written. On rank 0, the thread calls
        `on_written` at the end. The random number generators of all ranks are saved. Of the
        checkpoints with a `score`, the one with the highest is kept.

        Return the path on rank 0, and None on other ranks and without a folder. Raises UserError on
        every rank if this checkpoint or the last one cannot be written, or if the folder has
        checkpoints and `restore` was not called. Raises TakenOver if a newer start has the folder.
        """
        if self.folder is None:
            return None
        began = time.perf_counter()
        self.wait()
        if not self._has_restored:
            self.runtime.on_main(self._files.require_empty)
            self._has_restored = True
        sharded = self._sharded_state()
        target = self.runtime.on_main(lambda: self._files.target(step, is_sharded=bool(sharded)))
        state = self._copied_state(step, sharded)
        write: Callable[[], None] | None = None
        if sharded:
            self._number_of_saves += 1
            key = f"{target.draft}/{self._number_of_saves}"
            write = sharded.stage(target, state, self._files, key, self._abandoned)
        elif self.runtime.is_main:
            write = partial(self._files.write, target.path, state)

        def report() -> None:
            if self.runtime.is_main:
                self._files.keep(target.path, step, score)
                if on_written:
                    on_written(step, target.path, time.perf_counter() - began)

        if write:
            self._write = self._thread.submit(write_and_report, write, report, target.path)
        self._is_writing = True
        self._newest = target.path
        return target.path if self.runtime.is_main else None

    def _copied_state(self, step: int, sharded: "ShardedState | None") -> dict[str, Any]:
        """Return a copy of what rank 0 saves in one file. On other ranks it is not complete."""
        plain = [name for name in self._parts if not sharded or name not in sharded]
        own = plain if self.runtime.is_main else []
        parts = self.runtime.run_on_all(
            lambda: {name: copied_state(name, self._parts[name]) for name in own}
        )
        own_parts = self.runtime.run_on_all(
            lambda: {name: copied_state(name, part) for name, part in self._rank_parts.items()}
        )
        generator = self.runtime.hardware.random_state()
        generators, rank_parts = zip(*self.runtime.gather((generator, own_parts)), strict=True)
        return {
            "format": FORMAT,
            "step": step,
            "identity": self.identity,
            "parts": parts,
            "generators": list(generators),
            "rank_parts": list(rank_parts),
        }

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Every rank calls it.

        Raises UserError or TakenOver on every rank if it cannot be written.
        """
        if not self._is_writing:
            return
        self._is_writing = False
        write, self._write = self._write, None
        self._is_waiting = True
        try:
            self.runtime.run_on_all(lambda: write.result() if write else None)
        finally:
            self._is_waiting = False

    def _is_under_way(self) -> bool:
        """Return True while this process writes a checkpoint, or waits for one."""
        return self._is_waiting or (self._write is not None and not self._write.done())

    def _leave(self, failed: bool) -> None:
        """Wait for the last checkpoint before the process leaves its group, if peers are left."""
        if failed:
            self._abandoned.set()
        else:
            self.wait()

    def write_beside(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write another file of the job by torch.save, such as the weights alone.

        Rank 0 calls it. The folder is created. In the folder of the checkpoints, the file is
        protected like them from older starts. Raises TakenOver if a newer start has the folder, and
        UserError or OSError if the file cannot be written.
        """
        if self.folder and path.parent.resolve() == self.folder.resolve():
            self._files.claim.write(path, state)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(path, state)

    # Restoring

    def restore(self) -> int:
        """Load the newest readable checkpoint into the parts. Every rank calls it.

        Return its step, or 0 if there is none. Raises UserError if checkpoints exist and none can
        be read, or if the newest belongs to another job or model. Training from the beginning would
        then lose the progress so far. From now on, older processes cannot write to the folder.
        """
        if self.folder is None:
            self.runtime.warn(
                "no checkpoints are written; give --checkpoint-dir or set DDP_CHECKPOINT_DIR to "
                "make the run resumable"
            )
            return 0
        self._has_restored = True
        # Another job's folder is refused before it is taken over from that job.
        found = self.runtime.on_main(self._files.newest_identity)
        if found:
            require_identity(self.identity, found, self.folder)
        self.runtime.on_main(self._files.take_over)
        path = self._find_readable()
        if path is None:
            return 0
        self._newest = path
        return self._load(path)

    def _find_readable(self) -> Path | None:
        """Return the newest checkpoint that can be read. Set those aside that cannot."""
        faults: dict[Path, Fault] = {}
        for path in self.runtime.on_main(self._files.candidates):
            fault = self._find_fault(path)
            if fault is None:
                damaged = [other for other, found in faults.items() if found.is_damage]
                self.runtime.on_main(partial(self._files.set_aside, damaged))
                return path
            faults[path] = fault
            if fault != GONE:
                self.runtime.warn(
                    f"cannot read the checkpoint {path} ({fault.reason}); trying the one before it"
                )
        # A newer start may have removed files before they could be read.
        self.runtime.on_main(lambda: self._files.claim.check())
        if faults:
            reason = next(iter(faults.values())).reason
            # If the storage failed, another attempt may succeed.
            is_damage = all(fault.is_damage for fault in faults.values())
            kind = UserError if is_damage else RetryableError
            raise kind(
                f"no checkpoint in {self.folder} can be read ({reason}); restore one of its files "
                "from a copy, or remove all of them to train from the beginning"
            )
        return None

    def _find_fault(self, path: Path) -> Fault | None:
        """Return why a checkpoint is not readable, or None. Every rank calls it."""
        fault = self.runtime.on_main(lambda: self._files.find_fault(path))
        if fault or path.suffix != SHARDED:
            return fault
        from ddp_trainer.checkpoint_shards import find_fault

        return find_fault(path, self.runtime)

    def _load(self, path: Path) -> int:
        """Load a readable checkpoint, and return its step. Every rank calls it."""
        assert self.folder is not None
        index = path if path.suffix != SHARDED else path / INDEX
        saved = self.runtime.on_main(lambda: read_structure(index))
        require_identity(self.identity, saved["identity"], self.folder)
        sharded = self._sharded_state()
        require_format(path, is_sharded=bool(sharded))
        for name in self._parts:
            require_part(name, saved["parts"], self.folder)

        main_file = self.runtime.run_on_all(
            lambda: self._files.open_to_read(index) if self.runtime.is_main else None
        )
        with main_file or nullcontext() as file:
            for name, part in self._parts.items():
                if not sharded or name not in sharded:
                    state = self._receive(saved["parts"][name], file)
                    load_part(part, state, name=name, folder=self.folder)
            generators = self._receive(saved["generators"], file)
            rank_parts = self._receive(saved.get("rank_parts", []), file)
        if sharded:
            with explained_misfit(" and ".join(sharded.names), self.folder):
                sharded.load(path, saved)

        self.runtime.run_on_all(lambda: self._load_own(generators, rank_parts))
        return int(saved["step"])

    def _load_own(self, generators: list[Any], rank_parts: list[dict[str, Any]]) -> None:
        """Load what each rank has for itself."""
        assert self.folder is not None
        # With another number of ranks, each rank keeps the generators that it started with.
        if len(generators) == self.runtime.world_size:
            with explained_misfit("random number generator", self.folder):
                self.runtime.hardware.set_random_state(generators[self.runtime.rank])
        for name, part in self._rank_parts.items():
            require_ranks(name, len(rank_parts), self.runtime.world_size, self.folder)
            own = rank_parts[self.runtime.rank]
            require_part(name, own, self.folder)
            load_part(part, own[name], name=name, folder=self.folder)

    def _receive(self, state: Any, file: IO[bytes] | None) -> Any:
        """Return a state with its tensors, which rank 0 reads from its file and sends to all."""

        def receive(leaf: Any) -> Any:
            if not isinstance(leaf, StoredTensor):
                return leaf
            tensor = leaf.read(file) if file else leaf.allocate()
            self.runtime.broadcast_tensor(as_bytes(tensor))
            return tensor

        return map_leaves(receive, state)

    def _sharded_state(self) -> "ShardedState | None":
        # A model of FSDP2 has parameters of a class of this module, whose import takes a while.
        if "torch.distributed.tensor" not in sys.modules:
            return None
        from ddp_trainer.checkpoint_shards import ShardedState

        return ShardedState(self._parts, self.runtime) or None
