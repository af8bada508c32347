"""How the tests are spread over the two workers of `make test`: what shares something that is slow to make stays together.

The cluster tests mostly wait for a cluster, so they come first, in one worker, and the other does the rest meanwhile.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER = ("cluster", "apiserver")  # folders whose tests share a cluster or an API server; elsewhere it is the file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A group for each test, which pytest-xdist gives to one worker."""
    for item in items:
        parts = item.path.relative_to(HERE).parts
        item.add_marker(pytest.mark.xdist_group(parts[0] if parts[0] in TOGETHER else "/".join(parts)))
    items.sort(key=lambda item: "cluster" not in item.path.relative_to(HERE).parts)
