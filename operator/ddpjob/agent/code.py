"""Unpack the code of a job into the working directory of an attempt.

A ConfigMap has either the archive `code.zip`, or files. A hostile or enormous archive is refused
before anything is written.
"""

import os
import shutil
import stat
import zlib
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile, ZipInfo

# The key of a ConfigMap with an archive.
ARCHIVE = "code.zip"

# The limits of an archive: entries, and bytes when it is unpacked.
MAX_ENTRIES, MAX_BYTES = 20_000, 64 * 2**20


def unpack(source: Path, target: Path) -> None:
    """Write the code in a ConfigMap's folder into a folder. Raises ValueError or OSError."""
    if (source / ARCHIVE).is_file():
        unpack_archive(source / ARCHIVE, target)
        return
    # A kubelet keeps the files of a volume in a folder `..data`. Other entries are links into it.
    hidden = shutil.ignore_patterns("..*")
    shutil.copytree(
        source, target, ignore=hidden, copy_function=shutil.copyfile, dirs_exist_ok=True
    )


def unpack_archive(path: Path, target: Path) -> None:
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
            check(entries)
            for entry in entries:
                written = archive.extract(entry, target)
                is_program = entry.external_attr >> 16 & stat.S_IXUSR
                if is_program and not entry.is_dir():
                    os.chmod(written, 0o755)
    # An encrypted entry, or one packed in an unknown way, is a RuntimeError.
    except (BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{ARCHIVE} cannot be read: {error}") from error


def check(entries: list[ZipInfo]) -> None:
    """Raise ValueError for too large an archive, or for links or files elsewhere.

    `zipfile` writes no more bytes than an entry names.
    """
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"{ARCHIVE} has {len(entries)} entries; the limit is {MAX_ENTRIES}")
    if sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise ValueError(f"{ARCHIVE} has more than {MAX_BYTES} bytes when it is unpacked")
    for entry in entries:
        name = entry.filename
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"{ARCHIVE} has the path {name!r}, outside of its folder")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        # An archive from another system may have no kind.
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"{ARCHIVE} has {name!r}, which is neither a file nor a folder")
