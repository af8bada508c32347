"""Fixtures: small data sets, process groups of several ranks, and an end for leftover processes."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from ddp_trainer.workloads.datasets.cifar10 import CLASSES

from . import every_rank, launch

# Several test workers share the cores. Threads waiting actively would slow all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Nor may a property fail because of them: by default an example has 200 ms.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch):
    """Kill the unfinished processes of a test."""
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
    """Write {train,test}/CLASS/NNNN.png with random pixels.

    `per_class` gives the number of images of each class for "train" and "test".
    """
    random = np.random.default_rng(0)
    for part, count in per_class.items():
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number:04}.{suffix}")
    return folder


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """Return a function to get the outcomes of a number of ranks. Each launch runs once."""
    launcher = every_rank.Launcher(request.module.__name__)

    @cache
    def launch_once(count: int) -> every_rank.Outcomes:
        return launcher.launch(count, tmp_path_factory.mktemp(f"ranks-{count}"))

    yield launch_once
    launcher.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of several ranks the numbers of ranks. Four ranks notice what two do."""
    if "ranks" in metafunc.fixturenames:
        two = pytest.param(2, id="2 ranks", marks=pytest.mark.slow)
        numbers = [two, pytest.param(4, id="4 ranks")]
        metafunc.parametrize("ranks", numbers, indirect=True, scope="module")


@pytest.fixture(scope="module")
def ranks(request, launched) -> every_rank.Outcomes:
    """Return what the marked functions returned on each of several ranks."""
    return launched(request.param)


@pytest.fixture(scope="module")
def single(launched) -> every_rank.Outcomes:
    """Return what the marked functions returned on one process without a group."""
    return launched(1)


@pytest.fixture(scope="session")
def tiny_cifar10(tmp_path_factory) -> Path:
    """Return a folder with 100 training and 30 test images, in one folder for each class."""
    return image_folders(tmp_path_factory.mktemp("cifar10"), {"train": 10, "test": 3})
