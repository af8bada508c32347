"""Data sets as arrays in memory: the digits that ship with the package, CIFAR-10 from a folder that the user names."""

import gzip
import hashlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ddp_trainer.errors import UserError

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_HELP = (
    "get CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html, unpack the binary or the python archive, "
    "and give the folder with --data"
)
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


def digits() -> tuple[Images, Images]:
    """The 1,797 handwritten digits of the package as training and test set; pixels 0 to 16, shape (N, 1, 8, 8).

    Every fifth image, from the first, is for testing (360), the other 1,437 are for training. The origin and the
    licence of the data are in datasets/digits.txt.
    """
    with files("ddp_trainer").joinpath("datasets/digits.csv.gz").open("rb") as packed, gzip.open(packed) as table:
        rows = np.loadtxt(table, delimiter=",", dtype=np.int64)
    pixels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = rows[:, -1].copy()
    test = np.arange(len(rows)) % 5 == 0
    return Images(pixels[~test], labels[~test]), Images(pixels[test], labels[test])


def cifar10(folder: Path) -> tuple[Images, Images]:
    """CIFAR-10 as training and test set, shape (N, 3, 32, 32), in any of the three forms at or below `folder`.

    Image folders are decoded once and kept in a cache (see `_cached`). Raises UserError when nothing is found, or when
    what is found is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: {CIFAR10_HELP}")
    for candidate in _folders_below(folder, SEARCH_DEPTH):
        for is_there, read in _FORMS:
            if is_there(candidate):
                train, test = read(candidate)
                if not len(train) or not len(test):
                    raise UserError(f"{candidate} holds no training or no test images: {CIFAR10_HELP}")
                return train, test
    raise UserError(
        f"no CIFAR-10 in {folder} or up to {SEARCH_DEPTH} folders below (looked for train/<class>/*.jpg or .png and "
        f"test/<class>/, data_batch_1.bin, data_batch_1): {CIFAR10_HELP}"
    )


def _folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """`folder` and the folders below it, level by level and in the order of their names."""
    level = [folder]
    for _ in range(depth + 1):
        yield from level
        level = [Path(entry.path) for above in level for entry in _scan(above) if entry.is_dir()]


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Visible entries of a folder by name; none where it may not be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except PermissionError:
        return []


# --- The original binary form: records of 1 byte label and 3,072 bytes image, each colour plane row by row.


def _has_binary(folder: Path) -> bool:
    return (folder / "data_batch_1.bin").is_file()


def _read_binary(folder: Path) -> tuple[Images, Images]:
    def read(paths: list[Path]) -> Images:
        parts = []
        for path in paths:
            raw = np.frombuffer(_read(path), np.uint8)
            if not len(raw) or len(raw) % 3073:
                raise UserError(f"{path} has {len(raw)} bytes, no multiple of 3,073: unpack the archive once more")
            parts.append(raw.reshape(-1, 3073))
        records = np.concatenate(parts)
        return _checked(records[:, 1:].reshape(-1, *CIFAR10_SHAPE), records[:, 0].astype(np.int64), folder)

    return read(sorted(folder.glob("data_batch_*.bin"))), read([folder / "test_batch.bin"])


# --- The original python form: pickled dictionaries with `data` of shape (N, 3072) and a list of `labels`.


def _has_python(folder: Path) -> bool:
    return (folder / "data_batch_1").is_file()


def _read_python(folder: Path) -> tuple[Images, Images]:
    def read(paths: list[Path]) -> Images:
        batches = [_unpickle(path) for path in paths]
        pixels = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches])
        labels = np.concatenate([np.asarray(batch[b"labels"], np.int64) for batch in batches])
        return _checked(pixels.reshape(-1, *CIFAR10_SHAPE), labels, folder)

    return read(sorted(p for p in folder.glob("data_batch_*") if not p.suffix)), read([folder / "test_batch"])


class _ArraysOnly(pickle.Unpickler):
    """A pickle may call anything it names; one that came from the internet may name numpy's arrays and nothing else."""

    _ALLOWED = frozenset(
        (f"numpy{core}", name)
        for core, name in (
            ("", "ndarray"),
            ("", "dtype"),
            (".core.multiarray", "_reconstruct"),
            ("._core.multiarray", "_reconstruct"),
            (".core.numeric", "_frombuffer"),
            ("._core.numeric", "_frombuffer"),
        )
    ) | {("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR-10 file does")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickle(path: Path) -> dict[bytes, Any]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        return {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: unpack the archive once more") from error
    except Exception as error:  # what pickle raises on damaged bytes is not documented
        raise UserError(f"{path} cannot be read ({error}): unpack the archive once more") from error


# --- Image folders: {train,test}/<class>/<image>, classes numbered in the order of their names.


def _has_image_folders(folder: Path) -> bool:
    return all((folder / part).is_dir() and _class_folders(folder / part) for part in ("train", "test"))


def _class_folders(part: Path) -> list[Path]:
    return [Path(entry.path) for entry in _scan(part) if entry.is_dir()]


def _read_image_folders(folder: Path) -> tuple[Images, Images]:
    """Images in the order of class and file name, so the same everywhere and whichever way they were unpacked."""
    paths: list[Path] = []
    labels: list[int] = []
    sizes: list[int] = []
    for part in ("train", "test"):
        for class_folder in _class_folders(folder / part):
            if class_folder.name not in CIFAR10_CLASSES:
                raise UserError(f"{class_folder} is no class of CIFAR-10 ({', '.join(CIFAR10_CLASSES)}): remove it")
            images = [Path(e.path) for e in _scan(class_folder) if e.name.lower().endswith((".jpg", ".jpeg", ".png"))]
            paths += images
            labels += [CIFAR10_CLASSES.index(class_folder.name)] * len(images)
        sizes.append(len(paths))
    pixels = _cached(folder, paths, lambda: _decode(paths))
    numbers = np.asarray(labels, np.int64)
    train = sizes[0]
    return Images(pixels[:train], numbers[:train]), Images(pixels[train:], numbers[train:])


def _decode(paths: list[Path]) -> Bytes:
    pixels = np.empty((len(paths), *CIFAR10_SHAPE), np.uint8)
    for row, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                decoded = np.asarray(image.convert("RGB"))
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f"{path} cannot be read as an image ({error}): replace it or remove it") from error
        if decoded.shape != (32, 32, 3):
            raise UserError(f"{path} has {decoded.shape[1]} x {decoded.shape[0]} pixels, CIFAR-10 has 32 x 32")
        pixels[row] = decoded.transpose(2, 0, 1)
    return pixels


def _cached(folder: Path, paths: list[Path], decode: Callable[[], Bytes]) -> Bytes:
    """What `decode` makes of the images, from a cache file where there is one: the next start takes no time.

    The file lies in `folder` (on a shared volume one node's work then serves all), or in the user's cache folder where
    `folder` is read-only; where neither can be written there is no cache. Its name is a hash of the images' names, sizes
    and times, and it appears whole or not at all, so that any number of processes and nodes may do this at once. It is
    mapped into memory, so that the processes of a node share one copy.
    """
    shape = (len(paths), *CIFAR10_SHAPE)
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
        status = path.stat()
        digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
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


_FORMS: tuple[tuple[Callable[[Path], object], Callable[[Path], tuple[Images, Images]]], ...] = (
    (_has_binary, _read_binary),
    (_has_python, _read_python),
    (_has_image_folders, _read_image_folders),
)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: unpack the archive once more") from error


def _checked(pixels: Bytes, labels: Labels, folder: Path) -> Images:
    if len(pixels) != len(labels) or labels.min() < 0 or labels.max() >= len(CIFAR10_CLASSES):
        raise UserError(f"the labels in {folder} are not those of CIFAR-10: unpack the archive once more")
    return Images(np.ascontiguousarray(pixels), labels)
