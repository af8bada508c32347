"""Gangs in the schedulers of an administrator: `make test-queues`.

INSTALL_VOLCANO and INSTALL_COSCHEDULING name programs to install them. Such a program gets the name
of the cluster. Gangs of Kubernetes itself are in tests/apiserver/test_whole_gangs.py.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .builders import digits
from .cluster import NAME, WORKERS, Cluster
from .commands import ROOT, Object, run
from .conftest import skip_or_fail
from .namespace import Namespace

pytestmark = [pytest.mark.queues, pytest.mark.alone]

LAB = ROOT.parent / "shared" / "lab"

# Room for three pods, and each job has two.
SLOT = "example.com/slot"
RESOURCES = {"requests": {SLOT: "1"}, "limits": {SLOT: "1"}}


@pytest.fixture(scope="module")
def slots(cluster: Cluster) -> Iterator[None]:
    """Give the first worker three devices, each for one pod."""
    change = ("patch", "node", WORKERS[0], "--subresource=status", "--type=merge", "--patch")
    for count in ("3", None):
        cluster.kubectl(*change, json.dumps({"status": {"capacity": {SLOT: count}}}))
        if count:
            yield


def in_gang(name: str, epochs: int, gang: str) -> Object:
    scheduler = {"spec": {"schedulerName": gang.lower()}}
    return digits(
        name,
        epochs,
        resources=RESOURCES,
        scheduling={"gang": gang},
        podTemplate=scheduler,
        topologySpreadConstraints=[],
    )


@pytest.mark.usefixtures("slots")
@pytest.mark.parametrize("gang", ["Volcano", "Coscheduling"])
def test_of_two_gangs_that_need_more_than_half_one_runs_and_the_other_holds_nothing(
    cluster: Cluster, namespace: Namespace, gang: str
) -> None:
    install = Path(os.environ.get(f"INSTALL_{gang.upper()}", LAB / gang.lower()))
    if not install.exists():
        skip_or_fail(f"{gang} cannot be installed: INSTALL_{gang.upper()}=PROGRAM names one")
    run(str(install), NAME, KUBECONFIG=str(cluster.kubeconfig))
    namespace.apply(in_gang("first", 30, gang))
    namespace.wait_for_status("first", phase="Running")
    namespace.apply(in_gang("second", 2, gang))
    status = namespace.wait_for_status("second", reason="Unschedulable")
    assert not any(namespace.nodes_of("second").values())
    if gang == "Volcano":
        assert "the scheduler has no room for all 2 pods yet" in status["message"]
    namespace.wait_for_status("first", phase="Complete")
    namespace.wait_for_status("second", phase="Complete")
