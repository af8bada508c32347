"""Distribution of the tests over the workers of `make test`, their signals, and the real data.

Tests that share something slow to make stay in one worker. The cluster tests take longest, so one
worker begins with them. They and the tests of the API server mostly wait, so three workers keep two
cores busy. Plain `pytest` runs all tests in one process, which `-s` and `--pdb` need.

DDP_TEST_DATA=...    folder with cifar10.tar.zst, hymenoptera.tar.zst and the folder mnist
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Tests that share a cluster, an API server or launched ranks, by the beginning of their path. The
# tests of any other file stay together too.
TOGETHER = ("tests/cluster/", "tests/apiserver/", "tests/trainer/test_ranks")

# The order in which a worker takes them. The cluster tests take longest. The others end with the
# short ones, so that no worker is idle for long at the end.
ORDER = ("tests/cluster/", "tests/trainer/test_real_images.py", "tests/trainer/")

# A job in the background of a shell ignores these, and so would the processes that tests signal.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        # A handler becomes the default action in a new program.
        signal.signal(number, lambda *_: None)
signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_DATA = Path(os.environ.get("DDP_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of the data sets, which may not exist."""
    return REAL_DATA


@pytest.fixture(scope="session")
def real_data() -> Callable[..., Path]:
    """Return a function that copies a data set, or unpacks members of its archive.

    If the data set is not found, it skips the test, with CI=true too.
    """

    def put(name: str, below: Path, *patterns: str) -> Path:
        folder = REAL_DATA / name
        archive = REAL_DATA / f"{name}.tar.zst"
        if archive.is_file() and shutil.which("zstd"):
            command = ["tar", "--zstd", "-xf", archive, "-C", below, "--no-same-owner"]
            subprocess.run([*command, "--wildcards", *patterns], check=True, timeout=300)
        elif folder.is_dir() and not patterns:
            (below / name).mkdir(exist_ok=True)
            for file in folder.iterdir():
                shutil.copyfile(file, below / name / file.name)
        else:
            pytest.skip(
                f"needs {archive} (and zstd) or {folder}. "
                "Set DDP_TEST_DATA to the folder with the data sets"
            )
        return below

    return put


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group of tests to one worker.

    The mark `xdist_group` has no effect with pytest 9.2 and pytest-xdist 3.8.
    """
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for prefix in TOGETHER:
                if nodeid.startswith(prefix):
                    return prefix
            return nodeid.split("::")[0]

    return InGroups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests of a worker by ORDER. Within a place they stay as collected."""

    def place(item: pytest.Item) -> int:
        for index, prefix in enumerate(ORDER):
            if item.nodeid.startswith(prefix):
                return index
        return len(ORDER)

    if hasattr(config, "workerinput"):
        items.sort(key=place)
