"""One file of a checkpoint: writing it, and finding out what is wrong with it."""

import copy
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ddp_trainer.files import write_atomically

# Version of the file's contents, and the types of its fields.
FORMAT = 2
FIELDS = {"step": int, "identity": dict, "parts": dict, "generators": list}


def find_fault(data: bytes) -> str | None:
    """Return in a few words why these bytes are no readable checkpoint, or None."""
    try:
        damage = find_damage(io.BytesIO(data))
        if damage:
            return damage
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # It is not documented what zipfile, torch and pickle raise on arbitrary bytes.
        return _reason_of(error)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return f"it does not have format {FORMAT}"
    for name, kind in FIELDS.items():
        if type(state.get(name)) is not kind:
            return f"its field {name!r} is missing or is not of type {kind.__name__}"
    return None


def _reason_of(error: Exception) -> str:
    """Return the line of an error of torch.load that says what was wrong.

    The message begins with the advice to trust the file.
    """
    marker = "WeightsUnpickler error: "
    for line in str(error).splitlines():
        if marker in line:
            return line.rpartition(marker)[2].rstrip(":. ")
    return first_line(error).rstrip(":. ")


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def find_damage(file: Path | IO[bytes]) -> str | None:
    """Return in a few words how a file of torch.save is damaged, or None.

    Such a file is a zip archive with a CRC for every tensor, which torch does not check. Raises
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


def save_atomically(
    path: Path, state: Mapping[str, Any], *, partial_folder: Path | None = None
) -> None:
    """Write a state by torch.save, so that it survives a crash and a power failure.

    Until it is complete, the file is in `partial_folder`; by default beside `path`. Raises OSError
    if it cannot be written.
    """
    write_atomically(
        path,
        lambda file: _save(_on_cpu(state), file),
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


def _on_cpu(state: Any) -> Any:
    """Return the state with every tensor on the CPU and in row-major order.

    So the file does not depend on the hardware. On XLA this also computes the tensors' values, as
    `xm.save` does.
    """
    if isinstance(state, torch.Tensor):
        return state.cpu().contiguous()
    if isinstance(state, dict):
        # A shallow copy keeps the type and its attributes, such as a module's `_metadata`. Items
        # are set one by one, because `update` of a Counter (a scheduler's milestones) adds.
        copied = copy.copy(state)
        for key, value in state.items():
            copied[key] = _on_cpu(value)
        return copied
    if type(state) in (list, tuple):
        return type(state)(_on_cpu(value) for value in state)
    return state
