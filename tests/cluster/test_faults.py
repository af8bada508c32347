"""Faults in the middle of a job: it resumes from its checkpoint and reports the cause."""

import signal
from collections import Counter

import pytest

from .builders import script_job
from .cluster import WORKERS, Cluster
from .namespace import Namespace
from .training import (
    JOB,
    LONG,
    SHORT,
    assert_as_good_as_undisturbed,
    assert_resumed,
    last_step,
    resumed_step,
    signal_workers,
    start_training,
)

# In the first attempt, one rank writes more than its pod may, and both wait for the eviction.
FILL_DISK = """
import os, pathlib, signal
if os.environ["DDP_ATTEMPT"] == "0":
    if os.environ["RANK"] == "1":
        pathlib.Path("/tmp/full").write_bytes(bytes(60 << 20))
    signal.pause()
"""


# The pods of a job after one loss of pod 1. With InPlace, pod 0 stays.
PODS = {"InPlace": ("0-0", "0-1", "1-1"), "Recreate": ("0-0", "0-1", "1-0", "1-1")}


def assert_no_index_was_refilled(seen: list[str], recovery: str = "InPlace") -> None:
    """Assert that there were two attempts, and no name was given to two pods."""
    pods_by_name = Counter(line.split()[0] for line in seen)
    assert pods_by_name == {f"{JOB}-{pod}": 1 for pod in PODS[recovery]}


@pytest.mark.faults
@pytest.mark.parametrize("recovery", PODS)
def test_a_killed_worker_process_costs_one_restart_and_no_checkpoint(
    namespace: Namespace, recovery: str
):
    start_training(namespace, SHORT, recovery=recovery)
    signal_workers(namespace, f"{JOB}-0-1", signal.SIGKILL)

    assert namespace.wait_for_status(JOB, attempt=1)["restarts"] == 1
    assert_resumed(namespace, attempt=1)
    status = namespace.wait_for_complete(JOB, failures=1)

    failure = status["lastFailure"]
    assert (failure["attempt"], failure["cause"]) == (0, "Failure")
    assert (failure["pod"], failure["rank"], failure["exitCode"]) == (f"{JOB}-0-1", 1, -9)
    assert failure["node"] in WORKERS
    assert_as_good_as_undisturbed(status)


@pytest.mark.faults
@pytest.mark.parametrize("recovery", PODS)
def test_a_deleted_pod_costs_one_disruption_and_its_index_is_not_refilled(
    namespace: Namespace, recovery: str
):
    start_training(namespace, SHORT, recovery=recovery)
    with namespace.watching_pods() as seen:
        namespace.kubectl("delete", "pod", f"{JOB}-0-1", "--wait=false")
        assert_resumed(namespace, attempt=1)
        status = namespace.wait_for_complete(JOB, disruptions=1)

    assert status["lastFailure"]["cause"] == "Disruption"
    assert status["lastFailure"]["pod"] == f"{JOB}-0-1"
    assert_no_index_was_refilled(seen, recovery)


def test_a_pod_force_deleted_while_the_operator_is_down_costs_one_disruption(
    cluster: Cluster, namespace: Namespace
):
    # The job must still train when the operator's pod is gone.
    start_training(namespace, LONG, fastStart=True)
    with namespace.watching_pods() as seen:
        with cluster.operator_down():
            namespace.kubectl("delete", "pod", f"{JOB}-0-1", "--force", "--grace-period=0")
            namespace.wait("the pod is gone", lambda: f"{JOB}-0-1" not in namespace.pods(JOB))
        status = namespace.wait_for_status(JOB, phase="Complete")

    assert (status["budget"]["failures"], status["budget"]["disruptions"]) == (0, 1)
    # The other pod stays if the operator is back before the end of the pod's wait. Otherwise one
    # more attempt begins, with new pods, and costs nothing.
    attempt = status["attempt"]["number"]
    assert [entry["cause"] for entry in status["attempts"]] == [
        "Succeeded",
        *["NotResumed"] * (attempt - 1),
        "Disruption",
    ]
    assert attempt <= 2
    assert_resumed(namespace, attempt)
    assert status["lastFailure"]["cause"] == "Disruption"
    assert status["lastFailure"]["pod"] == f"{JOB}-0-1"
    assert max(Counter(line.split()[0] for line in seen).values()) == 1


def test_a_suspended_job_gives_its_pods_back_and_resumes_where_it_stopped(namespace: Namespace):
    start_training(namespace, SHORT, fastStart=True)

    namespace.patch(JOB, suspend=True)
    namespace.wait_until_nothing_runs(JOB)
    namespace.wait_for_status(JOB, phase="Suspended", nodesReady="0/2")
    namespace.wait(
        "the message says how to go on",
        lambda: "set spec.suspend to false" in namespace.status(JOB)["message"],
    )
    stopped_at = last_step(namespace)
    namespace.patch(JOB, suspend=False)

    assert resumed_step(namespace, attempt=1) == stopped_at
    status = namespace.wait_for_status(JOB, phase="Complete")
    assert (status["restarts"], status["attempt"]["number"]) == (0, 1)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["Succeeded", "Suspended"]
    assert "lastFailure" not in status
    assert_as_good_as_undisturbed(status)
    namespace.wait_until_nothing_runs(JOB)


def test_a_pod_evicted_for_its_own_disk_usage_is_a_failure(namespace: Namespace):
    limit = {"limits": {"ephemeral-storage": "20Mi"}}
    namespace.apply(*script_job("full", FILL_DISK, resources=limit))

    status = namespace.wait_for_complete("full", failures=1)

    failure = status["lastFailure"]
    assert (failure["cause"], failure["reason"]) == ("Failure", "Evicted")
    assert failure["pod"] == "full-0-1"
    assert failure["node"] in WORKERS
    assert "raise resources.limits.ephemeral-storage" in failure["message"]
    namespace.wait_until_nothing_runs("full")
