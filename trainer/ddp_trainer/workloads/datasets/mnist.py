"""MNIST from its original IDX files, in the user's folder."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddp_trainer.errors import UserError
from ddp_trainer.workloads.datasets.images import SEARCH_DEPTH, Images, the_one_below

HELP = (
    "get the four files from https://yann.lecun.com/exdb/mnist or a mirror, and give their folder "
    "with --data"
)
CLASSES = 10
SHAPE = (28, 28)

# The IDX format's code of the only type in MNIST.
UNSIGNED_BYTES = 8


def load(folder: Path) -> tuple[Images, Images, bool]:
    """Return MNIST's training set, its test set, and True if both come from the test set's files.

    The IDX files are at or below `folder`, with or without gzip. Images have the shape
    (N, 1, 28, 28). All four files give 60,000 and 10,000 images. If only the two files of the test
    set are found, its 10,000 images are split: sorted by class, every fifth image, beginning with
    the first, is for testing (2,000), and the other 8,000 are for training.

    Raises UserError if nothing is found or a file is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"--data: folder {folder} does not exist; {HELP}")
    place = the_one_below(folder, lambda candidate: bool(_files(candidate, "t10k")))
    if place is None:
        raise UserError(
            f"--data: no t10k-images-idx3-ubyte (.gz) with its labels in {folder} or up to "
            f"{SEARCH_DEPTH} folders below; {HELP}"
        )
    test = _part(place, "t10k")
    if _files(place, "train"):
        return _part(place, "train"), test, False
    return *_split(test), True


def _names(part: str) -> list[str]:
    return [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]


def _files(folder: Path, part: str) -> list[Path]:
    """Return a part's existing files: its images, its labels, each with or without gzip."""
    found = []
    for name in _names(part):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                found.append(path)
                break
    return found


def _part(folder: Path, part: str) -> Images:
    paths = _files(folder, part)
    names = _names(part)
    if len(paths) != len(names):
        there = " and ".join(path.name for path in paths)
        raise UserError(f"{folder}: has {there}, not {' and '.join(names)}; {HELP}")

    pixels, labels = (_read(path) for path in paths)
    fits = (
        len(labels) > 0
        and pixels.shape[1:] == SHAPE
        and labels.shape == pixels.shape[:1]
        and labels.max() < CLASSES
    )
    if not fits:
        raise UserError(f"{folder}: images and labels of {part} do not belong together; {HELP}")
    return Images(pixels[:, None], labels.astype(np.int64))


def _read(path: Path) -> NDArray[np.uint8]:
    """Return the numbers of an IDX file.

    The format is: two zero bytes, the type code, the number of dimensions, each dimension as 4
    bytes big-endian, and the numbers.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # Errors of numpy on short or wrong headers become a UserError below.
        dimensions = raw[3]
        shape = tuple(np.frombuffer(raw, ">i4", dimensions, offset=4))
        if raw[:3] != bytes([0, 0, UNSIGNED_BYTES]):
            raise ValueError(f"it begins with {raw[:4].hex()}")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path}: not a complete IDX file ({error}); {HELP}") from error


def _split(images: Images) -> tuple[Images, Images]:
    by_class = np.argsort(images.labels, kind="stable")
    is_test = np.arange(len(images)) % 5 == 0
    # Within both sets the images keep the order of the files.
    train = np.sort(by_class[~is_test])
    test = np.sort(by_class[is_test])
    return (
        Images(images.pixels[train], images.labels[train]),
        Images(images.pixels[test], images.labels[test]),
    )
