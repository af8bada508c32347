"""Loading a checkpoint into the parts of a job, on every rank."""

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import nn

from ddp_trainer.checkpoint.across_ranks import sharded_state
from ddp_trainer.checkpoint.file import StoredTensor, as_bytes, map_leaves, read_structure
from ddp_trainer.checkpoint.fitting import (
    is_checked,
    require_fitting_part,
    require_format,
    require_identity,
    require_parts,
    require_ranks,
)
from ddp_trainer.checkpoint.folder import CheckpointFolder, index_of
from ddp_trainer.checkpoint.parts import Stateful, explained_misfit, load_part
from ddp_trainer.ranks.runtime import Runtime

if TYPE_CHECKING:
    from ddp_trainer.checkpoint.shards import ShardedState


@dataclass(frozen=True)
class Loader:
    """Loads a checkpoint into the parts with certain names. Every rank calls its methods.

    - `files` is the folder of the checkpoints.
    - `parts` are common to all ranks. Each rank has its own `rank_parts`.
    - `names` are the names of the parts to load.
    - `new_parts` are names of parts that may be missing in a checkpoint.
    """

    runtime: Runtime
    files: CheckpointFolder
    identity: Mapping[str, str | int]
    parts: Mapping[str, Stateful]
    rank_parts: Mapping[str, Stateful]
    names: Collection[str] = field(kw_only=True)
    new_parts: Collection[str] = field(kw_only=True)

    @property
    def folder(self) -> Path:
        return self.files.path

    def require_fitting(self, path: Path, saved: Any) -> None:
        """Raise UserError if a checkpoint belongs to another job or model. Nothing is loaded.

        `saved` is its structure.
        """
        self.runtime.run_on_all(lambda: self._require_fitting(path, saved))

    def _require_fitting(self, path: Path, saved: Any) -> None:
        require_identity(self.identity, saved["identity"], self.folder)
        sharded = sharded_state(self.parts, self.runtime)
        require_format(path, is_sharded=bool(sharded))
        plain, in_shards = self._split(saved, sharded)
        for name in plain:
            require_fitting_part(name, self.parts[name], saved["parts"][name], self.folder)
        rank_parts = saved.get("rank_parts", [])
        for name in self._own_names(rank_parts):
            state = rank_parts[self.runtime.rank][name]
            require_fitting_part(name, self.rank_parts[name], state, self.folder)
        models = [name for name in in_shards if isinstance(self.parts[name], nn.Module)]
        if sharded and models:
            with explained_misfit(" and ".join(models), self.folder):
                sharded.require_fitting(saved, models)

    def load(self, path: Path) -> int:
        """Load a readable checkpoint, and return its step.

        If it is refused, the parts are as they were. Of some parts only `load_state_dict` shows
        whether they fit. They are loaded first, so no other part has changed by then.
        """
        saved = self.runtime.on_main(lambda: self._read_structure(path))
        self.require_fitting(path, saved)
        sharded = sharded_state(self.parts, self.runtime)
        plain, in_shards = self._split(saved, sharded)
        # All ranks receive the states in the order of rank 0.
        checked = self.runtime.broadcast([name for name in plain if is_checked(self.parts[name])])

        main_file = self.runtime.run_on_all(
            lambda: self._open(path) if self.runtime.is_main else None
        )
        with main_file or nullcontext() as file:
            generators = self._receive(saved["generators"], file)
            rank_parts = self._receive(saved.get("rank_parts", []), file)
            self.runtime.run_on_all(lambda: self._require_fitting_generators(generators))
            for name in plain:
                if name not in checked:
                    self._load_part(name, self._receive(saved["parts"][name], file))
            self.runtime.run_on_all(lambda: self._load_own(rank_parts, checked=False))
            if sharded and in_shards:
                with explained_misfit(" and ".join(in_shards), self.folder):
                    sharded.load(path, saved, in_shards)
            for name in checked:
                self._load_part(name, self._receive(saved["parts"][name], file))

        def finish() -> None:
            self._load_own(rank_parts, checked=True)
            self._load_generators(generators)

        self.runtime.run_on_all(finish)
        return int(saved["step"])

    def _read_structure(self, path: Path) -> Any:
        with self.files.explained(f"cannot read the checkpoint {path}"):
            return read_structure(index_of(path))

    def _open(self, path: Path) -> IO[bytes]:
        with self.files.explained(f"cannot read the checkpoint {path}"):
            return index_of(path).open("rb")

    def _split(self, saved: Any, sharded: "ShardedState | None") -> tuple[list[str], list[str]]:
        """Return the names of the common parts to load: (plain ones, sharded ones)."""
        common = [name for name in self.parts if name in self.names]
        found = require_parts(common, saved["parts"], self.folder, self.new_parts)
        in_shards = [name for name in found if sharded and name in sharded]
        return [name for name in found if name not in in_shards], in_shards

    def _load_part(self, name: str, state: Any) -> None:
        self.runtime.run_on_all(
            lambda: load_part(self.parts[name], state, name=name, folder=self.folder)
        )

    def _load_own(self, rank_parts: list[dict[str, Any]], *, checked: bool) -> None:
        """Load this rank's checked parts, or its other parts."""
        for name in self._own_names(rank_parts):
            part = self.rank_parts[name]
            if is_checked(part) == checked:
                state = rank_parts[self.runtime.rank][name]
                load_part(part, state, name=name, folder=self.folder)

    def _require_fitting_generators(self, generators: list[Any]) -> None:
        """Raise UserError if the states of the generators cannot be used. They do not change."""
        with self.runtime.hardware.random_state_kept():
            self._load_generators(generators)

    def _load_generators(self, generators: list[Any]) -> None:
        # With another number of ranks, each rank keeps the generators from its start. They belong
        # to the whole state, so they are not loaded with some of the parts.
        is_whole = {*self.names} == {*self.parts, *self.rank_parts}
        if is_whole and len(generators) == self.runtime.world_size:
            with explained_misfit("random number generator", self.folder):
                self.runtime.hardware.set_random_state(generators[self.runtime.rank])

    def _own_names(self, rank_parts: list[dict[str, Any]]) -> list[str]:
        """Return the names in `rank_parts` to load.

        Raises UserError if one is missing, or if there are the states of another number of ranks.
        """
        own = [name for name in self.rank_parts if name in self.names]
        found = require_parts(own, rank_parts[0] if rank_parts else {}, self.folder, self.new_parts)
        for name in found:
            require_ranks(name, len(rank_parts), self.runtime.world_size, self.folder)
        return found

    def _receive(self, state: Any, file: IO[bytes] | None) -> Any:
        """Return a state with its tensors. Rank 0 reads them from its file and sends them to all.

        Raises UserError on every rank if the file cannot be read.
        """
        failures: list[OSError] = []

        def receive(leaf: Any) -> Any:
            if not isinstance(leaf, StoredTensor):
                return leaf
            tensor = leaf.allocate()
            if file and not failures:
                try:
                    tensor = leaf.read(file)
                except OSError as error:
                    # The other ranks wait for all tensors. They get the error after these.
                    failures.append(error)
            self.runtime.broadcast_tensor(as_bytes(tensor))
            return tensor

        def require_all_read() -> None:
            with self.files.explained("cannot read the checkpoint"):
                for failure in failures:
                    raise failure

        received = map_leaves(receive, state)
        self.runtime.on_main(require_all_read)
        return received
