"""CIFAR-10 from the user's folder, in any of its three forms."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddp_trainer.errors import UserError, path_error
from ddp_trainer.workloads.datasets.images import (
    SEARCH_DEPTH,
    Bytes,
    Images,
    Labels,
    cached,
    class_folders,
    folders_below,
    image_files,
    open_image,
)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
HELP = (
    "get CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html, unpack the binary or the "
    "python archive, and give the folder with --data"
)
UNPACK_AGAIN = "unpack the archive again"


def load(folder: Path) -> tuple[Images, Images]:
    """Return CIFAR-10's training and test set, images of shape (N, 3, 32, 32).

    The data may have any of the three forms, at or below `folder`. Image folders are decoded once
    and then read from a cache (`images.cached`). Raises UserError if nothing is found or a file is
    damaged.
    """
    if not folder.is_dir():
        raise UserError(f"--data: folder {folder} does not exist; {HELP}")
    for level in folders_below(folder):
        for candidate in level:
            for is_this_form, read in _FORMS:
                if is_this_form(candidate):
                    return read(candidate)
    raise UserError(
        f"no CIFAR-10 in {folder} or up to {SEARCH_DEPTH} folders below (looked for "
        "train/<class>/*.jpg or .png and test/<class>/, data_batch_1.bin, data_batch_1); "
        f"{HELP}"
    )


# --- The binary form: records of 1 byte label and 3,072 bytes image, each colour row by row.


def _has_binary(folder: Path) -> bool:
    return (folder / "data_batch_1.bin").is_file()


def _read_binary(folder: Path) -> tuple[Images, Images]:
    def read(paths: list[Path]) -> Images:
        records = np.concatenate([_records(path) for path in paths])
        pixels = records[:, 1:].reshape(-1, *SHAPE)
        return _checked(pixels, records[:, 0].astype(np.int64), folder)

    return read([folder / f"{name}.bin" for name in TRAINING]), read([folder / "test_batch.bin"])


def _records(path: Path) -> Bytes:
    """Return the records of a binary file, shape (N, 3073)."""
    try:
        raw = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); {UNPACK_AGAIN}"
        raise path_error(message, error) from error
    if len(raw) == 0 or len(raw) % 3073 != 0:
        raise UserError(
            f"{path}: the size must be a multiple of 3,073 bytes, got {len(raw)}; {UNPACK_AGAIN}"
        )
    return raw.reshape(-1, 3073)


# --- The python form: pickled dictionaries with `data` of shape (N, 3072) and a list of `labels`.


def _has_python(folder: Path) -> bool:
    return (folder / "data_batch_1").is_file()


def _read_python(folder: Path) -> tuple[Images, Images]:
    def read(paths: list[Path]) -> Images:
        batches = [_unpickle(path) for path in paths]
        try:
            pixels = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches])
            labels = np.concatenate([np.asarray(batch[b"labels"], np.int64) for batch in batches])
            pixels = pixels.reshape(-1, *SHAPE)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{folder}: its batches are not CIFAR-10's ({error}); {UNPACK_AGAIN}"
            ) from error
        return _checked(pixels, labels, folder)

    return read([folder / name for name in TRAINING]), read([folder / "test_batch"])


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for numpy arrays only.

    A pickle can call any function that it names, so one from the internet must not name others.
    """

    # numpy 2 renamed `numpy.core`; files of both names exist.
    _ALLOWED = frozenset(
        [
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR-10 file does")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickle(path: Path) -> dict[bytes, Any]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        return {
            key.encode() if isinstance(key, str) else key: value for key, value in batch.items()
        }
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); {UNPACK_AGAIN}"
        raise path_error(message, error) from error
    except Exception as error:
        # The exceptions that pickle raises on damaged bytes are not documented.
        raise UserError(f"{path}: cannot be read ({error}); {UNPACK_AGAIN}") from error


# --- Image folders: {train,test}/<class>/<image>.


def _has_image_folders(folder: Path) -> bool:
    return all(
        (folder / part).is_dir() and class_folders(folder / part) for part in ("train", "test")
    )


def _read_image_folders(folder: Path) -> tuple[Images, Images]:
    """Read images in the order of class and file name, so the same on every file system."""
    paths: list[Path] = []
    labels: list[int] = []
    sizes: list[int] = []
    for part in ("train", "test"):
        for class_folder in class_folders(folder / part):
            if class_folder.name not in CLASSES:
                raise UserError(
                    f"{class_folder}: not a class of CIFAR-10 ({', '.join(CLASSES)}); remove the "
                    "folder"
                )
            images = image_files(class_folder)
            paths += images
            labels += [CLASSES.index(class_folder.name)] * len(images)
        sizes.append(len(paths))

    # Both sets share one cache file.
    pixels = cached(folder, paths, SHAPE, lambda: _decode(paths))
    numbers = np.asarray(labels, np.int64)
    train = sizes[0]
    return Images(pixels[:train], numbers[:train]), Images(pixels[train:], numbers[train:])


def _decode(paths: list[Path]) -> Bytes:
    pixels = np.empty((len(paths), *SHAPE), np.uint8)
    for row, path in enumerate(paths):
        decoded = np.asarray(open_image(path))
        height, width, _ = decoded.shape
        if (height, width) != SHAPE[1:]:
            raise UserError(f"{path}: must have 32 x 32 pixels, got {width} x {height}")
        pixels[row] = decoded.transpose(2, 0, 1)
    return pixels


def _checked(pixels: Bytes, labels: Labels, folder: Path) -> Images:
    """Return the images. Raises UserError if the labels do not fit."""
    fits = (
        len(labels) > 0
        and len(pixels) == len(labels)
        and labels.min() >= 0
        and labels.max() < len(CLASSES)
    )
    if not fits:
        raise UserError(f"{folder}: its labels are not CIFAR-10's; {UNPACK_AGAIN}")
    return Images(np.ascontiguousarray(pixels), labels)


_FORMS: list[tuple[Callable[[Path], bool], Callable[[Path], tuple[Images, Images]]]] = [
    (_has_binary, _read_binary),
    (_has_python, _read_python),
    (_has_image_folders, _read_image_folders),
]
