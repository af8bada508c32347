"""One kind cluster for all tests of this folder, one namespace for each.

KEEP_CLUSTER=1         take the cluster `ddpjob-test` that is there, and leave it: seconds instead of minutes
KIND_NODE_IMAGE=...    node image of the cluster; without it the kind release's own
CI=true                missing tools and data are a failure, not a skip
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .builders import LATE, SEPARATE, digits
from .harness import WORKERS, Cluster, Space, Unavailable, node_image, require_tools, run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for images and cluster as well."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1500))


def unavailable(sentence: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster with images loaded and the chart installed."""
    try:
        require_tools()
        node_image()
    except Unavailable as error:
        unavailable(str(error))
    keep = os.environ.get("KEEP_CLUSTER") == "1"
    cluster = Cluster()
    if not keep:
        cluster.delete()
    cluster.up()
    yield cluster
    if not keep:
        cluster.delete()


@pytest.fixture(scope="session")
def waiting(cluster: Cluster) -> Iterator[Space]:
    """A job that only one node is there for: it waits for the other while the other tests run (test_waiting.py)."""
    first, second = WORKERS
    cluster.kubectl("label", "node", first, f"{LATE}=", "--overwrite")
    cluster.kubectl("label", "node", second, f"{LATE}-")
    space = Space(cluster, f"waiting-{uuid.uuid4().hex[:6]}")
    space.apply(
        digits(
            "digits", 5, nodeSelector={LATE: ""}, affinity=SEPARATE, topologySpreadConstraints=[]
        )
    )
    yield space
    space.close()


@pytest.fixture
def make_space(
    cluster: Cluster, waiting: Space, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Space]]:
    """Makes namespaces named after the test, with the labels that it gives."""
    spaces: list[Space] = []

    def make(**labels: str) -> Space:
        stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[
            :40
        ].strip("-")
        spaces.append(Space(cluster, f"{stem}-{uuid.uuid4().hex[:6]}", **labels))
        return spaces[-1]

    yield make
    for space in spaces:
        space.close()


@pytest.fixture
def space(make_space: Callable[..., Space]) -> Space:
    """A namespace of the test's own."""
    return make_space()


@pytest.fixture(scope="session")
def data_claim(cluster: Cluster, data_folder: Path, real_data: Callable[..., Path]) -> None:
    """The data sets where the claim `ddpjob-data` of the namespace default shows them, CIFAR-10 by the quick start's script."""
    if missing := [
        name
        for name in ("cifar10.tar.zst", "hymenoptera.tar.zst", "mnist")
        if not (data_folder / name).exists()
    ]:
        unavailable(
            f"{data_folder} lacks {', '.join(missing)}; DDP_TEST_DATA names the folder that has the data sets"
        )
    shown = cluster.shared / "data"
    for name in ("hymenoptera", "mnist"):
        real_data(name, shown)
    run("chmod", "-R", "a+rX", shown)
    if not (shown / "cifar10").exists():  # it is in a kept cluster
        run(
            "examples/kind/get-cifar10", data_folder / "cifar10.tar.zst", SHARED=str(cluster.shared)
        )
