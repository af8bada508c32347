"""How the tests are spread over the two workers of `make test`, and where real data come from.

What shares something that is slow to make stays together. The cluster tests mostly wait for a cluster, so they come first, in
one worker, and the other does the rest meanwhile. Plain `pytest` runs the same in one process, which `-s` and `--pdb` need.

DDP_TEST_DATA=...    folder with cifar10.tar.zst, hymenoptera.tar.zst and the folder mnist
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOGETHER = (
    "tests/cluster/",
    "tests/apiserver/",
)  # share a cluster, an API server; elsewhere a file is a group

REAL_DATA = Path(os.environ.get("DDP_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Where the data sets are, if they are."""
    return REAL_DATA


@pytest.fixture(scope="session")
def real_data() -> Callable[..., Path]:
    """Puts a real data set below a folder, all of it or the members of its archive that match patterns; else skips, in CI too."""

    def put(name: str, below: Path, *patterns: str) -> Path:
        folder, archive = REAL_DATA / name, REAL_DATA / f"{name}.tar.zst"
        if archive.is_file() and shutil.which("zstd"):
            words = [
                "tar",
                "--zstd",
                "-xf",
                archive,
                "-C",
                below,
                "--no-same-owner",
                "--wildcards",
                *patterns,
            ]
            subprocess.run(words, check=True, timeout=300)
        elif folder.is_dir() and not patterns:
            (below / name).mkdir(exist_ok=True)
            for file in folder.iterdir():
                shutil.copyfile(file, below / name / file.name)
        else:
            pytest.skip(
                f"there is neither {archive} (and zstd) nor {folder}; DDP_TEST_DATA names the folder with them"
            )
        return below

    return put


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker for each group. (The mark `xdist_group` does nothing with pytest 9.2 and pytest-xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next(
                (folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::")[0]
            )

    return InGroups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker the cluster's come first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/cluster/"))
