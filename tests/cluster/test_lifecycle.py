"""Jobs created, replaced and deleted, and an operator that goes and returns."""

from collections.abc import Callable

import yaml

from .builders import script_job
from .cluster import Cluster
from .commands import wait_until
from .namespace import Namespace

# Scripts that cost no CPU time, unlike training. They print an event when they have started. Before
# it, torchrun has not set up its signal handlers, and a deletion waits for its grace period.
SLEEP = """
import signal
print('{"event": "started"}', flush=True)
signal.pause()
"""

# This one ends when its pod gets the file.
WAIT_FOR_FILE = """
import pathlib, time
print('{"event": "started"}', flush=True)
while not pathlib.Path("/tmp/finish").exists():
    time.sleep(0.1)
"""
FINISH = "open('/tmp/finish', 'w').close()"


def start(namespace: Namespace, job: str, script: str) -> None:
    """Run a job of two pods until both scripts have started."""
    namespace.apply(*script_job(job, script))
    wait_until_started(namespace, job)


def wait_until_started(namespace: Namespace, job: str) -> None:
    for pod in (f"{job}-0-0", f"{job}-0-1"):
        namespace.wait(f"{pod} has started", lambda pod=pod: namespace.progress(pod, "started"))
    namespace.wait_for_status(job, phase="Running", nodesReady="2/2")


def finish(namespace: Namespace, job: str) -> None:
    """Let the job's scripts end."""
    for pod in namespace.pods(job):
        namespace.python(pod, FINISH)


def test_delete_and_at_once_apply_again_runs_the_new_job(namespace: Namespace):
    script, job = script_job("again", WAIT_FOR_FILE)
    manifest = yaml.safe_dump(job)
    namespace.apply(script)
    namespace.kubectl("apply", "--filename", "-", stdin=manifest)
    wait_until_started(namespace, "again")
    before = namespace.job("again")["metadata"]["uid"]

    namespace.kubectl("delete", "--filename", "-", stdin=manifest)
    namespace.kubectl("apply", "--filename", "-", stdin=manifest)
    namespace.wait("the new job runs", lambda: namespace.job("again")["metadata"]["uid"] != before)
    namespace.wait_for_status("again", phase="Running", nodesReady="2/2")
    finish(namespace, "again")
    namespace.wait_for_complete("again")

    assert namespace.job("again")["metadata"]["uid"] != before
    pods = namespace.pods("again").values()
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
    assert before not in owners


def test_a_job_deleted_while_no_operator_runs_leaves_nothing(
    cluster: Cluster, namespace: Namespace
):
    def leftovers() -> list[str]:
        selector = ("--selector", "ddpjob.dev/job=sleeper")
        return namespace.kubectl("get", "pods,services", *selector, "--output", "name").split()

    start(namespace, "sleeper", SLEEP)
    with cluster.operator_down():
        namespace.kubectl("delete", "ddpjob", "sleeper")
        namespace.wait("pods and Service are gone", lambda: not leftovers(), 120)


def test_a_namespace_with_a_running_job_can_be_deleted(
    cluster: Cluster, make_namespace: Callable[..., Namespace]
):
    namespace = make_namespace()
    start(namespace, "sleeper", SLEEP)

    cluster.kubectl("delete", "namespace", namespace.name, "--wait=false")

    wait_until(
        "the namespace is gone",
        lambda: not cluster.read.namespace(namespace.name),
        120,
        namespace.explain,
    )
