"""How the tests are spread over the two workers of `make test`: what shares something that is slow to make stays together.

The cluster tests mostly wait for a cluster, so they come first, in one worker, and the other does the rest meanwhile.
Plain `pytest` runs the same in one process, which `-s` and `--pdb` need.
"""

from typing import Any

import pytest

TOGETHER = ("tests/cluster/", "tests/apiserver/")  # share a cluster, an API server; elsewhere a file is a group


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker for each group. (The mark `xdist_group` does nothing with pytest 9.2 and pytest-xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::")[0])

    return InGroups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker the cluster's come first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/cluster/"))
