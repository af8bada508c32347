"""Checkpoints: one file per step, written by global rank 0 as a whole or not at all.

A thread writes the file while the training goes on. Rank 0 also reads the files, and sends the
tensors to the other ranks one by one. So only its node needs the folder, and all ranks resume from
the same bytes even if a shared file system shows its nodes different contents for a while. If FSDP2
shards the model, every rank writes its own part instead (shards.py). Everything with
`state_dict` and `load_state_dict` can be saved. A start takes the folder over from the starts
before it (claim.py). They can then write nothing there any more.
"""

import operator
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_trainer.checkpoint.across_ranks import (
    COMPARE_EVERY,
    consolidate,
    require_equal,
    require_supported,
    sharded_state,
)
from ddp_trainer.checkpoint.buffers import Buffers
from ddp_trainer.checkpoint.claim import SHARDED
from ddp_trainer.checkpoint.file import FORMAT, save_atomically
from ddp_trainer.checkpoint.folder import (
    GONE,
    Best,
    CheckpointFolder,
    Choice,
    Fault,
    Retention,
    write_and_report,
)
from ddp_trainer.checkpoint.loading import Loader
from ddp_trainer.checkpoint.parts import PerRank, Stateful, copied_state, split_parts
from ddp_trainer.errors import RetryableError, UserError, path_error
from ddp_trainer.ranks.runtime import Runtime

if TYPE_CHECKING:
    from ddp_trainer.checkpoint.shard_writer import ShardWriter
    from ddp_trainer.checkpoint.shards import ShardedState

# Called with the step, the path, and the seconds from the call of `save` to the complete file.
OnWritten = Callable[[int, Path, float], None]

KEEP_TWO = Retention()


