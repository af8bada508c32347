"""Gangs scheduled whole by Kubernetes itself: a real API server and a real scheduler."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from envtest import (
    GANG_FLAGS,
    GANG_GATES,
    MISSING,
    NEEDED,
    SCHEDULER,
    ApiServer,
    find_binaries,
)
from play import Cluster, Gate, Operator, end

RACK = "example.com/rack"
HOST = "kubernetes.io/hostname"

# The names of the jobs of these tests.
JOBS = ("first", "second", "one-0", "one-1")

# Three pods of a job fit, or all those of another one.
NODES = ("node-0", "node-1", "node-2", "node-3")
RESOURCES = {"requests": {"cpu": "1"}}


class Scheduled(Cluster):
    """A namespace in which the scheduler binds the pods. `step` simulates the kubelets alone."""

    def step(self, job: str) -> None:
        for name, pod in sorted(self.pods(job).items()):
            if pod["metadata"].get("deletionTimestamp"):
                self._delete(name)
            elif pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running"):
                self._meet(name, pod["metadata"]["labels"]["ddpjob.dev/attempt"])

    def bound(self, job: str) -> dict[str, str]:
        """Return the nodes of a job's bound pods, by the names of the pods."""
        nodes = {name: pod["spec"].get("nodeName") for name, pod in self.pods(job).items()}
        return {name: str(node) for name, node in nodes.items() if node}

    def groups(self) -> dict[str, dict[str, Any]]:
        path = f"/apis/scheduling.k8s.io/v1beta1/namespaces/{self.namespace}/podgroups"
        items = self.apiserver.request("GET", path).body["items"]
        return {item["metadata"]["name"]: item for item in items}


@pytest.fixture(scope="module")
def gang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    binaries = find_binaries()
    missing = ", ".join(name for name in (*NEEDED, SCHEDULER) if name not in binaries)
    if missing and os.environ.get("CI") == "true":
        pytest.fail(MISSING.format(missing))
    if missing:
        pytest.skip(MISSING.format(missing))
    server = ApiServer(tmp_path_factory.mktemp("gangs"), binaries, *GANG_FLAGS)
    try:
        server.start()
        server.install_crd()
        server.start_scheduler(GANG_GATES)
        for number, node in enumerate(NODES):
            labels = {RACK: f"rack-{number // 2}", HOST: node}
            server.add_node(node, labels, {"cpu": "1", "memory": "8Gi", "pods": "10"})
        yield server
    finally:
        server.stop()


@pytest.fixture
def gangs(gang_server: ApiServer) -> Iterator[Scheduled]:
    cluster = Scheduled(gang_server, gang_server.create_namespace("t"))
    yield cluster
    gang_server.delete_jobs(cluster.namespace)
    # No controller deletes what the jobs own.
    pods = f"/api/v1/namespaces/{cluster.namespace}/pods"
    gang_server.request("DELETE", pods, {"gracePeriodSeconds": 0})
    cluster.wait(lambda: not any(cluster.bound(job) for job in JOBS))


@pytest.fixture
def an_operator(gangs: Scheduled, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    started: list[Operator] = []

    def start(kubeconfig: Path = gangs.apiserver.kubeconfig) -> Operator:
        place = (f"--lease-namespace={gangs.namespace}", f"--namespace={gangs.namespace}")
        started.append(Operator(tmp_path, kubeconfig, *place))
        return started[-1]

    yield start
    for operator in started:
        end(operator)


def test_an_undisturbed_job_writes_its_group_once(
    gangs: Scheduled, an_operator: Callable[..., Operator]
) -> None:
    gate = Gate(gangs.apiserver)
    try:
        an_operator(gate.kubeconfig)
        gangs.create_job("first", nodes=3, resources=RESOURCES)
        gangs.is_running("first")
        for index in range(3):
            gangs.ends(f"first-0-{index}")
        gangs.until("first", lambda: gangs.status("first")["phase"] == "Complete")
        assert [write.split()[0] for write in gate.writes if "podgroups" in write] == ["POST"]
    finally:
        gate.close()


def test_of_two_gangs_that_need_more_than_half_one_runs_and_the_other_holds_nothing(
    gangs: Scheduled, an_operator: Callable[..., Operator]
) -> None:
    an_operator()
    for job in ("first", "second"):
        gangs.create_job(job, nodes=3, resources=RESOURCES)
    gangs.until("first", lambda: len(gangs.pods("first")) == len(gangs.pods("second")) == 3)
    gangs.wait(lambda: gangs.bound("first") or gangs.bound("second"))
    runs, waits = ("first", "second") if gangs.bound("first") else ("second", "first")
    gangs.is_running(runs)
    words = "the scheduler has no room for all 3 pods yet: "
    gangs.wait(lambda: gangs.status(waits).get("message", "").startswith(words))
    assert gangs.status(waits)["reason"] == "Unschedulable"
    assert gangs.bound(waits) == {}
    group = gangs.groups()[f"{waits}-0"]
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}
    assert group["metadata"]["ownerReferences"][0]["name"] == waits
    for index in range(3):
        gangs.ends(f"{runs}-0-{index}")
    gangs.is_running(waits)


