"""Checkpoints: one file per step, written whole or not at all by global rank 0, read by it alone and sent to the others.

So only the node of rank 0 needs the folder, and all ranks go on from the same bytes even where a shared file system
shows its nodes different directories for a while. What is saved is anything with `state_dict` and `load_state_dict`.
"""

import copy
import io
import os
import re
import socket
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from ddp_trainer.errors import UserError
from ddp_trainer.runtime import Runtime

FORMAT = 2
KEPT = 2  # the newest, and the one before it in case the newest turns out to be unreadable
_NAME = re.compile(r"step-(\d{10})\.pt")


class Stateful(Protocol):
    """Whatever can be saved: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> dict[str, Any]:
        """State as tensors, Python's numbers (not numpy's), strings, and lists and dicts of them."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a saved state."""


class Checkpoints:
    """The checkpoints of one job in `folder`, or none at all where `folder` is None.

    `parts` are saved and restored in place under their names; pass the bare model, not its DDP wrapper, so that the
    keys are the model's own. `identity` says whose checkpoint it is ({"workload": "digits"}): another job's is refused.
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
        self.parts, self.identity = dict(parts), dict(identity or {})
        self._saved: tuple[int, Path] | None = None
        self._checked = False

    @property
    def newest(self) -> Path | None:
        """The file that was last written or restored from; None before."""
        return self._saved and self._saved[1]

    def save(self, step: int) -> Path | None:
        """Write the state after `step` and return its file (None on other ranks and without a folder).

        Every rank calls it: the random number generators of all of them are collected.
        Raises UserError on rank 0 when the file cannot be written, or the first one not be read again.
        """
        if self.folder is None:
            return None
        if self._saved and self._saved[0] == step:
            return self._saved[1] if self.runtime.is_main else None
        generators = self.runtime.gather(self.runtime.hardware.random_state())
        path = self.folder / f"step-{step:010d}.pt"
        self._saved = step, path
        if not self.runtime.is_main:
            return None
        state = {
            "format": FORMAT,
            "step": step,
            "identity": self.identity,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "generators": generators,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, state)
            self._check_readable(path)
            for old in _files(self.folder)[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write the checkpoint {path}: {error.strerror or error}"
            ) from error
        return path

    def _check_readable(self, path: Path) -> None:
        """Raise UserError where the first file is one that nobody could go on from: now, and not after hours of training."""
        if not self._checked:
            self._checked = True
            if reason := _what_is_wrong(path.read_bytes()):
                path.unlink()
                raise UserError(
                    f"the state of {', '.join(self.parts)} can be written but not read again ({reason}): give state_dict() "
                    "tensors, Python's own numbers and strings, and lists and dicts of them"
                )

    def restore(self) -> int:
        """Load the newest readable checkpoint into the parts; returns its step, 0 where there is none.

        Every rank calls it. Raises UserError when checkpoints are there and none can be read, or when the newest
        belongs to another job or model: going on from nothing would cost the user the training so far.
        """
        if self.folder is None:
            self.runtime.warn(
                "no checkpoints: give --checkpoint-dir or set DDP_CHECKPOINT_DIR to make the run resumable"
            )
            return 0
        data = self._read_and_send()
        if not data:
            return 0
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        self._check_identity(state)
        for name, part in self.parts.items():
            try:
                _load(part, state["parts"][name])
            except UserError:
                raise
            except (
                RuntimeError,
                KeyError,
                ValueError,
            ) as error:  # ValueError: an optimizer with other groups
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UserError(
                    f"the checkpoint in {self.folder} does not fit this {name} ({reason}): "
                    "use the flags that it was made with, or another --checkpoint-dir"
                ) from error
        generators = state["generators"]
        # With another number of ranks there is no right state for each; they keep the ones that they started with.
        if len(generators) == self.runtime.world_size:
            self.runtime.hardware.set_random_state(generators[self.runtime.rank])
        step = int(state["step"])
        self._saved = step, self.folder / f"step-{step:010d}.pt"
        return step

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        theirs = state["identity"]
        # In this run's order: the workload's name comes before what only that workload has.
        for name in dict.fromkeys([*self.identity, *theirs]):
            if self.identity.get(name) != theirs.get(name):
                raise UserError(
                    f"the checkpoint in {self.folder} was made with {name} {theirs.get(name)!r}, this run has "
                    f"{self.identity.get(name)!r}: use the flags that it was made with, or another --checkpoint-dir"
                )

    def _read_and_send(self) -> bytes:
        """The bytes of the newest readable checkpoint on every rank, empty where there is none."""
        assert self.folder is not None
        data, complaint = b"", None
        if self.runtime.is_main:
            try:
                check_writable(self.folder)
                data = self._newest_readable()
            except UserError as error:
                complaint = str(error)
        size, complaint = self.runtime.broadcast(
            (len(data), complaint) if self.runtime.is_main else None
        )
        if complaint:
            raise UserError(complaint)
        return self.runtime.broadcast_bytes(data, size)

    def _newest_readable(self) -> bytes:
        assert self.folder is not None
        unreadable: list[tuple[Path, str]] = []
        try:
            _remove_leftovers(self.folder)
            for path in _files(self.folder):
                data = path.read_bytes()
                reason = _what_is_wrong(data)
                if reason is None:
                    for (
                        bad,
                        _,
                    ) in (
                        unreadable
                    ):  # out of the way, so that it is not kept in place of a good one
                        bad.rename(bad.with_suffix(".unreadable"))
                    return data
                unreadable.append((path, reason))
                self.runtime.warn(
                    f"the checkpoint {path} cannot be read ({reason}); trying the one before it"
                )
        except OSError as error:
            raise UserError(
                f"cannot read the checkpoints in {self.folder}: {error.strerror or error}"
            ) from error
        if unreadable:
            raise UserError(
                f"no checkpoint in {self.folder} can be read ({unreadable[0][1]}): "
                "restore one of its files from a copy, or remove them all to train from the beginning"
            )
        return b""


def check_writable(folder: Path) -> None:
    """Raise UserError now where the first file would be lost, after an hour perhaps."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; make it writable, or name another"
        ) from error


