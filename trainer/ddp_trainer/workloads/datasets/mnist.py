"""MNIST from its original IDX files, in a folder that the user names."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddp_trainer.errors import UserError
from ddp_trainer.workloads.datasets.images import SEARCH_DEPTH, Images, the_one_below

HELP = "get the four files from https://yann.lecun.com/exdb/mnist or a mirror, and give their folder with --data"
SHAPE = (28, 28)
UNSIGNED_BYTES = 8  # the type code of the IDX format; the only one that MNIST has


def load(folder: Path) -> tuple[Images, Images, bool]:
    """MNIST from IDX files at or below `folder`, packed by gzip or not: training and test set, images of shape (N, 1, 28, 28),
    and whether both are parts of the test set.

    With all four files: 60,000 and 10,000 images. Where only the test set's 10,000 are, they are split by class: sorted
    by class, every fifth image, from the first, is for testing (2,000), the other 8,000 are for training.
    Raises UserError when nothing is found, or when what is found is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: {HELP}")
    place = the_one_below(folder, lambda candidate: _files(candidate, "t10k"))
    if place is None:
        raise UserError(
            f"no t10k-images-idx3-ubyte (.gz) with its labels in {folder} or up to {SEARCH_DEPTH} folders below: {HELP}"
        )
    test = _part(place, "t10k")
    if not _files(place, "train"):
        return *_split(test), True
    return _part(place, "train"), test, False


def _names(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _files(folder: Path, part: str) -> list[Path]:
    """Images and labels of that part, as far as they are there, each packed or not."""
    found = (
        next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        for name in _names(part)
    )
    return [path for path in found if path]


def _part(folder: Path, part: str) -> Images:
    paths, names = _files(folder, part), _names(part)
    if len(paths) != len(names):
        raise UserError(
            f"{folder} has {' and '.join(path.name for path in paths)}, not {' and '.join(names)}: {HELP}"
        )
    pixels, labels = map(_read, paths)
    if (
        not len(labels)
        or pixels.shape[1:] != SHAPE
        or labels.shape != pixels.shape[:1]
        or labels.max(initial=0) > 9
    ):
        raise UserError(f"images and labels of {part} in {folder} do not belong together: {HELP}")
    return Images(pixels[:, None], labels.astype(np.int64))


def _read(path: Path) -> NDArray[np.uint8]:
    """An IDX file: two zero bytes, the type code, the number of dimensions, each as 4 bytes big-endian, the numbers."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dimensions = raw[3]
        shape = tuple(np.frombuffer(raw, ">i4", dimensions, offset=4))
        if raw[:3] != bytes([0, 0, UNSIGNED_BYTES]):
            raise ValueError(f"it begins with {raw[:4].hex()}")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path} is no whole IDX file ({error}): {HELP}") from error


def _split(images: Images) -> tuple[Images, Images]:
    by_class = np.argsort(images.labels, kind="stable")
    test = np.arange(len(images)) % 5 == 0
    first, second = (np.sort(by_class[chosen]) for chosen in (~test, test))
    return (
        Images(images.pixels[first], images.labels[first]),
        Images(images.pixels[second], images.labels[second]),
    )
