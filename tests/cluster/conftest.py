"""One kind cluster for all tests of this folder, and one namespace for each.

KEEP_CLUSTER=1         use the existing cluster `ddpjob-test` and keep it: seconds, not minutes
KIND_NODE_IMAGE=...    node image of the cluster (default: that of the kind release)
CI=true                fail if tools or data are missing, instead of skipping
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .builders import LATE, SEPARATE, digits
from .cluster import WORKERS, Cluster
from .commands import Object, Unavailable, node_image, require_tools, run
from .namespace import Namespace
from .training import JOB, LONG, start_training, weights

DATA_SETS = ("cifar10.tar.zst", "hymenoptera.tar.zst", "mnist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout of these tests: the first one also waits for images and cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1500))


def skip_or_fail(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def in_background() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Return a function that starts another one while the next tests run.

    The end of the session waits for all of them.
    """
    started = []
    with ThreadPoolExecutor() as pool:
        yield lambda function: started.append(pool.submit(function))
        for future in started:
            future.result()


@pytest.fixture(scope="package")
def cluster(in_background: Callable[[Callable[[], None]], None]) -> Iterator[Cluster]:
    """Return the cluster with images loaded and the chart installed.

    It is deleted after the last test of this folder. The other tests of the worker do not wait for
    that, and no longer share the machine with three kubelets.
    """
    try:
        require_tools()
        node_image()
    except Unavailable as error:
        skip_or_fail(str(error))
    keep = os.environ.get("KEEP_CLUSTER") == "1"
    cluster = Cluster()
    if not keep:
        cluster.delete()
    cluster.up()
    yield cluster
    if not keep:
        in_background(cluster.delete)


@pytest.fixture(scope="package")
def waiting(cluster: Cluster) -> Iterator[Namespace]:
    """Start a job that may use one node only. It waits for the second while the other tests run.

    test_waiting.py looks at it at the end.
    """
    first, second = WORKERS
    cluster.kubectl("label", "node", first, f"{LATE}=", "--overwrite")
    cluster.kubectl("label", "node", second, f"{LATE}-")
    namespace = Namespace(cluster, f"waiting-{uuid.uuid4().hex[:6]}")
    placement = {
        "nodeSelector": {LATE: ""},
        "affinity": SEPARATE,
        "topologySpreadConstraints": [],
    }
    namespace.apply(digits("digits", 5, **placement))
    yield namespace
    namespace.delete()


def name_after(node_name: str) -> str:
    """Return a unique name of a namespace that resembles a test's name."""
    stem = re.sub(r"[^a-z0-9]+", "-", node_name.removeprefix("test_").lower())
    return f"{stem[:40].strip('-')}-{uuid.uuid4().hex[:6]}"


@pytest.fixture
def make_namespace(
    cluster: Cluster, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Namespace]]:
    """Return a function that makes a namespace with labels, named after the test."""
    # The slow faults would disturb the waiting job.
    if not request.node.get_closest_marker("faults"):
        request.getfixturevalue("waiting")
    namespaces: list[Namespace] = []

    def make(**labels: str) -> Namespace:
        namespaces.append(Namespace(cluster, name_after(request.node.name), **labels))
        return namespaces[-1]

    yield make
    for namespace in namespaces:
        namespace.delete()


@pytest.fixture
def namespace(make_namespace: Callable[..., Namespace]) -> Namespace:
    return make_namespace()


@pytest.fixture(scope="package")
def undisturbed(cluster: Cluster) -> Iterator[Object]:
    """Return the weights that a training of LONG epochs ends with if nothing happens to it."""
    namespace = Namespace(cluster, f"undisturbed-{uuid.uuid4().hex[:6]}")
    start_training(namespace, LONG)
    namespace.wait_for_complete(JOB, 300)
    yield weights(namespace)
    namespace.delete()


@pytest.fixture(scope="package")
def data_claim(cluster: Cluster, data_folder: Path, real_data: Callable[..., Path]) -> None:
    """Put the data sets into the claim `ddpjob-data` of the namespace default.

    CIFAR-10 gets there by the script of the quick start.
    """
    missing = [name for name in DATA_SETS if not (data_folder / name).exists()]
    if missing:
        skip_or_fail(
            f"{', '.join(missing)}: not found in {data_folder}. "
            "Set DDP_TEST_DATA to the folder with the data sets"
        )
    target = cluster.shared / "data"
    for name in ("hymenoptera", "mnist"):
        real_data(name, target)
    run("chmod", "-R", "a+rX", target)
    # A kept cluster has it already.
    if not (target / "cifar10").exists():
        archive = data_folder / "cifar10.tar.zst"
        run("examples/kind/get-cifar10", archive, SHARED=str(cluster.shared))
