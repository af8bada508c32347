"""Something breaks in the middle of a job: it goes on from its checkpoint, and says what it was."""

from collections import Counter

import pytest

from .builders import digits_with_checkpoints
from .harness import WORKERS, Cluster, Space

KILL_WORKERS = """
import os
for name in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{name}/stat") as stat:
        parent = stat.read().rpartition(")")[2].split()[1]
    if parent == "1":  # torchrun is process 1
        os.kill(int(name), 9)
"""


@pytest.fixture
def job(space: Space) -> str:
    """A job that is in the middle: a checkpoint is written, most steps are to come."""
    space.claim("checkpoints")
    space.apply(digits_with_checkpoints("digits"))
    space.wait_for_checkpoint("digits")
    return "digits"


def resumed_step(space: Space, job: str, attempt: int) -> int:
    """The step that an attempt went on from."""
    pod = f"{job}-{attempt}-0"
    start = space.wait(f"{pod} has started to train", lambda: space.progress(pod, "start"))
    return int(start[0]["resumed_step"])


def test_a_killed_worker_process_costs_one_restart_and_no_checkpoint(space: Space, job: str):
    space.python(f"{job}-0-1", KILL_WORKERS)

    assert space.wait_for_status(job, attempt=1)["restarts"] == 1
    assert resumed_step(space, job, attempt=1) >= 25
    status = space.wait_for_complete(job, 300, restarts=1)

    failure = status["lastFailure"]
    assert (failure["attempt"], failure["cause"]) == (0, "Failure")
    assert (failure["pod"], failure["rank"], failure["exitCode"]) == (f"{job}-0-1", 1, -9)
    assert failure["node"] in WORKERS
    assert float(status["result"]["accuracy"]) >= 0.97


@pytest.mark.parametrize(
    "how", [[], ["--force", "--grace-period=0"]], ids=["deleted", "force deleted"]
)
def test_a_lost_pod_costs_one_disruption_and_its_index_is_not_refilled(
    space: Space, job: str, how: list[str]
):
    with space.watching_pods() as seen:
        space.kubectl("delete", "pod", f"{job}-0-1", "--wait=false", *how)
        assert resumed_step(space, job, attempt=1) >= 25
        status = space.wait_for_complete(job, 300, disruptions=1)

    assert (status["lastFailure"]["cause"], status["lastFailure"]["pod"]) == (
        "Disruption",
        f"{job}-0-1",
    )
    assert_no_index_was_refilled(seen, job)


def test_a_pod_lost_while_the_operator_is_down_costs_one_disruption(
    cluster: Cluster, space: Space, job: str
):
    with space.watching_pods() as seen:
        with cluster.operator_down():
            space.kubectl("delete", "pod", f"{job}-0-1", "--force", "--grace-period=0")
            space.wait("the pod is gone", lambda: f"{job}-0-1" not in space.pods(job))
        assert resumed_step(space, job, attempt=1) >= 25
        space.wait_for_complete(job, 300, disruptions=1)

    assert_no_index_was_refilled(seen, job)


def assert_no_index_was_refilled(seen: list[str], job: str) -> None:
    """Each pod name was given to one pod only, and there were two attempts of two."""
    pods_by_name = Counter(line.split()[0] for line in seen)
    assert pods_by_name == {f"{job}-{attempt}-{index}": 1 for attempt in (0, 1) for index in (0, 1)}
