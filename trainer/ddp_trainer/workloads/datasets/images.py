"""What the data sets share: images with labels as arrays, folders of image files, and a cache of what was decoded."""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ddp_trainer.errors import UserError

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

SEARCH_DEPTH = 3  # folders below the one that the user names


@dataclass(frozen=True)
class Images:
    """`pixels` of shape (N, channels, height, width), `labels` of shape (N,), counted from 0."""

    pixels: Bytes
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int | None) -> "Images":
        """`count` images at even distances, so of all classes; all images when it is None or larger."""
        if count is None or count >= len(self):
            return self
        chosen = np.arange(count) * len(self) // count
        return Images(self.pixels[chosen], self.labels[chosen])


def folders_below(folder: Path, depth: int = SEARCH_DEPTH) -> Iterator[list[Path]]:
    """`folder` and the folders below it: a list for each level, in the order of their names."""
    level = [folder]
    for _ in range(depth + 1):
        yield level
        level = [Path(entry.path) for above in level for entry in _scan(above) if entry.is_dir()]


def the_one_below(folder: Path, is_it: Callable[[Path], object]) -> Path | None:
    """The highest of `folder` and those below it that `is_it`; None where there is none.

    Raises UserError where there are several: data sets of one form, and only the user knows which.
    """
    for level in folders_below(folder):
        if found := [candidate for candidate in level if is_it(candidate)]:
            if len(found) > 1:
                names = ", ".join(str(candidate) for candidate in found)
                raise UserError(
                    f"{folder} holds {len(found)} data sets of that form: give one of {names} with --data"
                )
            return found[0]
    return None


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Visible entries of a folder by name; none where it may not be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name
            )
    except PermissionError:
        return []


def class_folders(part: Path) -> list[Path]:
    return [Path(entry.path) for entry in _scan(part) if entry.is_dir()]


def image_files(folder: Path) -> list[Path]:
    """JPEG and PNG files of a folder by name. Raises UserError where there are none."""
    found = [
        Path(entry.path)
        for entry in _scan(folder)
        if entry.name.lower().endswith((".jpg", ".jpeg", ".png"))
    ]
    if not found:
        raise UserError(
            f"{folder} shows no JPEG and no PNG file: put the images of this class there, or remove it"
        )
    return found


def open_image(path: Path, enough: int | None = None) -> Image.Image:
    """The decoded image in RGB; a JPEG no larger than it must be for `enough` pixels a side. Raises UserError."""
    try:
        with Image.open(path) as image:
            if enough:
                image.draft("RGB", (enough, enough))
            return image.convert("RGB")
    except (
        OSError,
        UnidentifiedImageError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}): replace it or remove it"
        ) from error


def cached(
    folder: Path, paths: list[Path], shape: tuple[int, ...], decode: Callable[[], Bytes]
) -> Bytes:
    """What `decode` makes of the images, an array of (N, *shape), from a cache file where there is one: the next start takes no time.

    The file lies in `folder` (on a shared volume one node's work then serves all), or in the user's cache folder where
    `folder` is read-only; where neither can be written there is no cache. Its name is a hash of the images' names, sizes
    and times, and it appears whole or not at all, so that any number of processes and nodes may do this at once. It is
    mapped into memory, so that the processes of a node share one copy.
    """
    shape = (len(paths), *shape)
    name = f".ddp_trainer-{_fingerprint(folder, paths)}.npy"
    places = [place / name for place in (folder, _user_cache())]
    for place in places:
        if (pixels := _map(place, shape)) is not None:
            return pixels
    decoded = decode()
    for place in places:
        if _write_atomically(place, decoded) and (pixels := _map(place, shape)) is not None:
            return pixels
    return decoded


def _fingerprint(folder: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): replace it or remove it"
            ) from error
        digest.update(
            f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ddp_trainer"


def _map(path: Path, shape: tuple[int, ...]) -> Bytes | None:
    try:
        pixels: Bytes = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    return pixels if pixels.shape == shape and pixels.dtype == np.uint8 else None


def _write_atomically(path: Path, pixels: Bytes) -> bool:
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.save(file, pixels)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:  # read-only, or no space left: a cache is not worth an error
        with suppress(OSError):  # a read-only file system refuses to remove even what is not there
            partial.unlink(missing_ok=True)
        return False
    return True
