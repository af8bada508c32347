"""Slow limits: quotas, admission webhooks, deadlines, and what becomes of a finished job."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .builders import SEPARATE, script_job
from .cluster import PLAIN, WORKERS, Cluster
from .commands import Object
from .namespace import Namespace

pytestmark = pytest.mark.faults

WAIT = "import signal; signal.pause()"
END = "print('done')"


def counters(status: Object) -> tuple[int, int]:
    """Return the failures and the disruptions."""
    return status["budget"]["failures"], status["budget"]["disruptions"]


# Two gangs under one quota


def age(job: Object) -> tuple[str, str]:
    """Return the sort key of the operator. Jobs of one second are ordered by their uid."""
    return job["metadata"]["creationTimestamp"], job["metadata"]["uid"]


def quota(name: str, pods: int, priority: str = "") -> Object:
    """Return a quota of pods, of those of one priority class if it is given."""
    spec: Object = {"hard": {"pods": str(pods)}}
    if priority:
        scope = {"scopeName": "PriorityClass", "operator": "In", "values": [priority]}
        spec["scopeSelector"] = {"matchExpressions": [scope]}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def two_classes(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Return two priority classes, for a quota to tell two jobs apart."""
    names = ("ddpjob-test-first", "ddpjob-test-second")
    for name in names:
        cluster.apply(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": name},
                "value": 0,
            }
        )
    yield names
    cluster.kubectl("delete", "priorityclass", *names)


def test_two_gangs_of_four_complete_under_a_quota_of_five_pods(
    namespace: Namespace, two_classes: tuple[str, str]
):
    # At first each gang gets two pods. Then five pods are the only limit, and neither gang fits.
    namespace.apply(quota("five", 5))
    for name in two_classes:
        namespace.apply(quota(name, 2, name))
    for name in two_classes:
        namespace.apply(*script_job(name, END, nodes=4, priorityClassName=name))
    for name in two_classes:
        namespace.wait(f"{name} has two pods", lambda name=name: len(namespace.pods(name)) == 2)
    namespace.kubectl("delete", "resourcequota", *two_classes)

    for name in two_classes:
        namespace.wait_for_status(name, phase="Complete")
    jobs = sorted(map(namespace.job, two_classes), key=age)
    older, younger = (job["status"] for job in jobs)

    assert counters(older) == counters(younger) == (0, 0)
    assert older["attempt"]["number"] == 0
    causes = [attempt["cause"] for attempt in younger["attempts"]]
    assert causes == ["Succeeded", "Yielded"]
    for name in two_classes:
        namespace.wait_until_nothing_runs(name)


# A hanging webhook


