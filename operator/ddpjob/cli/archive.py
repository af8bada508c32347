"""Unpack an archive sent by `tar` from a pod.

A pod may run anything, so the archive may be hostile. Three rules keep it in its folder:

- A member has a relative name without `..`, and is a file, a folder or a link.
- Every file is a new one in a new folder, and the links are made after the last file. So nothing
  is written through a link.
- A link leads to a place in the folder, whatever other links it leads through.

The filters of `tarfile` do not suffice. Long chains of links pass the filters of Python 3.11.4 to
3.11.12 (CVE-2025-4517), and older releases have no filters. The filters also turn absolute names
into relative ones without an error.
"""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

# Bytes read at once.
CHUNK = 2**20

# A complete archive ends with these zeros.
END = bytes(1024)

# The longest header of a member in bytes. tarfile keeps it in memory.
LONGEST_HEADER = 64 * 2**20

# The names of a path below the folder. The folder itself has none.
Parts = tuple[str, ...]


class ArchiveError(Exception):
    """An archive is refused or incomplete. The message says what is wrong."""


class LinkOutside(ArchiveError):
    """A link leads out of the folder. tar can send the target of the link instead."""


class Ended(ArchiveError):
    """The archive is incomplete or not an archive. The sender's errors may say why."""


class Stream(io.BufferedIOBase):
    """A stream with a record of its last bytes, and with a limit for the size of a header."""

    def __init__(self, stream: io.BufferedReader | io.BytesIO) -> None:
        super().__init__()
        self._stream = stream
        self._last = b""
        self.waiting = 0

    def read(self, size: int | None = -1) -> bytes:
        # Return available bytes at once. The sender may send no more.
        data = self._stream.read1(-1 if size is None else size)
        self._last = (self._last + data)[-len(END) :]
        self.waiting += len(data)
        if self.waiting > LONGEST_HEADER:
            raise ArchiveError("a header in the archive is too long")
        return data

    def require_end(self) -> None:
        """Read the rest. Raises Ended unless it is the end of an archive."""
        while self.read(CHUNK):
            pass
        if self._last != END:
            raise Ended("the archive ends too early")


def _ignore(*_: object) -> None:
    pass


@dataclass
class Unpacker:
    """Writes an archive to `place`, as a folder or as one file. `place` must not exist.

    `begin` is called with the name and the size of each file, and `advance` with the size of each
    written piece of it.
    """

    place: Path
    begin: Callable[[str, int], None] = _ignore
    advance: Callable[[int], None] = _ignore
    size: int = 0
    _files: set[Parts] = field(default_factory=set)
    _links: dict[Parts, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of files and links."""
        return len(self._files) + len(self._links)

    def unpack(self, source: io.BufferedReader | io.BytesIO) -> None:
        """Write a whole archive. Raises ArchiveError, or OSError if a file cannot be written."""
        stream = Stream(source)
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK) as archive:
                first = archive.next()
                if first is None:
                    raise Ended("the archive is empty")
                if first.isdir():
                    self._write_folder(archive, first, stream)
                else:
                    self._write_only_file(archive, first, stream)
        # tarfile raises these for invalid headers.
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise Ended(f"the archive cannot be read: {error}") from error
        stream.require_end()
        for parts, target in self._links.items():
            with _new(parts):
                self.place.joinpath(*parts).symlink_to(target)

    def _write_folder(
        self, archive: tarfile.TarFile, first: tarfile.TarInfo, stream: Stream
    ) -> None:
        self.place.mkdir()
        self._take(archive, first, stream)
        while member := archive.next():
            self._take(archive, member, stream)

    def _write_only_file(
        self, archive: tarfile.TarFile, first: tarfile.TarInfo, stream: Stream
    ) -> None:
        _parts(first.name)
        if not first.isreg():
            raise _refused(first, "is neither a file nor a folder")
        self._write_file(archive, first, (), stream)
        second = archive.next()
        if second:
            raise _refused(second, "is beside the only file")

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo, stream: Stream) -> None:
        stream.waiting = 0
        parts = _parts(member.name)
        with _new(parts):
            # Above a member there are only folders: the links do not exist yet.
            folder = parts if member.isdir() else parts[:-1]
            self.place.joinpath(*folder).mkdir(parents=True, exist_ok=True)
        if member.isdir():
            return
        if member.isreg():
            self._write_file(archive, member, parts, stream)
        elif member.islnk():
            self._write_hard_link(member, parts)
        elif member.issym():
            self._note_link(member, parts)
        else:
            raise _refused(member, "is a device or a pipe")

    def _write_file(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: Parts, stream: Stream
    ) -> None:
        content = archive.extractfile(member)
        # A sparse file may claim any size.
        if content is None or member.issparse():
            raise _refused(member, "is a sparse file")
        self.begin(member.name, member.size)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with _new(parts):
            descriptor = os.open(self.place.joinpath(*parts), flags, member.mode & 0o755 | 0o600)
        with open(descriptor, "wb") as file:
            while piece := content.read(CHUNK):
                stream.waiting = 0
                file.write(piece)
                self.size += len(piece)
                self.advance(len(piece))
        self._files.add(parts)

    def _write_hard_link(self, member: tarfile.TarInfo, parts: Parts) -> None:
        source = _parts(member.linkname)
        if source not in self._files:
            raise _refused(member, f"is a link to {member.linkname!r}, which the archive has not")
        with _new(parts):
            os.link(self.place.joinpath(*source), self.place.joinpath(*parts))
        self._files.add(parts)

    def _note_link(self, member: tarfile.TarInfo, parts: Parts) -> None:
        if not stays_inside(parts, member.linkname):
            raise LinkOutside(
                f"the archive has {member.name!r}, a link to {member.linkname!r}, which is outside "
                "of the folder"
            )
        if parts in self._links:
            raise _twice(parts)
        self._links[parts] = member.linkname


def stays_inside(parts: Parts, target: str) -> bool:
    """Return True if a link leads to a place in the folder, whatever other links are there.

    A `..` after a name is refused: the name may be a link, and then `..` is outside of the folder.
    """
    path = PurePosixPath(target)
    names = path.parts
    ascents = 0
    while names[ascents : ascents + 1] == ("..",):
        ascents += 1
    is_path = bool(target) and "\0" not in target and not path.is_absolute()
    return is_path and ascents < len(parts) and ".." not in names[ascents:]


def _parts(name: str) -> Parts:
    """Return the names in the path of a member. Raises ArchiveError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ArchiveError(f"the archive has the path {name!r}, outside of its folder")
    return path.parts


def _refused(member: tarfile.TarInfo, why: str) -> ArchiveError:
    return ArchiveError(f"the archive has {member.name!r}, which {why}")


def _twice(parts: Parts) -> ArchiveError:
    return ArchiveError(f"the archive has {'/'.join(parts)!r} twice")


@contextmanager
def _new(parts: Parts) -> Iterator[None]:
    """Raise ArchiveError if a member takes the place of another one."""
    try:
        yield
    except FileExistsError as error:
        raise _twice(parts) from error
