"""Read files that may be absent, partly written, or of any content, and remove files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import SOCKET


def read_file(path: str | Path) -> bytes:
    """Return the first MiB of a file, or nothing if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(1 << 20)
    return b""


def read_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a text, or an empty one."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def changed_at(path: str) -> float:
    """Return the Unix time of the last change of a file, or 0 if there is none."""
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def stat_fields(process: int | str) -> list[bytes]:
    """Return the fields of /proc about a process, from its state on: field 3 of proc(5) is first.

    The program's name before it may contain anything.
    """
    _, _, fields = read_file(f"/proc/{process}/stat").rpartition(b")")
    return fields.split()


def exit_code_of(process: int) -> int | None:
    """Return the exit code of an ended process.

    It is None while the process runs, and once its parent has collected it.
    """
    fields = stat_fields(process)
    if fields[:1] != [b"Z"]:
        return None
    # Field 52 of proc(5) is the status returned by waitpid.
    return os.waitstatus_to_exitcode(int(fields[49]))


def socket_path(folder: int) -> str:
    """Return a path of the zygote's socket, short enough for an address.

    `folder`: the descriptor of its folder.
    """
    return f"/proc/self/fd/{folder}/{SOCKET}"


def paths_below(root: str | Path) -> set[str]:
    """Return the paths of the files, links and empty folders in a folder, relative to it."""
    found = []
    for folder, inside, files in os.walk(root):
        here = Path(folder)
        found += [here / name for name in files]
        for name in inside:
            if os.path.islink(here / name):
                found.append(here / name)
        is_empty = not inside and not files
        if is_empty and folder != str(root):
            found.append(here)
    return {str(path.relative_to(root)) for path in found}


def empty_folder(root: str | Path, kept: Path | None = None) -> None:
    """Remove the content of a folder, except `kept` and the mounts below the folder."""
    found: list[Path] = []
    for folder, inside, files in os.walk(root):
        for path in [Path(folder, name) for name in inside]:
            # A link to a folder is removed as a file is.
            if path.is_symlink():
                files.append(path.name)
            if path.is_symlink() or path.is_mount():
                inside.remove(path.name)
            else:
                get_access(path)
                found.append(path)
        for name in files:
            path = Path(folder, name)
            if path != kept:
                with suppress(OSError):
                    path.unlink()
    for path in reversed(found):
        with suppress(OSError):
            path.rmdir()


def get_access(folder: Path) -> None:
    """Restore the rights of a folder: a script may have taken them from itself."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        with suppress(OSError):
            folder.chmod(0o700)