def _files(folder: Path) -> list[Path]:
    """Checkpoint files, newest first. The step in the name counts: times differ between nodes and copies."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _what_is_wrong(data: bytes) -> str | None:
    """Why these bytes are no checkpoint of ours, in a few words, or None."""
    try:
        if damage := damage_of(io.BytesIO(data)):
            return damage
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # what zipfile, torch and pickle raise on arbitrary bytes is not documented
        lines = (str(error).strip() or type(error).__name__).splitlines()
        # torch begins with advice to trust the file; what it did not like comes later.
        disliked = next((line for line in lines if "WeightsUnpickler error: " in line), lines[0])
        return disliked.rpartition("WeightsUnpickler error: ")[2].rstrip(":. ")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return f"it is not of format {FORMAT}"
    return None


def damage_of(file: Path | IO[bytes]) -> str | None:
    """What shows that a file of torch.save has been damaged since, in a few words, or None.

    Such a file is a zip archive with a CRC for every tensor. torch itself does not compare it when it loads.
    Raises OSError where it cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # what zipfile raises on arbitrary bytes is not documented
        return str(error) or type(error).__name__
    return damaged and f"the checksum of {damaged} is wrong"


def write_atomically(path: Path, state: Mapping[str, Any]) -> None:
    """A crash at any moment leaves either the whole file under its name or none; the others are not touched.

    Raises OSError where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            try:
                torch.save(_on_cpu(state), file)
            except (
                RuntimeError
            ) as error:  # torch's writer complains of its own position after a write that failed
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself must survive a power cut
    finally:
        os.close(folder)


def _on_cpu(state: Any) -> Any:
    """The same with every tensor on the CPU and in the plain order, so that a file does not depend on the hardware it is from.

    On XLA that is also where the tensors' values are asked for, as `xm.save` does. What is no tensor stays as it is.
    """
    if isinstance(state, torch.Tensor):
        return state.cpu().contiguous()
    if isinstance(state, dict):
        copied = copy.copy(
            state
        )  # of its own type, with what hangs on it: a module's versions, `_metadata`
        for (
            key,
            value,
        ) in (
            state.items()
        ):  # one by one: a Counter, such as a scheduler's milestones, adds at an update
            copied[key] = _on_cpu(value)
        return copied
    if type(state) in (list, tuple):
        return type(state)(_on_cpu(value) for value in state)
    return state


def _remove_leftovers(folder: Path) -> None:
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


def _load(part: Stateful, state: Any) -> None:
    """Give a part its state. How an optimizer computes a step is a matter of the hardware, not of the file.

    That is whether it is fused, and the order in memory of its tensors, which for a fused one must be that of the parameters.
    """
    if not isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(state)
        return
    ways: list[dict[str, Any]] = [
        {name: group[name] for name in ("fused", "foreach") if name in group}
        for group in part.param_groups
    ]
    part.load_state_dict(state)
    for group, way in zip(part.param_groups, ways, strict=True):
        group.update(way)
    for parameter, kept in part.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
