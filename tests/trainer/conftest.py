"""Fixtures: small data in the forms that users have, and the end of whatever a failing test left running."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddp_trainer.workloads.datasets.cifar10 import CLASSES

from . import launch

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch):
    """Kill what a test started and did not wait for."""
    started = []
    start = launch.Run.__init__

    def remember(self, *arguments):
        start(self, *arguments)
        started.append(self)

    monkeypatch.setattr(launch.Run, "__init__", remember)
    yield
    for run in started:
        if run.process.poll() is None:
            run.kill()


def image_folders(folder: Path, per_class: dict[str, int], suffix: str = "png") -> Path:
    """{train,test}/<class>/NNNN.png with random pixels: `per_class` images of each class in train and in test."""
    random = np.random.default_rng(0)
    for part, count in per_class.items():
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number:04}.{suffix}")
    return folder


@pytest.fixture(scope="session")
def tiny_cifar10(tmp_path_factory) -> Path:
    """100 training and 30 test images in the layout of image folders."""
    return image_folders(tmp_path_factory.mktemp("cifar10"), {"train": 10, "test": 3})
