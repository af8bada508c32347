"""The 1,797 handwritten digits that ship with the package."""

import gzip
from importlib.resources import files

import numpy as np

from ddp_trainer.workloads.datasets.images import Images


def load() -> tuple[Images, Images]:
    """The 1,797 handwritten digits of the package as training and test set; pixels 0 to 16, shape (N, 1, 8, 8).

    Every fifth image, from the first, is for testing (360), the other 1,437 are for training. The origin and the
    licence of the data are in digits.txt.
    """
    with (
        files(__package__).joinpath("digits.csv.gz").open("rb") as packed,
        gzip.open(packed) as table,
    ):
        rows = np.loadtxt(table, delimiter=",", dtype=np.int64)
    pixels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = rows[:, -1].copy()
    test = np.arange(len(rows)) % 5 == 0
    return Images(pixels[~test], labels[~test]), Images(pixels[test], labels[test])