class Checkpoints:
    """The checkpoints of one job in `folder`, or none if `folder` is None.

    - `parts` are saved, and restored in place, under their names. A name has no dot. A model may be
      in its DDP wrapper, compiled, both or neither. Of a model sharded by FSDP2, and of its
      optimizer, every rank writes its own part. All nodes must then share the folder. Of a part in
      `PerRank`, the state of each rank is saved. Of all others, the state of rank 0 is saved.
    - `identity` says what the checkpoint belongs to, such as {"workload": "digits"}. A checkpoint
      with another identity is refused.
    - `retention` is the rule for keeping checkpoints.
    - `compare_ranks`: at the first save and at each 50th, raise UserError if the parameters of a
      model or the state of an optimizer differ between the ranks. Turn it off if they differ on
      purpose, as between two averages of local SGD.

    `restore`, or the first `save` without it, takes the folder over. The process of an earlier
    start gets TakenOver from its next `save`. So call `restore` at the start, and only to train: to
    look at a checkpoint of a running job, use torch.load.
    """

    def __init__(
        self,
        folder: Path | str | None,
        runtime: Runtime,
        parts: Mapping[str, Stateful | PerRank],
        identity: Mapping[str, str | int] | None = None,
        retention: Retention = KEEP_TWO,
        *,
        compare_ranks: bool = True,
    ) -> None:
        # A script may change its working directory later.
        self.folder = None if folder is None else Path(folder).absolute()
        self.runtime = runtime
        self.identity = dict(identity or {})
        self._parts, self._rank_parts = split_parts(parts)
        require_supported(self._parts)
        self._compares_ranks = compare_ranks
        self._newest: Path | None = None
        self._files = CheckpointFolder(self.folder or Path(), retention)
        self._buffers = Buffers()
        self._shard_writer: ShardWriter | None = None
        # One thread, so two checkpoints are never written at the same time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # True on all ranks if a write is under way. Only writing ranks have the future.
        self._is_writing = False
        self._is_waiting = False
        self._write: Future[None] | None = None
        self._abandoned = threading.Event()
        self._number_of_saves = 0
        self._has_restored = False
        # Other folders with files from `write_beside`.
        self._other_folders: set[Path] = set()
        runtime.at_leave.append(self._leave)
        runtime.is_writing.append(self._is_under_way)

    @property
    def newest(self) -> Path | None:
        """Return the last saved or restored checkpoint; None before the first one."""
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

        `step` counts from the beginning of the whole run, and must be above the step of the last
        checkpoint. If a loop may come to the same step twice, use `save_once`.

        Return the path on rank 0, and None on other ranks and without a folder. Raises UserError on
        every rank if this checkpoint or the last one cannot be written, if `step` is not above the
        last one, if the ranks differ, or if the folder has checkpoints and `restore` was not
        called. Raises TakenOver if a newer start has the folder.
        """
        step = _checked_step(step)
        if self.folder is None:
            return None
        began = time.perf_counter()
        self.wait()
        if not self._has_restored:
            self.runtime.on_main(self._files.require_empty)
            self._has_restored = True
        sharded = sharded_state(self._parts, self.runtime)
        self._require_equal_ranks(sharded)
        self._number_of_saves += 1
        number = self._number_of_saves
        target = self.runtime.on_main(
            lambda: self._files.target(number, step, is_sharded=bool(sharded))
        )
        self._buffers.reuse()
        state = self._copied_state(step, sharded)
        write: Callable[[], None] | None = None
        if sharded:
            write = self._shards().stage(sharded, target, state)
        elif self.runtime.is_main:
            write = partial(self._files.write, target.path, state)
        self._buffers.finish()

        def report() -> None:
            if self.runtime.is_main:
                self._files.keep(target.path, step, score)
                if on_written:
                    on_written(step, target.path, time.perf_counter() - began)

        self._is_writing = True
        if write:
            self._write = self._thread.submit(write_and_report, write, report, target.path)
        self._newest = target.path
        return target.path if self.runtime.is_main else None

    def save_once(
        self, step: int, *, score: float | None = None, on_written: OnWritten | None = None
    ) -> Path | None:
        """Save the state after `step`, unless this start has saved it already. Every rank calls it.

        It is for loops that save from time to time, and also at the end of an epoch or of the run.
        The first checkpoint of a step stays as it is: after a resume from it, the run repeats what
        followed the step, such as an evaluation. A `score` is noted for it. Of several scores for
        one checkpoint, the highest counts.

        Return the path of the step's checkpoint on rank 0. See `save` for the rest.
        """
        step = _checked_step(step)
        if self.folder is None:
            return None
        self.wait()
        path = self.runtime.on_main(lambda: self._files.keep_last(step, score))
        if path is None:
            return self.save(step, score=score, on_written=on_written)
        return path if self.runtime.is_main else None

    def _shards(self) -> "ShardWriter":
        """Return the writer of sharded checkpoints. It is imported at the first use."""
        if self._shard_writer is None:
            from ddp_trainer.checkpoint.shard_writer import ShardWriter

            self._shard_writer = ShardWriter(
                self.runtime, self._files, self._abandoned, self._buffers
            )
        return self._shard_writer

    def _require_equal_ranks(self, sharded: "ShardedState | None") -> None:
        if self._compares_ranks and self._number_of_saves % COMPARE_EVERY == 0:
            plain = {
                name: part
                for name, part in self._parts.items()
                if not sharded or name not in sharded
            }
            require_equal(plain, self.runtime)

    def _copied_state(self, step: int, sharded: "ShardedState | None") -> dict[str, Any]:
        """Return a copy of the state for rank 0's file. On other ranks it is not complete."""
        plain = [name for name in self._parts if not sharded or name not in sharded]
        own = plain if self.runtime.is_main else []
        consolidate(self._parts)
        parts: dict[str, Any] = {}

        def copy_parts() -> tuple[dict[str, Any], dict[str, Any]]:
            for name in own:
                parts[name] = copied_state(name, self._parts[name], self._buffers)
            own_parts = {
                name: copied_state(name, part, self._buffers)
                for name, part in self._rank_parts.items()
            }
            self._buffers.finish()
            return self.runtime.hardware.random_state(), own_parts

        # One exchange, because each of them keeps the training waiting.
        generators, rank_parts = zip(*self.runtime.gather_results(copy_parts), strict=True)
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
        self._is_waiting = True
        try:
            self.runtime.run_on_all(lambda: self._write.result() if self._write else None)
        except UserError:
            self._forget_write()
            raise
        finally:
            self._is_waiting = False
        # Not after Ctrl-C: the thread still writes from the buffers, so the next save must wait.
        self._forget_write()

    def _forget_write(self) -> None:
        self._is_writing, self._write = False, None

    def _is_under_way(self) -> bool:
        """Return True while this process writes a checkpoint, or waits for one."""
        return self._is_waiting or (self._write is not None and not self._write.done())

    def _leave(self, failed: bool) -> None:
        """Wait for the last checkpoint before the process leaves its group, if peers are left."""
        if failed:
            self._abandoned.set()
        else:
            self.wait()

    def write_beside(self, path: Path | str, state: Mapping[str, Any]) -> None:
        """Write another file of the job by torch.save, such as the weights alone.

        Rank 0 calls it. The folder is created. In the folder of the checkpoints, the file is
        protected like them from older starts. Raises TakenOver if a newer start has the folder, and
        UserError if the file cannot be written.
        """
        path = Path(path).absolute()
        if self.folder and path.parent.resolve() == self.folder.resolve():
            with self._files.explained(f"cannot write {path}"):
                self._files.claim.write(path, state)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(path, state)
        except OSError as error:
            message = f"cannot write {path}: {error.strerror or error}"
            has_worked = path.parent in self._other_folders
            raise path_error(message, error, has_worked=has_worked) from error
        self._other_folders.add(path.parent)

    # Restoring

    def restore(
        self,
        step: int | None = None,
        *,
        best: bool = False,
        parts: Collection[str] | None = None,
        new_parts: Collection[str] = (),
    ) -> int:
        """Load a checkpoint into the parts: the newest readable one. Every rank calls it.

        It first waits until the last checkpoint is written. From now on, older processes cannot
        write to the folder, and this one's checkpoints count as newer than all others there.

        - `step`: load the checkpoint of this step.
        - `best`: load the one with the highest score.
        - `parts`: load only these. The others, and the random number generators, keep their state.
        - `new_parts`: these keep their state if the checkpoint has none of them.

        Return the step of the checkpoint, or 0 if there is none. Raises UserError if checkpoints
        exist and none can be read, or if the checkpoint belongs to another job or model. Training
        from the beginning would then lose the progress so far. Raises UserError too if there is no
        checkpoint of `step`, or no best one. Models, optimizers and samplers are then as they were.
        """
        names = self._chosen_names(parts, new_parts)
        if best and step is not None:
            raise UserError("restore: expected step or best, got both", is_common=True)
        choice = Choice(None if step is None else _checked_step(step), best)
        if self.folder is None:
            if choice:
                raise UserError("restore: there is no folder with checkpoints", is_common=True)
            self.runtime.warn(
                "no checkpoints are written, because no folder is given for them; the run cannot "
                "be resumed"
            )
            return 0
        self.wait()
        loader = Loader(
            self.runtime,
            self._files,
            self.identity,
            self._parts,
            self._rank_parts,
            names=names,
            new_parts=new_parts,
        )
        # The checkpoint of another job or model is refused before the folder is taken over. Taking
        # it over would stop the process training there.
        found = self.runtime.on_main(lambda: self._files.look_ahead(choice))
        if found:
            loader.require_fitting(*found)
        self.runtime.on_main(self._files.take_over)
        self._has_restored = True
        path = self._find_readable(choice)
        if path is None:
            return 0
        restored = loader.load(path)
        self.runtime.on_main(lambda: self._files.continue_from(path))
        self._newest = path
        return restored

    def _chosen_names(
        self, parts: Collection[str] | None, new_parts: Collection[str]
    ) -> Collection[str]:
        """Return the names of the parts to load. Raises UserError for unknown names."""
        known = [*self._parts, *self._rank_parts]
        for option, names in (("parts", parts), ("new_parts", new_parts)):
            unknown = [names] if isinstance(names, str) else set(names or ()) - set(known)
            if unknown:
                raise UserError(
                    f"restore: {option} must be a list of names of parts ({', '.join(known)}), got "
                    f"{names!r}",
                    is_common=True,
                )
        return known if parts is None else [name for name in known if name in parts]

    def _find_readable(self, choice: Choice) -> Path | None:
        """Return the newest readable checkpoint. Set newer damaged ones aside."""
        faults: dict[Path, Fault] = {}
        for path in self.runtime.on_main(lambda: self._files.candidates(choice)):
            fault = self._find_fault(path)
            if fault is None:
                damaged = [other for other, found in faults.items() if found.is_damage]
                self.runtime.on_main(partial(self._files.set_aside, damaged))
                return path
            faults[path] = fault
            if fault != GONE:
                after = "" if choice else "; trying the one before it"
                self.runtime.warn(f"cannot read the checkpoint {path} ({fault.reason}){after}")
        # A newer start may have removed files before they could be read.
        self.runtime.on_main(lambda: self._files.claim.check())
        if faults:
            reason = next(iter(faults.values())).reason
            # If the storage failed, another attempt may succeed.
            is_damage = all(fault.is_damage for fault in faults.values())
            kind = UserError if is_damage else RetryableError
            if choice:
                path = next(iter(faults))
                raise kind(f"the chosen checkpoint {path} cannot be read ({reason})")
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
        from ddp_trainer.checkpoint.shards import find_fault

        return find_fault(path, self.runtime)


def _checked_step(step: int) -> int:
    """Return a step as an int. Raises UserError if it is none."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UserError(f"step: must be an integer >= 0, got {step!r}", is_common=True)
    return number
