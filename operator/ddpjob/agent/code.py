"""Unpack the code of a job into the working directory of an attempt.

A ConfigMap has either the archive `code.zip`, or files. An archive comes from a user's manifest, so
it may be hostile or enormous: it is refused before anything is written outside of the folder, and
counted while it is written.
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

CHUNK = 2**16


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
            if len(entries) > MAX_ENTRIES:
                raise ValueError(
                    f"{ARCHIVE} has {len(entries)} entries; the limit is {MAX_ENTRIES}"
                )
            for entry in entries:
                check_entry(entry)
            left = MAX_BYTES
            for entry in entries:
                left = write_entry(archive, entry, target, left)
    # An encrypted entry, or one packed in an unknown way, is a RuntimeError.
    except (BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{ARCHIVE} cannot be read: {error}") from error


def check_entry(entry: ZipInfo) -> None:
    """Raise ValueError unless an entry is a file or a folder below the target."""
    path = PurePosixPath(entry.filename)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{ARCHIVE} has the path {entry.filename!r}, outside of its folder")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    # An archive from another system may have no kind.
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ValueError(f"{ARCHIVE} has {entry.filename!r}, which is neither a file nor a folder")


def write_entry(archive: ZipFile, entry: ZipInfo, target: Path, left: int) -> int:
    """Write an entry of at most `left` bytes, and return how many bytes are left after it."""
    path = target / entry.filename
    if entry.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return left
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(entry) as packed, open(path, "wb") as file:
        while chunk := packed.read(CHUNK):
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"{ARCHIVE} has more than {MAX_BYTES} bytes when it is unpacked")
            file.write(chunk)
    if entry.external_attr >> 16 & stat.S_IXUSR:
        os.chmod(path, 0o755)
    return left
