"""Checkpoints: one file per step, written by global rank 0 as a whole or not at all.

Rank 0 also reads them and sends them to the others. So only its node needs the folder, and all
ranks resume from the same bytes even if a shared file system shows its nodes different contents for
a while. Everything with `state_dict` and `load_state_dict` can be saved.
"""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ddp_trainer.checkpoint_file import FORMAT, find_fault, first_line, save_atomically
from ddp_trainer.errors import UserError
from ddp_trainer.files import PARTIAL, check_writable
from ddp_trainer.runtime import Runtime

# Files that are kept: the newest, and the one before it, in case the newest cannot be read.
KEPT = 2

FILE_NAME = re.compile(r"step-(\d{10})\.pt")

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

    @property
    def newest(self) -> Path | None:
        """File that was last written or restored; None before."""
        return self._saved_file

    def save(self, step: int) -> Path | None:
        """Write the state after `step`. Every rank calls it.

        Return the file on rank 0, and None on other ranks and without a folder. The random number
        generators of all ranks are saved. Raises UserError on rank 0 if the file cannot be written,
        or if the first file cannot be read again.
        """
        if self.folder is None:
            return None
        if self._saved_step == step:
            return self._saved_file if self.runtime.is_main else None
        generators = self.runtime.gather(self.runtime.hardware.random_state())
        self._remember(step)
        if not self.runtime.is_main:
            return None
        state = {
            "format": FORMAT,
            "step": step,
            "identity": self.identity,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "generators": generators,
        }
        path = _file_of(self.folder, step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_atomically(path, state)
            self._check_readable(path)
            for old in _list_files(self.folder)[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write the checkpoint {path}: {reason}") from error
        return path

    def _remember(self, step: int) -> None:
        assert self.folder is not None
        self._saved_step = step
        self._saved_file = _file_of(self.folder, step)

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
        then lose the progress so far.
        """
        if self.folder is None:
            self.runtime.warn(
                "no checkpoints are written; give --checkpoint-dir or set DDP_CHECKPOINT_DIR to "
                "make the run resumable"
            )
            return 0
        data = self._read_and_broadcast()
        if not data:
            return 0
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        self._check_identity(state)
        for name, part in self.parts.items():
            self._load_part(name, part, state)
        # With another number of ranks, each rank keeps the generators that it started with.
        generators = state["generators"]
        if len(generators) == self.runtime.world_size:
            self.runtime.hardware.set_random_state(generators[self.runtime.rank])
        step = int(state["step"])
        self._remember(step)
        return step

    def _load_part(self, name: str, part: Stateful, state: Mapping[str, Any]) -> None:
        try:
            _load(part, state["parts"][name])
        except UserError:
            raise
        except (RuntimeError, KeyError, ValueError) as error:
            # An optimizer raises ValueError if it has other parameter groups.
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

    def _read_and_broadcast(self) -> bytes:
        """Return the bytes of the newest readable checkpoint on every rank, empty without one."""
        assert self.folder is not None
        data = b""
        message = None
        if self.runtime.is_main:
            try:
                check_writable(self.folder)
                data = self._read_newest(self.folder)
            except UserError as error:
                message = str(error)
        # All ranks must raise the same error, or the others would wait for rank 0.
        outcome = (len(data), message) if self.runtime.is_main else None
        size, message = self.runtime.broadcast(outcome)
        if message:
            raise UserError(message)
        return self.runtime.broadcast_bytes(data, size)

    def _read_newest(self, folder: Path) -> bytes:
        """Return the bytes of the newest readable checkpoint, and set unreadable ones aside."""
        unreadable: list[tuple[Path, str]] = []
        try:
            _remove_partial_files(folder)
            for path in _list_files(folder):
                data = path.read_bytes()
                reason = find_fault(data)
                if reason is None:
                    # An unreadable file must not take the place of a good one in KEPT.
                    for bad, _ in unreadable:
                        bad.rename(bad.with_suffix(".unreadable"))
                    return data
                unreadable.append((path, reason))
                self.runtime.warn(
                    f"cannot read the checkpoint {path} ({reason}); trying the one before it"
                )
        except OSError as error:
            reason = str(error.strerror or error)
            raise UserError(f"cannot read the checkpoints in {folder}: {reason}") from error
        if unreadable:
            raise UserError(
                f"no checkpoint in {folder} can be read ({unreadable[0][1]}); restore one of its "
                "files from a copy, or remove all of them to train from the beginning"
            )
        return b""


def _file_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}.pt"


def _list_files(folder: Path) -> list[Path]:
    """Return the checkpoint files, the newest first.

    The step in the name decides: file times differ between nodes and copies.
    """
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name)]
    return sorted(files, reverse=True)


def _remove_partial_files(folder: Path) -> None:
    for partial in folder.glob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


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
