"""Distribute the tests over the workers of pytest-xdist, and delete the cluster after its tests.

Tests that share something slow to make stay in one worker, and so do those of most files.
"""

import os
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

CLUSTER = "tests/cluster/"

# Groups of tests for one worker, by the beginnings of their names.
GROUPS = {
    # Tests disturbing the nodes or the operator, and the affected tests.
    "cluster, disturbed": (
        f"{CLUSTER}test_dead_node.py",
        f"{CLUSTER}test_upgrade.py",
        f"{CLUSTER}test_faults.py::test_a_pod_force_deleted_while_the_operator_is_down",
        f"{CLUSTER}test_lifecycle.py::test_a_job_deleted_while_no_operator_runs",
        f"{CLUSTER}test_monitoring.py",
        f"{CLUSTER}test_queues.py",
    ),
    "API server": ("tests/apiserver/",),
    # They look at one job.
    "digits on the cluster": (
        f"{CLUSTER}test_training.py::test_digits_example",
        f"{CLUSTER}test_training.py::test_status_shows_the_way",
    ),
}
RECIPES = "tests/unit/test_recipes.py"

# The tests of these places share nothing slow. Those of a file elsewhere stay together.
SINGLE_TESTS = (CLUSTER, "tests/wiring/", RECIPES)

# The order in which workers take groups, files and tests, by the beginnings of their names. The
# first tests on the cluster have it alone for six minutes. Meanwhile the other workers run what
# needs no cluster, because a worker that waits for the cluster does nothing. Files without an entry
# are last.
ORDER = (
    "cluster, disturbed",
    "API server",
    "tests/unit/test_properties.py",
    *(
        f"tests/trainer/test_{name}.py"
        for name in ("real_images", "toy", "interruption", "ranks", "hardware", "local_run")
    ),
    "tests/trainer/",
    f"{CLUSTER}test_in_place.py",
    f"{CLUSTER}test_training.py",
    "digits on the cluster",
    f"{CLUSTER}test_faults.py",
    f"{CLUSTER}test_accelerators.py",
    f"{CLUSTER}test_command_line.py",
    f"{CLUSTER}test_lifecycle.py",
    f"{CLUSTER}test_user_images.py",
    "tests/agent/",
    # It looks at a job waiting since the cluster was made.
    f"{CLUSTER}test_waiting.py",
    RECIPES,
)

# These tests mostly wait. They are spread among the files without an entry: then other workers use
# the processors.
WAITING = "tests/wiring/"


def group_of(nodeid: str) -> str:
    """Return the group of a test, its file, or the test itself."""
    for group, tests in GROUPS.items():
        if nodeid.startswith(tests):
            return group
    return nodeid if nodeid.startswith(SINGLE_TESTS) else nodeid.partition("::")[0]


def place_of(item: pytest.Item) -> tuple[int, bool]:
    """Return the sort key of a test. Tests alone on the cluster begin their group."""
    shares = item.get_closest_marker("alone") is None
    group = group_of(item.nodeid)
    places = [place for place, start in enumerate(ORDER) if group.startswith(start)]
    return min(places, default=len(ORDER)), shares


def sort(items: list[pytest.Item]) -> None:
    """Sort the tests of a worker by place. Spread the waiting ones among those without a place."""
    items.sort(key=place_of)
    last = [item for item in items if place_of(item)[0] == len(ORDER)]
    waiting = [item for item in last if item.nodeid.startswith(WAITING)]
    computing = [item for item in last if not item.nodeid.startswith(WAITING)]
    fractions = {
        item: position / len(kind)
        for kind in (waiting, computing)
        for position, item in enumerate(kind)
    }
    items[len(items) - len(last) :] = sorted(last, key=fractions.__getitem__)


def run_name() -> str:
    """Return a name of this run of pytest. Its workers inherit it."""
    return os.environ.setdefault("DDP_TEST_RUN", uuid.uuid4().hex)


class ClusterEnd:
    """Delete the cluster in the background after its last test, so its nodes use no CPU time.

    Only the process with the workers, or the only process, has it.
    """

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._pool = ThreadPoolExecutor()
        self._deletions: list[Future[None]] = []

    def _expect(self, nodeids: Sequence[str]) -> None:
        self._left = {nodeid for nodeid in nodeids if nodeid.startswith(CLUSTER)}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and report.nodeid in self._left:
            self._left.remove(report.nodeid)
            if not self._left:
                self.delete()

    def delete(self) -> None:
        """Begin to delete the cluster, if this run has brought it up."""
        from cluster.cluster import Cluster

        cluster = Cluster()
        if cluster.is_of(run_name()) and os.environ.get("KEEP_CLUSTER") != "1":
            self._deletions.append(self._pool.submit(cluster.delete))

    def pytest_sessionfinish(self) -> None:
        if self._left:
            # The session was interrupted.
            self.delete()
        for deletion in self._deletions:
            deletion.result()


def new_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each group to one worker.

    The mark `xdist_group` has no effect with pytest 9.2 and pytest-xdist 3.8.
    """
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return InGroups(config, log)
