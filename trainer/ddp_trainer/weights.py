"""Reading the weights in a checkpoint, for an evaluation or another training."""

from pathlib import Path
from typing import Any

import torch

from ddp_trainer.checkpoint_folder import INDEX
from ddp_trainer.claim import SHARDED
from ddp_trainer.errors import UserError


def read_part(path: Path | str, name: str = "model") -> dict[str, Any]:
    """Return the state dict of a part of a checkpoint, on the CPU, with whole tensors.

    `path` is a file or, of a sharded model, a directory. The folder is not taken over, so a job may
    be running in it. The checksums are not verified. Raises UserError if the path or the part is
    not found.
    """
    path = Path(path)
    is_sharded = path.suffix == SHARDED
    index = path / INDEX if is_sharded else path
    if not index.is_file():
        raise UserError(f"{index}: file not found")
    parts = torch.load(index, map_location="cpu", weights_only=True)["parts"]
    if name not in parts:
        raise UserError(f"{path} has no part {name}; it has {', '.join(parts)}")
    state: dict[str, Any] = parts[name]
    return state | _read_shards(path, f"{name}.") if is_sharded else state


def _read_shards(path: Path, prefix: str) -> dict[str, Any]:
    """Return the whole tensors in the shards whose names begin with `prefix`, without it."""
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
