"""Jobs that are made, refused, replaced and removed; an operator that comes and goes."""

from collections.abc import Callable

import pytest
import yaml

from .builders import digits, example, script_job
from .harness import Cluster, Refused, Space, poll

SLEEP = "import signal; signal.pause()"


def uids(space: Space, job: str) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in space.pods(job).items()}


def leftovers(space: Space, job: str) -> list[str]:
    """Names of everything that the operator made for a job."""
    return space.kubectl(
        "get", "pods,services", "--selector", f"ddpjob.dev/job={job}", "--output", "name"
    ).split()


def test_delete_and_at_once_apply_again_runs_the_new_job(space: Space):
    manifest = yaml.safe_dump(example("digits.yaml"))
    space.kubectl("apply", "--filename", "-", stdin=manifest)
    space.wait_for_status("digits", phase="Running")
    before = space.job("digits")["metadata"]["uid"]

    space.kubectl("delete", "--filename", "-", stdin=manifest)
    space.kubectl("apply", "--filename", "-", stdin=manifest)
    space.wait_for_complete("digits", 240)

    assert space.job("digits")["metadata"]["uid"] != before
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in space.pods("digits").values()}
    assert before not in owners


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"env": [{"name": "MASTER_ADDR", "value": "me"}]}, "MASTER_ADDR"),
        ({"args": []}, "spec.args"),
        ({"image": None}, "spec.image"),
        ({"suspend": True}, 'unknown field "spec.suspend"'),
        ({"torchrun": {"rdzvConf": {"is_host": "true"}}}, "is_host is the operator's"),
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
def test_a_bad_job_is_refused_with_its_sentence(space: Space, change: dict, sentence: str):
    bad = digits("bad", 1, **change)
    with pytest.raises(Refused) as refused:
        space.apply(bad)
    assert sentence in str(refused.value)
    assert not space.job("bad")


def test_a_job_deleted_while_no_operator_runs_leaves_nothing(cluster: Cluster, space: Space):
    space.apply(*script_job("sleeper", SLEEP))
    space.wait_for_status("sleeper", phase="Running")
    with cluster.operator_down():
        space.kubectl("delete", "ddpjob", "sleeper")
        space.wait("pods and Service are gone", lambda: not leftovers(space, "sleeper"), 120)


def test_a_namespace_with_a_running_job_can_be_deleted(
    cluster: Cluster, make_space: Callable[..., Space]
):
    space = make_space()
    space.apply(*script_job("sleeper", SLEEP))
    space.wait_for_status("sleeper", phase="Running")

    cluster.kubectl("delete", "namespace", space.name, "--wait=false")

    poll(
        "the namespace is gone",
        lambda: not cluster.get("namespace", space.name),
        120,
        space.explain,
    )


def test_uninstalling_and_installing_again_leaves_a_running_job_alone(
    cluster: Cluster, space: Space
):
    space.apply(digits("digits", 80))
    space.wait_for_status("digits", phase="Running")
    before = uids(space, "digits")

    cluster.uninstall()
    assert uids(space, "digits") == before
    cluster.install()
    space.wait_for_complete("digits", 300)

    assert uids(space, "digits") == before
