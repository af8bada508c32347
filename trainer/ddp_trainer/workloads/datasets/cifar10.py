"""CIFAR-10 from a folder that the user names, in any of its three forms."""

import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ddp_trainer.errors import UserError
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
    "get CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html, unpack the binary or the python archive, "
    "and give the folder with --data"
)


def load(folder: Path) -> tuple[Images, Images]:
    """CIFAR-10 as training and test set, shape (N, 3, 32, 32), in any of the three forms at or below `folder`.

    Image folders are decoded once and kept in a cache (see `images.cached`). Raises UserError when nothing is found, or when
    what is found is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: {HELP}")
    for candidate in chain.from_iterable(folders_below(folder)):
        for is_there, read in _FORMS:
            if is_there(candidate):
                return read(candidate)
    raise UserError(
        f"no CIFAR-10 in {folder} or up to {SEARCH_DEPTH} folders below (looked for train/<class>/*.jpg or .png and "
        f"test/<class>/, data_batch_1.bin, data_batch_1): {HELP}"
    )


# --- The original binary form: records of 1 byte label and 3,072 bytes image, each colour plane row by row.


def _has_binary(folder: Path) -> bool:
    return (folder / "data_batch_1.bin").is_file()


def _read_binary(folder: Path) -> tuple[Images, Images]:
    def read(paths: list[Path]) -> Images:
        parts = []
        for path in paths:
            raw = np.frombuffer(_read(path), np.uint8)
            if not len(raw) or len(raw) % 3073:
                raise UserError(
                    f"{path} has {len(raw)} bytes, no multiple of 3,073: unpack the archive once more"
                )
            parts.append(raw.reshape(-1, 3073))
        records = np.concatenate(parts)
        return _checked(records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64), folder)

    return read([folder / f"{name}.bin" for name in TRAINING]), read([folder / "test_batch.bin"])


# --- The original python form: pickled dictionaries with `data` of shape (N, 3072) and a list of `labels`.


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
                f"the batches in {folder} are not CIFAR-10's ({error}): unpack the archive once more"
            ) from error
        return _checked(pixels, labels, folder)

    return read([folder / name for name in TRAINING]), read([folder / "test_batch"])


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
        return {
            key.encode() if isinstance(key, str) else key: value for key, value in batch.items()
        }
    except Exception as error:  # what pickle raises on damaged bytes is not documented
        raise UserError(f"{path} cannot be read ({error}): unpack the archive once more") from error


# --- Image folders: {train,test}/<class>/<image>, classes numbered in the order of their names.


def _has_image_folders(folder: Path) -> bool:
    return all(
        (folder / part).is_dir() and class_folders(folder / part) for part in ("train", "test")
    )


def _read_image_folders(folder: Path) -> tuple[Images, Images]:
    """Images in the order of class and file name, so the same everywhere and whichever way they were unpacked."""
    paths: list[Path] = []
    labels: list[int] = []
    sizes: list[int] = []
    for part in ("train", "test"):
        for class_folder in class_folders(folder / part):
            if class_folder.name not in CLASSES:
                raise UserError(
                    f"{class_folder} is no class of CIFAR-10 ({', '.join(CLASSES)}): remove it"
                )
            images = image_files(class_folder)
            paths += images
            labels += [CLASSES.index(class_folder.name)] * len(images)
        sizes.append(len(paths))
    pixels = cached(folder, paths, SHAPE, lambda: _decode(paths))
    numbers = np.asarray(labels, np.int64)
    train = sizes[0]
    return Images(pixels[:train], numbers[:train]), Images(pixels[train:], numbers[train:])


def _decode(paths: list[Path]) -> Bytes:
    pixels = np.empty((len(paths), *SHAPE), np.uint8)
    for row, path in enumerate(paths):
        decoded = np.asarray(open_image(path))
        if decoded.shape != (32, 32, 3):
            raise UserError(
                f"{path} has {decoded.shape[1]} x {decoded.shape[0]} pixels, CIFAR-10 has 32 x 32"
            )
        pixels[row] = decoded.transpose(2, 0, 1)
    return pixels


_FORMS: tuple[tuple[Callable[[Path], object], Callable[[Path], tuple[Images, Images]]], ...] = (
    (_has_binary, _read_binary),
    (_has_python, _read_python),
    (_has_image_folders, _read_image_folders),
)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): unpack the archive once more"
        ) from error


def _checked(pixels: Bytes, labels: Labels, folder: Path) -> Images:
    if (
        len(pixels) != len(labels)
        or not len(labels)
        or labels.min() < 0
        or labels.max() >= len(CLASSES)
    ):
        raise UserError(
            f"the labels in {folder} are not those of CIFAR-10: unpack the archive once more"
        )
    return Images(np.ascontiguousarray(pixels), labels)
