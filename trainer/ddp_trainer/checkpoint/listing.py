"""The list of the checkpoints in a folder, for people. The folder is not taken over."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer.checkpoint.claim import SHARDED, list_checkpoints, version_of
from ddp_trainer.checkpoint.file import find_structural_fault, read_structure
from ddp_trainer.checkpoint.folder import Best, index_of
from ddp_trainer.errors import UserError


@dataclass(frozen=True)
class Listed:
    """A checkpoint: its size in bytes, its age in seconds, and what is wrong with it, if anything.

    The structure is checked, and the sizes of shards. The checksums are not.
    """

    path: Path
    step: int
    size: int
    age: float
    fault: str
    is_best: bool


def listed(folder: Path | str, now: float | None = None) -> list[Listed]:
    """Return the checkpoints in a folder, the newest first. Raises UserError if it is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: folder not found")
    now = time.time() if now is None else now
    best = Best.read(folder)
    found = []
    for path in list_checkpoints(folder):
        size, changed, fault = _look_at(path)
        # The job may have removed it meanwhile.
        if fault and not (path.exists() or path.is_symlink()):
            continue
        # The clock of the writing machine may be ahead.
        age = max(0.0, now - changed)
        is_best = best is not None and best.file == path.name
        found.append(Listed(path, version_of(path)[1], size, age, fault, is_best))
    return found


def _look_at(path: Path) -> tuple[int, float, str]:
    """Return (the size of a checkpoint, when it was written, what is wrong with it)."""
    try:
        files = list(path.iterdir()) if path.suffix == SHARDED else [path]
        sizes = {file.name: file.stat().st_size for file in files}
        return sum(sizes.values()), path.stat().st_mtime, _find_fault(path, sizes)
    except OSError as error:
        return 0, time.time(), error.strerror or str(error)


def _find_fault(path: Path, sizes: dict[str, int]) -> str:
    index = index_of(path)
    try:
        fault = find_structural_fault(index)
    except UserError:
        return "made by a newer release"
    if fault or path.suffix != SHARDED:
        return fault or ""
    try:
        shards = {name: size for name, (size, _) in read_structure(index)["shards"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"{index.name}: its list of shards is missing or malformed"
    incomplete = [name for name, size in shards.items() if sizes.get(name) != size]
    return f"{incomplete[0]} is not complete" if incomplete else ""


def describe(checkpoints: list[Listed]) -> Iterator[str]:
    """Yield the lines of a table."""
    row = "{:>12}  {:>9}  {:>6}  {:12}  {}"
    yield row.format("STEP", "SIZE", "AGE", "STATE", "FILE")
    for one in checkpoints:
        state = "unreadable" if one.fault else "complete"
        note = f"  ({one.fault})" if one.fault else "  (best)" if one.is_best else ""
        yield row.format(one.step, _size(one.size), _age(one.age), state, one.path.name + note)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
