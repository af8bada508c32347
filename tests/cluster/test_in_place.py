"""Recovery in place, and hangs: pods stay, and a stopped process is found."""

import json
import signal
from collections import Counter

from .builders import MANAGED, script, script_job
from .cluster import PYTHON_ONLY, WORKERS
from .commands import CommandFailed, Object
from .namespace import Namespace
from .training import (
    JOB,
    LONG,
    assert_as_good_as_undisturbed,
    assert_resumed,
    signal_workers,
    start_training,
)

# A script that knows nothing of this project. Its output is its heartbeat.
COUNTS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
def count():
    for step in range(3000):
        dist.barrier()
        print("step", step, flush=True)
        time.sleep(0.1)
count()
"""


# A volume of the user's below /dev/shm, the operator's own volume.
CACHE = {
    "spec": {
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "containers": [
            {"name": "trainer", "volumeMounts": [{"name": "cache", "mountPath": "/dev/shm/cache"}]}
        ],
    }
}
LEAVE_FILES = """
for path in ("/dev/shm/left", "/dev/shm/cache/kept", "/ddpjob/work/left"):
    open(path, "w").close()
"""
FIND_FILES = """
import os
assert not os.path.exists("/dev/shm/left")
assert os.path.exists("/dev/shm/cache/kept")
assert not os.path.exists("/ddpjob/work/left")
assert os.path.exists("/ddpjob/work.last/left")
"""


def log_of(namespace: Namespace, pod: str) -> str:
    try:
        return namespace.cluster.read.log(pod, namespace.name, "trainer")
    except CommandFailed:
        # The container has not started.
        return ""


def kept(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return the pods in both, as the same objects."""
    return {name for name, uid in before.items() if after.get(name) == uid}


def test_pods_stay_when_a_rank_a_pod_and_node_0_are_lost(namespace: Namespace):
    # In a pod that stays, each start is a fork.
    start_training(namespace, LONG, podTemplate=CACHE, fastStart=True)
    with namespace.watching_pods() as seen:
        status = lose_a_rank_a_pod_and_node_0(namespace)

    attempt = status["operator"]["attempt"]
    assert attempt["host"]["index"] == 1
    assert attempt["births"] == [3, 2]
    assert_as_good_as_undisturbed(status)
    # No name was given to two pods.
    created = Counter(line.split()[0] for line in seen)
    assert created == {f"{JOB}-{pod}": 1 for pod in ("0-0", "0-1", "1-1", "2-1", "3-0")}


def lose_a_rank_a_pod_and_node_0(namespace: Namespace) -> Object:
    """Cause three losses, one after the other, and return the status of the complete job."""
    first = namespace.uids(JOB)

    namespace.python(f"{JOB}-0-0", LEAVE_FILES)
    signal_workers(namespace, f"{JOB}-0-1", signal.SIGKILL)
    assert_resumed(namespace, attempt=1)
    namespace.python(f"{JOB}-0-0", FIND_FILES)
    second = namespace.uids(JOB)
    assert f"{JOB}-0-0" in kept(first, second)
    assert f"{JOB}-1-1" in second

    failure = namespace.wait_for_status(JOB, attempt=1, phase="Running")["lastFailure"]
    assert (failure["cause"], failure["pod"]) == ("Failure", f"{JOB}-0-1")
    assert (failure["rank"], failure["exitCode"]) == (1, -9)
    assert failure["node"] in WORKERS
    namespace.kubectl("delete", "pod", f"{JOB}-1-1", "--wait=false")
    assert_resumed(namespace, attempt=2)
    third = namespace.uids(JOB)
    assert f"{JOB}-0-0" in kept(first, third)
    assert f"{JOB}-2-1" in third

    # A pod that stays hosts the rendezvous.
    failure = namespace.wait_for_status(JOB, attempt=2, phase="Running")["lastFailure"]
    assert (failure["cause"], failure["pod"]) == ("Disruption", f"{JOB}-1-1")
    namespace.kubectl("delete", "pod", f"{JOB}-0-0", "--wait=false")
    assert_resumed(namespace, attempt=3)
    assert f"{JOB}-2-1" in kept(third, namespace.uids(JOB))

    status = namespace.wait_for_complete(JOB, failures=1, disruptions=2)
    assert status["lastFailure"]["pod"] == f"{JOB}-0-0"
    return status


def test_a_stopped_rank_of_a_script_of_ones_own_is_a_hang_with_stacks(namespace: Namespace):
    options = {"hangTimeoutSeconds": 3, "heartbeat": "Log", "failurePolicy": {"maxRestarts": 0}}
    namespace.apply(*script_job("counts", COUNTS, **options))
    # A script gives heartbeats by its output once it has written for three times the limit.
    namespace.wait("counts-0-1 counts", lambda: "step 120" in log_of(namespace, "counts-0-1"))

    signal_workers(namespace, "counts-0-1", signal.SIGSTOP)
    status = namespace.wait_for_status("counts", phase="Failed")

    failure = status["lastFailure"]
    assert failure["cause"] == "Hang"
    assert "hangs: no heartbeat for" in failure["message"]
    assert "in count" in failure["message"]
    # Both pods have written their stacks, and their logs are there.
    for pod in ("counts-0-0", "counts-0-1"):
        assert "Fatal Python error: Aborted" in log_of(namespace, pod)
    assert status["restarts"] == 0


def test_a_job_completes_behind_a_network_policy_and_with_python_alone_in_its_image(
    namespace: Namespace,
):
    peers = {"podSelector": MANAGED}
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "isolated"},
        "spec": {
            "podSelector": MANAGED,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [peers]}],
            "egress": [{"to": [peers]}, dns],
        },
    }
    namespace.apply(policy)
    scripts, job = script_job("fit", script("linear_fit.py"))
    job["spec"]["image"] = PYTHON_ONLY
    namespace.apply(scripts, job)

    status = namespace.wait_for_complete("fit")

    assert json.loads(status["result"]["slope"]) == 3.0
