"""Images and pods of a user's own: nothing of ours inside, sidecars beside, a strict namespace around."""

from collections.abc import Callable, Iterator

import pytest

from .builders import digits, script, script_job
from .harness import PLAIN, Cluster, Space

RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


def test_a_plain_root_image_runs_a_script_from_a_config_map(space: Space):
    space.apply(*script_job("fit", script("linear_fit.py")))

    status = space.wait_for_complete("fit")

    assert status["result"] == {"slope": "3.0", "offset": "1.0", "uid": "0", "world": "2"}


@pytest.fixture
def restricted_pods(cluster: Cluster) -> Iterator[None]:
    """The operator as installed with podSecurity: restricted."""
    cluster.install(podSecurity="restricted")
    yield
    cluster.install()


@pytest.mark.usefixtures("restricted_pods")
def test_the_same_image_runs_where_the_level_restricted_is_enforced(
    make_space: Callable[..., Space],
):
    space = make_space(**RESTRICTED)
    space.apply(*script_job("fit", script("linear_fit.py")))

    status = space.wait_for_status("fit", phase="Complete")

    assert status["result"] == {"slope": "3.0", "offset": "1.0", "uid": "1000", "world": "2"}


def test_a_refusal_by_pod_security_is_the_reason_and_names_the_chart_value(
    make_space: Callable[..., Space],
):
    space = make_space(**RESTRICTED)
    space.apply(digits("digits", 1))

    status = space.wait_for_status("digits", reason="PodSecurity")

    assert status["phase"] == "Pending"
    assert "podSecurity" in status["message"]


def test_a_sidecar_that_never_ends_does_not_keep_a_job_from_completing(space: Space):
    sidecar = {
        "name": "sidecar",
        "image": PLAIN,
        "command": ["python", "-c", "import signal; signal.pause()"],
    }
    space.apply(digits("digits", 5, podTemplate={"spec": {"containers": [sidecar]}}))

    space.wait_for_complete("digits")
