"""A user's own images and pods: plain images, sidecars, and a namespace with strict rules."""

from collections.abc import Callable

from .builders import script, script_job
from .cluster import PLAIN
from .namespace import Namespace

RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


def test_a_plain_root_image_runs_a_script_beside_a_sidecar_that_never_ends(namespace: Namespace):
    sidecar = {
        "name": "sidecar",
        "image": PLAIN,
        "command": ["python", "-c", "import signal; signal.pause()"],
    }
    pods = {"spec": {"containers": [sidecar]}}
    namespace.apply(*script_job("fit", script("linear_fit.py"), podTemplate=pods))

    status = namespace.wait_for_complete("fit")

    assert status["result"] == {"slope": "3.0", "offset": "1.0", "uid": "0", "world": "2"}


def test_the_same_image_runs_where_the_level_restricted_is_enforced(
    make_namespace: Callable[..., Namespace],
):
    namespace = make_namespace(**RESTRICTED)
    namespace.apply(*script_job("fit", script("linear_fit.py")))

    refused = namespace.wait_for_status("fit", reason="PodSecurity")
    assert refused["phase"] == "Pending"
    assert "set spec.podSecurity to Restricted" in refused["message"]

    choice = '{"spec": {"podSecurity": "Restricted"}}'
    namespace.kubectl("patch", "ddpjob", "fit", "--type=merge", f"--patch={choice}")
    status = namespace.wait_for_status("fit", phase="Complete")
    assert status["result"] == {"slope": "3.0", "offset": "1.0", "uid": "1000", "world": "2"}
