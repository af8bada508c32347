"""The 1,797 handwritten digits in the package."""

import gzip
from importlib.resources import files

import numpy as np

from ddp_trainer.workloads.datasets.images import Images


def load() -> tuple[Images, Images]:
    """Return the training set (1,437) and the test set (360), images of shape (N, 1, 8, 8).

    Pixels have values from 0 to 16. Every fifth image, beginning with the first, is in the test
    set. The file digits.txt has the source and the licence of the data.
    """
    with (
        files(__package__).joinpath("digits.csv.gz").open("rb") as packed,
        gzip.open(packed) as table,
    ):
        rows = np.loadtxt(table, delimiter=",", dtype=np.int64)

    # A row has 64 pixels and then the label.
    pixels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = rows[:, -1].copy()
    test = np.arange(len(rows)) % 5 == 0
    return Images(pixels[~test], labels[~test]), Images(pixels[test], labels[test])
