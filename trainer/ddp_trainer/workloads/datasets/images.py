"""Common code of the data sets: labelled images as arrays, image folders, and a decoding cache."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ddp_trainer.errors import UserError
from ddp_trainer.files import write_atomically

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

# Levels of folders to search for data sets, below the user's folder.
SEARCH_DEPTH = 3

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Images:
    """Images with labels.

    `pixels` has the shape (N, channels, height, width), `labels` the shape (N,). Labels count
    from 0.
    """

    pixels: Bytes
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int | None) -> "Images":
        """Return `count` images at even distances, so that all classes are among them.

        Return all images if `count` is None or not smaller than their number.
        """
        if count is None or count >= len(self):
            return self
        chosen = np.arange(count) * len(self) // count
        return Images(self.pixels[chosen], self.labels[chosen])


# --- Folders.


def folders_below(folder: Path, depth: int = SEARCH_DEPTH) -> Iterator[list[Path]]:
    """Yield the levels of folders from `folder` down, each a list in the order of names."""
    level = [folder]
    for _ in range(depth + 1):
        yield level
        level = [below for above in level for below in class_folders(above)]


def the_one_below(folder: Path, is_data_set: Callable[[Path], bool]) -> Path | None:
    """Return the highest folder with a data set at or below `folder`, or None.

    `is_data_set` recognises it. Raises UserError if there are several on the same level, because
    only the user can choose one.
    """
    for level in folders_below(folder):
        found = [candidate for candidate in level if is_data_set(candidate)]
        if len(found) > 1:
            names = ", ".join(str(candidate) for candidate in found)
            raise UserError(
                f"--data: {folder} contains {len(found)} data sets of this form; use one of {names}"
            )
        if found:
            return found[0]
    return None


def class_folders(part: Path) -> list[Path]:
    """Return the visible folders in `part` in the order of names."""
    return [Path(entry.path) for entry in _visible(part) if entry.is_dir()]


def image_files(folder: Path) -> list[Path]:
    """Return the JPEG and PNG files of `folder` by name. Raises UserError if there are none."""
    found = []
    for entry in _visible(folder):
        if entry.name.lower().endswith(IMAGE_SUFFIXES):
            found.append(Path(entry.path))
    if not found:
        raise UserError(
            f"{folder}: contains no JPEG or PNG file; put the images of this class there, or "
            "remove the folder"
        )
    return found


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of `folder` by name. Return none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except PermissionError:
        return []
    return sorted(visible, key=lambda entry: entry.name)


def open_image(path: Path, enough: int | None = None) -> Image.Image:
    """Return the decoded image in RGB.

    With `enough`, a JPEG may be decoded at a smaller size of at least so many pixels a side.
    Raises UserError if the file is not an image.
    """
    try:
        with Image.open(path) as image:
            # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size. This is much faster.
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
            f"{path}: cannot be read as an image ({error}); replace it or remove it"
        ) from error


# --- The cache.


def cached(
    folder: Path, paths: list[Path], shape: tuple[int, ...], decode: Callable[[], Bytes]
) -> Bytes:
    """Return the array (N, *shape) of the images `paths`, from a cache file or from `decode`.

    The cache file is in `folder`. On a shared volume it serves all nodes. If `folder` is read-only,
    the file is in the user's cache folder. If neither can be written to, there is no cache.

    The name of the file is a hash of the images' names, sizes and times. The file is written
    completely or not at all, so any number of processes and nodes may do this at the same time.
    It is mapped into memory, so the processes of a node share one copy.

    Raises UserError if an image cannot be read.
    """
    shape = (len(paths), *shape)
    name = f".ddp_trainer-{_fingerprint(folder, paths)}.npy"
    places = [folder / name, _user_cache() / name]
    # Use the file of an earlier start or of another process.
    for place in places:
        pixels = _map(place, shape)
        if pixels is not None:
            return pixels

    # Write the file and map it, so this process shares its memory with the others too.
    decoded = decode()
    for place in places:
        _write_cache(place, decoded)
        pixels = _map(place, shape)
        if pixels is not None:
            return pixels
    return decoded


def _fingerprint(folder: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); replace it or remove it"
            ) from error
        name = path.relative_to(folder)
        # Use size and time instead of the content: reading the content takes long.
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ddp_trainer"


def _map(path: Path, shape: tuple[int, ...]) -> Bytes | None:
    """Return the array in `path`, mapped into memory, or None if it is missing or damaged."""
    try:
        pixels: Bytes = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    return pixels if pixels.shape == shape and pixels.dtype == np.uint8 else None


def _write_cache(path: Path, pixels: Bytes) -> None:
    """Write `pixels` to `path`, or nothing if the disk is full or read-only.

    A failure is not an error, because training works without the cache.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.save(file, pixels), durable=True)
