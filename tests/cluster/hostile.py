"""Objects of others that look like those of a job. None of them may change the job.

Each act waits until its objects have had their effect, and removes them.
"""

from collections.abc import Callable

from ddpjob.core.api.names import INSTALLATION_LEASE

from .builders import job
from .cluster import TRAINER
from .commands import Object, wait_until
from .namespace import Namespace

# The label of all pods made here.
HOSTILE = "ddpjob-test/hostile"

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
    hostile.apply(job(name, "-c", "raise SystemExit(1)", failurePolicy={"maxRestarts": 0}))
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
    hostile.kubectl("delete", "lease", INSTALLATION_LEASE, "--ignore-not-found")
    hostile.apply(mark, job(name, "-c", "pass"))

    def is_told() -> bool:
        return "elsewhere/another" in hostile.kubectl("get", "events")

    wait_until("an event names the other installation", is_told, SECONDS)
    assert not hostile.status(name), "a job of another installation has a status"
    hostile.kubectl("delete", "ddpjob", name)
    hostile.kubectl("delete", "lease", INSTALLATION_LEASE)


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
            "labels": {**labels, "ddpjob.dev/attempt": str(attempt), HOSTILE: "true"},
            "annotations": pod["metadata"].get("annotations", {}),
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
    return int(pod["metadata"]["labels"]["ddpjob.dev/attempt"])


def let_fail(namespace: Namespace, pods: list[Object]) -> None:
    """Create pods, and wait until each has failed. The garbage collector may delete it first."""

    def have_failed() -> bool:
        found = namespace.cluster.read.pods(namespace.name, HOSTILE)
        return all(pod["status"].get("phase") == "Failed" for pod in found)

    namespace.apply(*pods)
    try:
        wait_until("the pods of others have failed", have_failed, SECONDS)
    finally:
        namespace.kubectl("delete", "pods", "--selector", HOSTILE, "--wait=false")
