"""One kind cluster for all tests of this folder and all workers, and one namespace for each test.

KEEP_CLUSTER=1         use the existing cluster `ddpjob-test` and keep it: seconds, not minutes
BUILD=...              command to build images (default: docker build)
KIND_NODE_IMAGE=...    node image of the cluster (default: the one of the kind release)
CI=true                fail if tools or data are missing, instead of skipping
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scheduling import CLUSTER, run_name

from .builders import LATE, SEPARATE, WAITING, digits
from .cluster import WORKERS, Cluster
from .commands import Object, Unavailable, node_image, require_tools, run
from .namespace import Namespace
from .sharing import locked, turn
from .training import JOB, LONG, start_training, weights

DATA_SETS = ("cifar10.tar.zst", "hymenoptera.tar.zst", "mnist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout of these tests: the first one also waits for images and cluster."""
    for item in items:
        if item.nodeid.startswith(CLUSTER):
            item.add_marker(pytest.mark.timeout(1500))


def skip_or_fail(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give a test its turn on the cluster, from its first fixture to its last."""
    if not item.nodeid.startswith(CLUSTER):
        return (yield)
    with turn(alone=any(map(item.get_closest_marker, ("alone", "faults")))):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add everything in the namespaces of a failed test to its report.

    An expired wait has it in its message.
    """
    report = yield
    is_of_cluster = item.nodeid.startswith(CLUSTER)
    if is_of_cluster and report.failed and "--- kubectl" not in report.longreprtext:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Namespace):
                report.sections.append((f"namespace {value.name}", value.explain()))
    return report


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Return the cluster with images loaded and the chart installed.

    The first worker creates it. tests/scheduling.py deletes it after its last test.
    """
    try:
        require_tools()
        node_image()
    except Unavailable as error:
        skip_or_fail(str(error))
    cluster = Cluster()
    with locked("set-up"):
        if not cluster.is_of(run_name()):
            if os.environ.get("KEEP_CLUSTER") != "1":
                cluster.delete()
            cluster.up(run_name())
            if any("test_waiting" in item.nodeid for item in request.session.items):
                start_waiting(cluster)
    return cluster


def start_waiting(cluster: Cluster) -> None:
    """Start a job with one possible node. It waits for the second while the other tests run.

    test_waiting.py looks at it at the end.
    """
    first, second = WORKERS
    cluster.kubectl("label", "node", first, f"{LATE}=", "--overwrite")
    cluster.kubectl("label", "node", second, f"{LATE}-")
    cluster.kubectl("delete", "namespace", WAITING, "--ignore-not-found")
    placement = {
        "nodeSelector": {LATE: ""},
        "affinity": SEPARATE,
        "topologySpreadConstraints": [],
    }
    Namespace(cluster, WAITING).apply(digits("digits", 5, **placement))


def name_after(node_name: str) -> str:
    """Return a unique name of a namespace, similar to a test's name."""
    stem = re.sub(r"[^a-z0-9]+", "-", node_name.removeprefix("test_").lower())
    return f"{stem[:40].strip('-')}-{uuid.uuid4().hex[:6]}"


@pytest.fixture
def make_namespace(
    cluster: Cluster, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Namespace]]:
    """Return a function for making a namespace with labels, named after the test."""
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
    """Return the final weights of a training of LONG epochs without any fault."""
    namespace = Namespace(cluster, f"undisturbed-{uuid.uuid4().hex[:6]}")
    start_training(namespace, LONG)
    namespace.wait_for_complete(JOB)
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
