"""Objects of others that look like those of a job. None of them may change the job.

Each act waits until its objects have had their effect, and removes them.
"""

import time
from collections.abc import Callable

from ddpjob.core.api.names import INSTALLATION_LEASE, LABEL_ATTEMPT

from .builders import job
from .cluster import TRAINER
from .commands import Object, wait_until
from .namespace import Namespace

# The label of all pods made here, and their finalizer: the garbage collector deletes pods without
# an owner, and they must fail before they go.
HOSTILE = "ddpjob-test/hostile"
HOLD = "ddpjob-test/hold"

# A wrong value for each compared field of a pod's owner.
WRONG_OWNERS = {
    "apiVersion": "ddpjob.dev/v1",
    "kind": "DDPJobs",
    "name": "another",
    "uid": "00000000-0000-0000-0000-000000000000",
}

SECONDS = 120

# The namespace and the name of a job, and the namespace of others.
Act = Callable[[Namespace, str, Namespace], None]


def copies_of_pods(victim: Namespace, name: str, hostile: Namespace) -> None:
    """Let copies of a job's pods fail in another namespace, for this attempt and the next."""
    copies = []
    for own_name, pod in victim.pods(name).items():
        now = attempt_of_pod(pod)
        copies += [copy(pod, f"{own_name}-{attempt}", attempt) for attempt in (now, now + 1)]
    let_fail(hostile, copies)


def pods_with_a_wrong_owner(victim: Namespace, name: str, hostile: Namespace) -> None:
    """Let copies of a pod fail beside it, each with one wrong field of the owner."""
    pod = next(iter(victim.pods(name).values()))
    copies = []
    for field, value in WRONG_OWNERS.items():
        body = copy(pod, f"wrong-{field.lower()}", attempt_of_pod(pod))
        body["metadata"]["ownerReferences"][0][field] = value
        copies.append(body)
    let_fail(victim, copies)


def failing_namesake(victim: Namespace, name: str, hostile: Namespace) -> None:
    """Let a job of the same name fail in another namespace."""
    hostile.apply(job(name, "-m", "no_such_module", failurePolicy={"maxRestarts": 0}))
    wait_until("the namesake fails", lambda: hostile.status(name).get("phase") == "Failed", SECONDS)
    hostile.kubectl("delete", "ddpjob", name)


def mark_of_another_installation(victim: Namespace, name: str, hostile: Namespace) -> None:
    """Mark another namespace as served by another installation, with a job that needs it."""
    mark = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": INSTALLATION_LEASE},
        "spec": {"holderIdentity": "elsewhere/another", "leaseDurationSeconds": 3600},
    }
    # The operator trusts its own mark of a namespace for a minute, so this one is new.
    marked = Namespace(hostile.cluster, f"marked-{time.time_ns():x}")
    marked.apply(mark, job(name, "-m", "this"))

    def is_told() -> bool:
        return "elsewhere/another" in marked.kubectl("get", "events")

    wait_until("an event names the other installation", is_told, SECONDS)
    assert not marked.status(name), "a job of another installation has a status"
    marked.delete()


ACTS: dict[str, Act] = {
    "pods copied into another namespace": copies_of_pods,
    "pods with a wrong owner": pods_with_a_wrong_owner,
    "a failing job of the same name elsewhere": failing_namesake,
    "a mark of another installation elsewhere": mark_of_another_installation,
}


def copy(pod: Object, name: str, attempt: int) -> Object:
    """Return a pod with the labels and the owner of another one. It fails at once."""
    labels = pod["metadata"]["labels"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**labels, LABEL_ATTEMPT: str(attempt), HOSTILE: "true"},
            "annotations": pod["metadata"].get("annotations", {}),
            "finalizers": [HOLD],
            "ownerReferences": [dict(owner) for owner in pod["metadata"]["ownerReferences"]],
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "trainer",
                    "image": TRAINER,
                    "imagePullPolicy": "Never",
                    "command": ["python", "-c", "raise SystemExit(1)"],
                }
            ],
        },
    }


def attempt_of_pod(pod: Object) -> int:
    return int(pod["metadata"]["labels"][LABEL_ATTEMPT])


def let_fail(namespace: Namespace, pods: list[Object]) -> None:
    """Create pods, wait until each has failed, and delete them."""

    def have_failed() -> bool:
        found = namespace.cluster.read.pods(namespace.name, HOSTILE)
        phases = [pod["status"].get("phase") for pod in found]
        return phases == ["Failed"] * len(pods)

    namespace.apply(*pods)
    try:
        wait_until("the pods of others have failed", have_failed, SECONDS)
    finally:
        for pod in pods:
            release = '{"metadata": {"finalizers": null}}'
            name = pod["metadata"]["name"]
            namespace.kubectl("patch", "pod", name, "--type=merge", "--patch", release)
        namespace.kubectl("delete", "pods", "--selector", HOSTILE, "--wait=false")
