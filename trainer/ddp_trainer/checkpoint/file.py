"""One file of a checkpoint: writing it, finding out what is wrong with it, and reading it.

A file is read tensor by tensor, so reading takes little memory in addition to the state.
"""

import copy
import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ddp_trainer.errors import UserError
from ddp_trainer.files import write_atomically

# Version of the file's contents, and the types of its fields.
FORMAT = 2
FIELDS = {"step": int, "identity": dict, "parts": dict, "generators": list}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape and type, and where its bytes begin, in row-major order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def allocate(self) -> Tensor:
        """Return a tensor of this shape and type, without setting its values."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def read(self, file: IO[bytes]) -> Tensor:
        """Return the tensor. Raises OSError if the file cannot be read, or is too short."""
        tensor = self.allocate()
        data = as_bytes(tensor).numpy()
        file.seek(self.offset)
        if file.readinto(data) != data.nbytes:  # type: ignore[attr-defined]
            raise OSError("the file is shorter than before")
        return tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, without a copy."""
    return tensor.view(-1).view(torch.uint8)


def map_leaves(function: Callable[[Any], Any], state: Any) -> Any:
    """Return a state with `function(leaf)` for each leaf: anything but a dict, list or tuple."""
    if isinstance(state, dict):
        # A shallow copy keeps the type and its attributes, such as a module's `_metadata`. Items
        # are set one by one, because `update` of a Counter (a scheduler's milestones) adds.
        copied = copy.copy(state)
        for key, value in state.items():
            copied[key] = map_leaves(function, value)
        return copied
    if type(state) in (list, tuple):
        return type(state)(map_leaves(function, value) for value in state)
    return function(state)


def on_cpu(leaf: Any) -> Any:
    """Return a tensor on the CPU in row-major order, and other leaves unchanged.

    So the file does not depend on the hardware. On XLA this also computes the tensor's values, as
    `xm.save` does.
    """
    return leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else leaf


# Reading


def read_structure(path: Path) -> Any:
    """Return the state in a file of torch.save, with a StoredTensor in the place of each tensor.

    Only tensors and plain values are accepted. Raises OSError, or any exception if the file is
    damaged: it is not documented what torch and pickle raise on arbitrary bytes.
    """
    # It takes a while to import.
    from torch._subclasses.fake_tensor import FakeTensorMode

    # In this mode torch.load reads no tensor, and notes where its bytes are (documented there).
    with FakeTensorMode():
        state = torch.load(path, map_location="cpu", weights_only=True)
    return map_leaves(_stored, state)


def _stored(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_contiguous():
        raise ValueError("it has a tensor that is not in row-major order")
    begin = leaf.untyped_storage()._checkpoint_offset
    if begin is None:
        if leaf.numel():
            raise ValueError("it has a tensor of an unknown kind")
        begin = 0
    offset = begin + int(leaf.storage_offset()) * leaf.element_size()
    return StoredTensor(tuple(leaf.shape), leaf.dtype, offset)


def find_fault(path: Path) -> str | None:
    """Return in a few words why a file is no readable checkpoint, or None.

    Raises OSError if the file cannot be read, and UserError if a newer release has made it.
    """
    return find_damage(path) or find_structural_fault(path)


def find_structural_fault(path: Path) -> str | None:
    """Return in a few words why a file has not the structure of a checkpoint, or None.

    The values of its tensors are not read. Raises OSError if the file cannot be read, and UserError
    if a newer release has made it.
    """
    try:
        state = read_structure(path)
    except OSError:
        raise
    except Exception as error:
        return _reason_of(error)
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        return f"it does not have format {FORMAT}"
    require_known_format(state["format"], path)
    if state["format"] != FORMAT:
        return f"it does not have format {FORMAT}"
    for name, kind in FIELDS.items():
        if type(state.get(name)) is not kind:
            return f"its field {name!r} is missing or is not of type {kind.__name__}"
    return None


def require_known_format(number: int, path: Path) -> None:
    """Raise UserError if a newer release has made a checkpoint. It is then not damaged."""
    if number > FORMAT:
        raise UserError(
            f"the checkpoint {path} was made by a newer release of ddp_trainer (format {number}; "
            f"this release reads format {FORMAT}); use that release, or another folder"
        )


def _reason_of(error: Exception) -> str:
    """Return the line with the reason in an error of torch.load.

    The message begins with the advice to trust the file.
    """
    marker = "WeightsUnpickler error: "
    lines = [line.rpartition(marker)[2] for line in str(error).splitlines() if marker in line]
    reason = lines[0] if lines else first_line(error)
    return reason.rstrip(":. ") or type(error).__name__


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def find_damage(file: Path | IO[bytes]) -> str | None:
    """Return in a few words how a file of torch.save is damaged, or None.

    Such a file is a zip archive with a CRC for every tensor. torch does not check these. Raises
    OSError if the file cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except OSError:
        raise
    except Exception as error:
        # It is not documented what zipfile raises on arbitrary bytes.
        return str(error) or type(error).__name__
    return f"the checksum of {damaged} is wrong" if damaged else None


# Writing


def can_be_read_again(state: Any) -> bool:
    """Return True if a state can be read with weights_only. The values of its tensors are left out.

    Only readable kinds of tensors are copied into a state.
    """
    buffer = io.BytesIO()
    torch.save(map_leaves(lambda leaf: 0 if isinstance(leaf, Tensor) else leaf, state), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


def save_atomically(
    path: Path | str, state: Mapping[str, Any], *, partial_folder: Path | None = None
) -> None:
    """Write a state by torch.save, so that it survives a crash and a power failure.

    Until it is complete, the file is in `partial_folder`; by default beside `path`. Raises OSError
    if it cannot be written.
    """
    write_atomically(
        path,
        lambda file: _save(map_leaves(on_cpu, state), file),
        durable=True,
        partial_folder=partial_folder,
    )


def _save(state: Any, file: IO[bytes]) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # After a failed write, torch complains about its own position in the file.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
