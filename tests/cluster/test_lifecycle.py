"""Jobs that are created, refused, replaced and deleted, and an operator that goes and returns."""

from collections.abc import Callable

import pytest
import yaml

from .builders import digits, script_job
from .cluster import Cluster
from .commands import CommandFailed, wait_until
from .namespace import Namespace

SLEEP = "import signal; signal.pause()"

# A script that ends when its pod gets the file. Unlike training it costs no CPU time.
WAIT_FOR_FILE = """
import pathlib, time
while not pathlib.Path("/tmp/finish").exists():
    time.sleep(0.1)
"""
FINISH = "open('/tmp/finish', 'w').close()"


def uids(namespace: Namespace, job: str) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in namespace.pods(job).items()}


def finish(namespace: Namespace, job: str) -> None:
    """Let the job's scripts end."""
    for pod in namespace.pods(job):
        namespace.python(pod, FINISH)


def test_delete_and_at_once_apply_again_runs_the_new_job(namespace: Namespace):
    script, job = script_job("again", WAIT_FOR_FILE)
    manifest = yaml.safe_dump(job)
    namespace.apply(script)
    namespace.kubectl("apply", "--filename", "-", stdin=manifest)
    namespace.wait_for_status("again", phase="Running")
    before = namespace.job("again")["metadata"]["uid"]

    namespace.kubectl("delete", "--filename", "-", stdin=manifest)
    namespace.kubectl("apply", "--filename", "-", stdin=manifest)
    namespace.wait_for_status("again", 240, phase="Running", nodesReady="2/2")
    finish(namespace, "again")
    namespace.wait_for_complete("again")

    assert namespace.job("again")["metadata"]["uid"] != before
    pods = namespace.pods("again").values()
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
    assert before not in owners


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": [{"name": "MASTER_ADDR", "value": "me"}]}, "MASTER_ADDR"),
        ({"args": []}, "spec.args"),
        ({"image": None}, "spec.image"),
        ({"suspend": True}, 'unknown field "spec.suspend"'),
        ({"torchrun": {"rdzvConf": {"is_host": "true"}}}, "is_host is set by the operator"),
        ({"podTemplate": {"spec": {"restartPolicy": "Always"}}}, "restartPolicy"),
    ],
    ids=[
        "reserved variable",
        "no args",
        "no image",
        "field that does not exist",
        "is_host",
        "restart policy",
    ],
)
def test_a_bad_job_is_refused_with_a_message(namespace: Namespace, change: dict, message: str):
    with pytest.raises(CommandFailed) as refused:
        namespace.apply(digits("bad", 1, **change))
    assert message in str(refused.value)
    assert not namespace.job("bad")


def test_a_job_deleted_while_no_operator_runs_leaves_nothing(
    cluster: Cluster, namespace: Namespace
):
    def leftovers() -> list[str]:
        selector = ("--selector", "ddpjob.dev/job=sleeper")
        return namespace.kubectl("get", "pods,services", *selector, "--output", "name").split()

    namespace.apply(*script_job("sleeper", SLEEP))
    namespace.wait_for_status("sleeper", phase="Running")
    with cluster.operator_down():
        namespace.kubectl("delete", "ddpjob", "sleeper")
        namespace.wait("pods and Service are gone", lambda: not leftovers(), 120)


def test_a_namespace_with_a_running_job_can_be_deleted(
    cluster: Cluster, make_namespace: Callable[..., Namespace]
):
    namespace = make_namespace()
    namespace.apply(*script_job("sleeper", SLEEP))
    namespace.wait_for_status("sleeper", phase="Running")

    cluster.kubectl("delete", "namespace", namespace.name, "--wait=false")

    wait_until(
        "the namespace is gone",
        lambda: not cluster.get("namespace", namespace.name),
        120,
        namespace.explain,
    )


def test_uninstalling_and_installing_again_leaves_a_running_job_alone(
    cluster: Cluster, namespace: Namespace
):
    namespace.apply(*script_job("worker", WAIT_FOR_FILE))
    namespace.wait_for_status("worker", phase="Running", nodesReady="2/2")
    before = uids(namespace, "worker")

    cluster.uninstall()
    assert uids(namespace, "worker") == before
    cluster.install()
    finish(namespace, "worker")
    namespace.wait_for_complete("worker")

    assert uids(namespace, "worker") == before
