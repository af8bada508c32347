"""Reading the weights in a checkpoint, for an evaluation, another training or another program."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ddp_trainer.checkpoint.claim import FILE_NAME, SHARDED
from ddp_trainer.checkpoint.file import require_known_format, save_atomically
from ddp_trainer.checkpoint.folder import index_of
from ddp_trainer.checkpoint.parts import reason_of
from ddp_trainer.errors import UserError, path_error
from ddp_trainer.files import write_atomically

# Suffixes of the files written by `export`.
SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth")


def read_part(path: Path | str, name: str = "model") -> dict[str, Any]:
    """Return the state dict of a part of a checkpoint, on the CPU, with whole tensors.

    `path` is a file or, of a sharded model, a directory. The folder is not taken over, so a job may
    be running in it. The checksums are not verified. Raises UserError if the path or the part is
    not found, or if the file is no checkpoint.
    """
    path = Path(path)
    is_sharded = path.suffix == SHARDED
    index = index_of(path)
    if not index.is_file():
        raise UserError(f"{index}: file not found; give a file .pt or a directory {SHARDED}")
    try:
        saved = torch.load(index, map_location="cpu", weights_only=True)
        number, parts = int(saved["format"]), dict(saved["parts"])
    except Exception as error:
        # It is not documented what torch and pickle raise on arbitrary bytes.
        raise UserError(f"{index} is no readable checkpoint ({reason_of(error)})") from error
    require_known_format(number, path)
    if name not in parts:
        raise UserError(f"{path} has no part {name}; it has {', '.join(parts)}")
    state: dict[str, Any] = parts[name]
    return state | _read_shards(path, f"{name}.") if is_sharded else state


def _read_shards(path: Path, prefix: str) -> dict[str, Any]:
    """Return the whole tensors under `prefix` in the shards, by their names without it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(path))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        for name, found in stored.items()
        if name.startswith(prefix)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def export(path: Path | str, out: Path | str, name: str = "model") -> None:
    """Write a part of a checkpoint, with whole tensors, to a file for other programs.

    `out` ends in .safetensors, or in .pt or .pth for a state dict that torch.load reads with
    weights_only. The folder of the checkpoint is not taken over. Raises UserError if the path or
    the part is not found, or if the file cannot be written.
    """
    out = Path(out)
    if out.suffix not in (SAFETENSORS, *TORCH):
        raise UserError(f"{out}: must end in {', '.join((SAFETENSORS, *TORCH))}")
    if FILE_NAME.fullmatch(out.name) or out.resolve() == Path(path).resolve():
        raise UserError(f"{out}: is the name of a checkpoint; choose another one")
    state = read_part(path, name)
    try:
        if out.suffix == SAFETENSORS:
            tensors = _without_sharing(state, name)
            write_atomically(out, lambda file: _write_tensors(tensors, file), durable=False)
        else:
            save_atomically(out, state)
    except OSError as error:
        raise path_error(f"cannot write {out}: {error.strerror or error}", error) from error


def _without_sharing(state: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Return the tensors, each with its own memory, as the format requires.

    Tied weights are then in the file under each of their names, so a strict load finds them.
    """
    others = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise UserError(
            f"{name} has {others[0]!r}, which is no tensor; {SAFETENSORS} has only tensors, so "
            f"write the part to a file that ends in {TORCH[0]}"
        )
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in state.items():
        plain = tensor.contiguous()
        storage = plain.untyped_storage().data_ptr()
        tensors[key] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return tensors


def _write_tensors(tensors: dict[str, Tensor], file: IO[bytes]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        # It takes a name, and puts a file of its own in the place of the open one. Programs of
        # Hugging Face want the field.
        save_file(tensors, file.name, {"format": "pt"})
        # Only its owner can read the new file.
        os.chmod(file.name, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    except SafetensorError as error:
        raise OSError(str(error)) from error
