"""Files written as a whole or not at all. May import `errors`."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ddp_trainer.errors import path_error

# Suffix of incomplete files. A crash may leave one.
PARTIAL = ".partial"


def write_atomically(
    path: Path | str,
    write: Callable[[IO[bytes]], Any],
    *,
    durable: bool,
    partial_folder: Path | None = None,
) -> None:
    """Write a file by a call of `write` with the open file.

    After a crash at any moment the file is complete, or the old one is still there. With `durable`
    the new file survives a power failure too. Until it is complete, the file is in
    `partial_folder`, on the same file system; by default beside `path`. Raises OSError if it cannot
    be written.
    """
    path = Path(path)
    # Nodes and processes may share the folder, so the name differs between them.
    suffix = f"{socket.gethostname()}-{os.getpid()}{PARTIAL}"
    partial = (partial_folder or path.parent) / f".{path.name}.{suffix}"
    try:
        with partial.open("wb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path | str) -> None:
    """Create `folder`. Raises UserError if no file can be written to it.

    A check at the start is better than a lost checkpoint after an hour of training.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = (
            f"{folder}: cannot be written ({error.strerror or error}); make it writable or choose "
            "another folder"
        )
        raise path_error(message, error) from error