@pytest.fixture
def hanging_webhook(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Return a label of namespaces. There, a webhook that never answers holds each new pod."""
    label = {"ddpjob.dev/test-webhook": "hangs"}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"]}
    webhook = {
        "name": "hangs.ddpjob.dev",
        # No machine has this address, so no connection is ever made or refused.
        "clientConfig": {"url": "https://10.255.255.1/"},
        "rules": [{**pods, "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": label},
        "timeoutSeconds": 12,
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    name = "ddpjob-test-hangs"
    cluster.apply(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [webhook],
        }
    )
    yield label
    cluster.kubectl("delete", "validatingwebhookconfiguration", name)


def test_a_hanging_webhook_is_named_and_delays_no_other_job(
    make_namespace: Callable[..., Namespace], hanging_webhook: dict[str, str]
):
    held = make_namespace(**hanging_webhook)
    free = make_namespace()
    held.apply(*script_job("held", END))
    held.wait("the create is under way", lambda: "number" in held.status("held").get("attempt", {}))

    free.apply(*script_job("healthy", END))
    free.wait("the healthy job has its pods", lambda: len(free.pods("healthy")) == 2, 5)
    free.wait_for_complete("healthy")

    status = held.wait(
        "the status names the webhook",
        lambda: (
            held.status("held") if "hangs.ddpjob.dev" in held.status("held")["message"] else None
        ),
        60,
    )
    assert status["phase"] == "Pending"
    assert counters(status) == (0, 0)
    assert not held.pods("held")


# Deadlines


def assert_stopped(namespace: Namespace, job: str, reason: str) -> Object:
    """Wait until a job has failed for a reason that uses no budget, and leaves nothing behind."""
    status = namespace.wait_for_status(job, phase="Failed")
    assert status["reason"] == reason
    assert counters(status) == (0, 0)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["Stopped"]
    namespace.wait_until_nothing_runs(job)
    return status


def test_a_job_that_is_active_for_too_long_fails(namespace: Namespace):
    namespace.apply(*script_job("endless", WAIT, activeDeadlineSeconds=15))
    namespace.wait_for_status("endless", phase="Running")

    status = assert_stopped(namespace, "endless", "DeadlineExceeded")

    assert "activeDeadlineSeconds=15" in status["message"]


def test_a_job_whose_image_cannot_be_pulled_fails_after_its_startup_deadline(
    namespace: Namespace,
):
    # Nothing listens on this port of the nodes.
    image = {"image": "localhost:1/nothing:1", "startupDeadlineSeconds": 15}
    scripts, job = script_job("imageless", END)
    job["spec"] |= image
    namespace.apply(scripts, job)

    status = assert_stopped(namespace, "imageless", "ImagePull")

    assert "startupDeadlineSeconds=15" in status["message"]
    assert "localhost:1/nothing:1" in status["message"]


def test_a_gang_that_fits_only_in_part_fails_after_its_startup_deadline(namespace: Namespace):
    placement = {
        "nodeSelector": {"kubernetes.io/hostname": WORKERS[1]},
        "affinity": SEPARATE,
        "topologySpreadConstraints": [],
    }
    namespace.apply(*script_job("half", WAIT, startupDeadlineSeconds=15, **placement))
    namespace.wait_for_status("half", reason="Unschedulable", nodesReady="0/2")

    status = assert_stopped(namespace, "half", "Unschedulable")

    assert "startupDeadlineSeconds=15: 1 of 2 pods cannot start" in status["message"]


# After the end


def test_a_finished_job_is_deleted_with_its_pods_after_its_time_to_live(namespace: Namespace):
    namespace.apply(*script_job("brief", END, ttlSecondsAfterFinished=5))
    namespace.wait_for_complete("brief")

    namespace.wait("the job is gone", lambda: not namespace.job("brief"), 30)
    namespace.wait("its pods are gone", lambda: not namespace.pods("brief"), 60)


# A sidecar that runs until it is told to end, and then ends at once.
SIDECAR = {
    "name": "sidecar",
    "image": PLAIN,
    "command": ["python", "-c", "import signal; signal.sigwait([signal.SIGTERM])"],
}

# The policy, whether the pods have a sidecar, and how many pods are left and run.
CLEAN_UP = {
    "none": ("None", True, 2, 2),
    "running": ("Running", False, 2, 0),
    "running-sidecar": ("Running", True, 0, 0),
    "all": ("All", False, 0, 0),
}


def test_the_clean_up_policy_decides_which_pods_of_a_finished_job_stay(namespace: Namespace):
    for name, (policy, has_sidecar, _, _) in CLEAN_UP.items():
        spec: dict[str, Any] = {"cleanPodPolicy": policy}
        if has_sidecar:
            spec["podTemplate"] = {"spec": {"containers": [SIDECAR]}}
        namespace.apply(*script_job(name, END, **spec))
    for name in CLEAN_UP:
        namespace.wait_for_complete(name)

    def found() -> dict[str, tuple[int, int]]:
        counts = {}
        for name in CLEAN_UP:
            counts[name] = (len(namespace.pods(name)), len(namespace.unfinished(name)))
        return counts

    expected = {name: (left, running) for name, (_, _, left, running) in CLEAN_UP.items()}
    namespace.wait(f"the pods are {expected}", lambda: found() == expected, 60)
