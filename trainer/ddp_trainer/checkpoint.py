"""Checkpoints: one file per step, written by global rank 0 as a whole or not at all.

Rank 0 also reads them and sends them to the others. So only its node needs the folder, and all
ranks resume from the same bytes even if a shared file system shows its nodes different contents for
a while. Everything with `state_dict` and `load_state_dict` can be saved. A start takes the folder
over from the starts before it (claim.py), which then can write nothing there any more.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from ddp_trainer.checkpoint_file import FORMAT, find_fault, first_line, save_atomically
from ddp_trainer.claim import Claim, checkpoint_path
from ddp_trainer.errors import UserError, path_error
from ddp_trainer.files import check_writable
from ddp_trainer.runtime import Runtime

# Files that are kept: the newest, and the one before it, in case the newest cannot be read.
KEPT = 2

# Settings of an optimizer that say how it computes, which depends on the hardware.
COMPUTATION = ("fused", "foreach")


class Stateful(Protocol):
    """Anything that can be saved: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, Python's numbers and strings, and lists and dicts of them.

        Numbers of numpy cannot be read again.
        """

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a saved state."""


class Checkpoints:
    """The checkpoints of one job in `folder`, or none if `folder` is None.

    - `parts` are saved, and restored in place, under their names. Pass the bare model, not its DDP
      wrapper, so that the keys are the model's own.
    - `identity` says what the checkpoint belongs to, such as {"workload": "digits"}. A checkpoint
      with another identity is refused.

    `restore`, or the first `save` without it, takes the folder over. A process that had it before
    gets TakenOver from its next `save`. So call `restore` at the start, and only to train: to look
    at a checkpoint of a running job, use torch.load.
    """

    def __init__(
        self,
        folder: Path | str | None,
        runtime: Runtime,
        parts: Mapping[str, Stateful],
        identity: Mapping[str, str | int] | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.runtime = runtime
        self.parts = dict(parts)
        self.identity = dict(identity or {})
        self._saved_step: int | None = None
        self._saved_file: Path | None = None
        self._checked = False
        # Only on rank 0, from the first use of the folder on.
        self._claim: Claim | None = None

    @property
    def newest(self) -> Path | None:
        """File that was last written or restored; None before."""
        return self._saved_file

    def save(self, step: int) -> Path | None:
        """Write the state after `step`. Every rank calls it.

        Return the file on rank 0, and None on other ranks and without a folder. The random number
        generators of all ranks are saved. Raises UserError on rank 0 if the file cannot be written,
        or if the first file cannot be read again, and TakenOver if a newer start has the folder.
        """
        if self.folder is None:
            return None
        if self._saved_step == step:
            return self._saved_file if self.runtime.is_main else None
        number = self._claim_folder(self.folder).number if self.runtime.is_main else 0
        gathered = self.runtime.gather((number, self.runtime.hardware.random_state()))
        path = checkpoint_path(self.folder, gathered[0][0], step)
        self._remember(step, path)
        if not self.runtime.is_main:
            return None
        state = {
            "format": FORMAT,
            "step": step,
            "identity": self.identity,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "generators": [generator for _, generator in gathered],
        }
        self._write(path, state)
        return path

    def write_beside(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write another file of the job by torch.save, such as the weights alone.

        Rank 0 calls it. The folder is created. In the folder of the checkpoints, the file is
        protected like them from older starts. Raises TakenOver if a newer start has the folder, and
        UserError or OSError if the file cannot be written.
        """
        if path.parent == self.folder:
            self._claim_folder(self.folder).write(path, state)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(path, state)

    def _claim_folder(self, folder: Path) -> Claim:
        """Return this start's claim to the folder. Raises UserError if it cannot be written."""
        try:
            if self._claim is None:
                self._claim = Claim.take(folder)
            elif not folder.exists():
                # The user removed the folder during the run. Nobody else has a claim to it.
                self._claim = Claim.take(folder, above=self._claim.number)
        except OSError as error:
            reason = error.strerror or error
            message = f"cannot write the checkpoint to {folder}: {reason}"
            raise path_error(message, error) from error
        return self._claim

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint and remove those that it makes superfluous."""
        assert self._claim is not None
        try:
            self._claim.write(path, state)
            self._check_readable(path)
            # An outdated process must not remove what the newer start may read. If it is taken over
            # after this check, it still keeps its newest files, and those are read first.
            self._claim.check()
            for old in self._claim.list_files()[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self._claim.check()
            reason = error.strerror or error
            raise path_error(f"cannot write the checkpoint {path}: {reason}", error) from error

    def _remember(self, step: int, path: Path) -> None:
        self._saved_step = step
        self._saved_file = path

    def _check_readable(self, path: Path) -> None:
        """Raise UserError if the first file cannot be read again.

        This shows an unusable state at the first checkpoint, not after hours of training.
        """
        if self._checked:
            return
        self._checked = True
        reason = find_fault(path.read_bytes())
        if reason:
            path.unlink()
            raise UserError(
                f"the state of {', '.join(self.parts)} can be written but not read again "
                f"({reason}); return only tensors, Python's own numbers and strings, and lists and "
                "dicts of them from state_dict()"
            )

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
        path, data = self._read_and_broadcast()
        if path is None:
            return 0
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        self._check_identity(state)
        for name, part in self.parts.items():
            self._load_part(name, part, state)
        # With another number of ranks, each rank keeps the generators that it started with.
        generators = state["generators"]
        if len(generators) == self.runtime.world_size:
            with self._refusing("random number generator"):
                self.runtime.hardware.set_random_state(generators[self.runtime.rank])
        step = int(state["step"])
        self._remember(step, path)
        return step

    def _load_part(self, name: str, part: Stateful, state: Mapping[str, Any]) -> None:
        if name not in state["parts"]:
            raise UserError(
                f"the checkpoint in {self.folder} has no state of this {name}; it has "
                f"{', '.join(map(str, state['parts'])) or 'none'}. Use the script that it was made "
                "with, or another --checkpoint-dir"
            )
        with self._refusing(name):
            _load(part, state["parts"][name])

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Raise UserError if a state cannot be loaded.

        Modules raise RuntimeError, and optimizers with other parameter groups raise ValueError. A
        state of another type can lead to any error.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = first_line(error)
            raise UserError(
                f"the checkpoint in {self.folder} does not fit this {name} ({reason}); use the "
                "flags that it was made with, or another --checkpoint-dir"
            ) from error

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        found = state["identity"]
        # Compare this run's settings first: they begin with the workload, the clearest difference.
        for name in dict.fromkeys([*self.identity, *found]):
            own = self.identity.get(name)
            if own != found.get(name):
                raise UserError(
                    f"the checkpoint in {self.folder} was made with {name} {found.get(name)!r}, "
                    f"but this run has {own!r}; use the flags that it was made with, or another "
                    "--checkpoint-dir"
                )

    def _read_and_broadcast(self) -> tuple[Path | None, bytes]:
        """Return the newest readable checkpoint and its bytes on every rank, or None and b""."""
        assert self.folder is not None
        path, data = None, b""
        error = None
        if self.runtime.is_main:
            try:
                check_writable(self.folder)
                path, data = self._take_over(self.folder)
            except UserError as found:
                error = found
        # All ranks must raise the same error, or the others would wait for rank 0.
        outcome = (path, len(data), error) if self.runtime.is_main else None
        path, size, error = self.runtime.broadcast(outcome)
        if error:
            raise error
        return path, self.runtime.broadcast_bytes(data, size)

    def _take_over(self, folder: Path) -> tuple[Path | None, bytes]:
        """Claim the folder, and return the newest readable checkpoint and its bytes."""
        # Claim before reading. A start that claims at its first save only could take the folder
        # over from one that began after it.
        claim = self._claim_folder(folder)
        try:
            found = self._read_newest(claim)
        except OSError as error:
            claim.check()
            reason = str(error.strerror or error)
            message = f"cannot read the checkpoints in {folder}: {reason}"
            raise path_error(message, error) from error
        # A newer start may have removed files before they could be read.
        claim.check()
        return found

    def _read_newest(self, claim: Claim) -> tuple[Path | None, bytes]:
        """Return the newest readable checkpoint, and set unreadable ones aside."""
        folder = claim.folder
        unreadable: list[tuple[Path, str]] = []
        for path in claim.list_files():
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                # An older process was about to remove its files that are not the newest.
                continue
            reason = find_fault(data)
            if reason is None:
                # An unreadable file must not take the place of a good one in KEPT.
                for bad, _ in unreadable:
                    with suppress(FileNotFoundError):
                        bad.rename(bad.with_suffix(".unreadable"))
                return path, data
            unreadable.append((path, reason))
            self.runtime.warn(
                f"cannot read the checkpoint {path} ({reason}); trying the one before it"
            )
        if unreadable:
            raise UserError(
                f"no checkpoint in {folder} can be read ({unreadable[0][1]}); restore one of its "
                "files from a copy, or remove all of them to train from the beginning"
            )
        return None, b""


def _load(part: Stateful, state: Any) -> None:
    if isinstance(part, torch.optim.Optimizer):
        _load_optimizer(part, state)
    else:
        part.load_state_dict(state)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load an optimizer's state, but keep how it computes.

    The hardware decides whether it is fused, and the memory order of its tensors. For a fused
    optimizer, this order must be that of the parameters.
    """
    computation: list[dict[str, Any]] = [
        {name: group[name] for name in COMPUTATION if name in group}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, computation, strict=True):
        group.update(settings)
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