def test_a_replaced_pod_joins_its_group_and_a_new_set_of_pods_has_a_new_one(
    gangs: Scheduled, an_operator: Callable[..., Operator]
) -> None:
    an_operator()
    gangs.create_job("first", nodes=3, resources=RESOURCES, recovery="InPlace")
    gangs.is_running("first")
    gangs.ends("first-0-1", code=1)
    gangs.is_running("first", attempt=1)
    pods = gangs.pods("first")
    named = {pods[name]["spec"]["schedulingGroup"]["podGroupName"] for name in gangs.bound("first")}
    assert named == {"first-0"}
    gangs.change_job("first", suspend=True)
    gangs.until("first", lambda: gangs.status("first").get("phase") == "Suspended")
    gangs.until("first", lambda: not gangs.bound("first") or all_ended(gangs, "first"))
    gangs.change_job("first", suspend=False, nodes=2)
    gangs.is_running("first", attempt=2)
    assert gangs.groups()["first-2"]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 2
    assert {pod for pod in gangs.bound("first") if "-2-" in pod} == {"first-2-0", "first-2-1"}


def all_ended(cluster: Scheduled, job: str) -> bool:
    phases = {pod["status"]["phase"] for pod in cluster.pods(job).values()}
    return phases <= {"Failed", "Succeeded"}


def test_all_pods_of_a_job_run_in_one_domain_of_its_topology(
    gangs: Scheduled, an_operator: Callable[..., Operator]
) -> None:
    an_operator()
    scheduling = {"topology": {"required": RACK}}
    gangs.create_job("first", nodes=2, resources=RESOURCES, scheduling=scheduling)
    gangs.is_running("first")
    racks = {node in NODES[:2] for node in gangs.bound("first").values()}
    assert len(racks) == 1


def test_a_gang_waits_if_its_pods_would_be_in_two_domains(
    gangs: Scheduled, an_operator: Callable[..., Operator]
) -> None:
    an_operator()
    # One node of each rack is taken.
    for rack, node in enumerate((NODES[0], NODES[2])):
        gangs.create_job(f"one-{rack}", nodes=1, resources=RESOURCES, nodeSelector={HOST: node})
        gangs.is_running(f"one-{rack}")
    scheduling = {"topology": {"required": RACK}}
    gangs.create_job("first", nodes=2, resources=RESOURCES, scheduling=scheduling)
    gangs.until("first", lambda: gangs.status("first").get("reason") == "Unschedulable")
    assert gangs.bound("first") == {}
    gangs.ends("one-0-0-0")
    gangs.is_running("first")
    assert set(gangs.bound("first").values()) == set(NODES[:2])


def test_with_gangs_switched_off_no_group_is_made(
    gangs: Scheduled, an_operator: Callable[..., Operator]
) -> None:
    an_operator()
    gangs.create_job("first", nodes=2, resources=RESOURCES, scheduling={"gang": "Off"})
    gangs.is_running("first")
    assert gangs.groups() == {}


@pytest.mark.parametrize("passed_on", [False, True])
def test_an_operator_killed_around_the_write_of_a_group_goes_on(
    gangs: Scheduled, an_operator: Callable[..., Operator], passed_on: bool
) -> None:
    gangs.create_job("first", nodes=3, resources=RESOURCES)
    first = an_operator()
    condition = gangs.groups if passed_on else lambda: gangs.status("first").get("phase")
    gangs.wait(condition)
    first.kill()
    gangs.remove_lease("ddpjob-operator")
    an_operator()
    gangs.is_running("first")
    assert list(gangs.groups()) == ["first-0"]
    assert len(gangs.bound("first")) == 3
