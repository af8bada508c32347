"""The workers of `make test`, the signals of the tests, and the folder of real data.

`make test` has four workers on two cores, because the cluster tests mostly wait. Plain `pytest`
runs all tests in one process, as needed for `-s` and `--pdb`.

DDP_TEST_DATA=...    folder with cifar10.tar.zst, hymenoptera.tar.zst and the folder mnist
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import costs
import pytest
import scheduling

# The parent of pytest may ignore these, as a shell does for a job in its background. The programs
# of the tests would inherit that.
for number in (signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGABRT):
    if signal.getsignal(number) == signal.SIG_IGN:
        # A handler becomes the default action in a new program.
        signal.signal(number, lambda *_: None)
signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_DATA = Path(os.environ.get("DDP_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of the data sets. It may not exist."""
    return REAL_DATA


@pytest.fixture(scope="session")
def real_data() -> Callable[..., Path]:
    """Return a function to copy a data set, or to unpack members of its archive.

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


# Some packages raise the limit of recursion for the whole process, and other tests would have it.
RECURSION_LIMIT = sys.getrecursionlimit()


def pytest_runtest_setup() -> None:
    if sys.getrecursionlimit() != RECURSION_LIMIT:
        sys.setrecursionlimit(RECURSION_LIMIT)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.new_scheduler(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests. In the printing process, also add their costs up."""
    config.pluginmanager.register(costs.Meter())
    # The workers start later and inherit it.
    scheduling.run_name()
    if not is_worker(config):
        config.pluginmanager.register(costs.Table())
        config.pluginmanager.register(scheduling.ClusterEnd())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without a search for garbage: it would take half of the time.

    Later searches, also in forks, need not look at the collected objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # By default every 700 new objects begin a search, a fifth of the time of some tests.
        gc.set_threshold(50_000)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests of a worker."""
    if is_worker(config):
        scheduling.sort(items)


def is_worker(config: pytest.Config) -> bool:
    """Return True in a worker of pytest-xdist."""
    return hasattr(config, "workerinput")
