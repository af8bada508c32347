"""The operator as a process against a real API server; the test plays scheduler and kubelet."""

import http.client
import itertools
import json
import time

import pytest
from play import Gate, succeeded_nodes
from roles import needs_helm, rendered, with_the_rights_of

from ddpjob.controller.lease import DURATION


@pytest.fixture
def a_gate(apiserver):
    gates = []

    def make():
        gates.append(Gate(apiserver))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


def test_a_job_from_apply_to_complete(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.ends("digits-0-0", message=json.dumps({"accuracy": 0.5}))
    cluster.ends("digits-0-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")
    status = cluster.status("digits")
    assert status["result"] == {"accuracy": "0.5"}
    assert status["nodesReady"] == "2/2"
    assert status.get("restarts", 0) == 0
    managers = cluster.managers("digits")
    assert {("ddpjob-operator", "status"), ("ddpjob-operator", "")} <= managers
    # The test plays the user and the kubelet.
    assert {manager for manager, _ in managers} == {"ddpjob-operator", "the-tests"}


def test_a_failed_worker_restarts_the_gang_and_is_named(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.ends("digits-0-1", code=1)
    cluster.is_running("digits", attempt=1)
    status = cluster.status("digits")
    assert status["restarts"] == 1
    assert (status["lastFailure"]["pod"], status["lastFailure"]["rank"]) == ("digits-0-1", 1)
    assert "ValueError: boom" in status["lastFailure"]["message"]


def test_a_pod_that_vanished_while_the_operator_was_down_is_a_disruption(cluster, an_operator):
    first = an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    assert first.stop() == 0
    cluster.vanishes("digits-0-1")
    an_operator()
    cluster.is_running("digits", attempt=1)
    status = cluster.status("digits")
    assert status["budget"] == {"failures": 0, "disruptions": 1, "announced": 0}
    assert status["restarts"] == 1


def test_a_succeeded_node_may_lose_its_pod_while_its_peers_run(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.ends("digits-0-0", message=json.dumps({"accuracy": 0.5}))
    cluster.until("digits", lambda: succeeded_nodes(cluster.status("digits")) == [0])
    cluster.vanishes("digits-0-0")
    cluster.ends("digits-0-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")
    status = cluster.status("digits")
    assert (status["budget"]["disruptions"], status["attempt"]["number"], status["result"]) == (
        0,
        0,
        {"accuracy": "0.5"},
    )


def test_a_field_that_only_the_crd_accepts_fails_the_job_and_is_named(cluster, an_operator):
    # It is misspelt, or one of a newer Kubernetes.
    an_operator()
    cluster.create_job("digits", podTemplate={"spec": {"securityContext": {"runAsUsr": 1000}}})
    cluster.until("digits", lambda: cluster.status("digits").get("phase") == "Failed")
    status = cluster.status("digits")
    assert status["reason"] == "InvalidPod"
    assert 'unknown field "spec.securityContext.runAsUsr"' in status["message"]
    assert "if it is a field of a newer Kubernetes, remove it or upgrade" in status["message"]


def test_an_api_server_that_is_killed_and_started_again_costs_nothing(
    apiserver, cluster, an_operator
):
    operator = an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    apiserver.restart()
    # If the API server was away for longer than the duration of a Lease, the operator ended.
    if operator.is_over:
        assert "Lease" in operator.log
    cluster.ends("digits-0-1", code=1)

    def started_again():
        nonlocal operator
        if operator.is_over:
            # Nothing here depends on the wait for the Lease of the ended one.
            cluster.remove_lease("ddpjob-operator")
            operator = an_operator()
        return cluster.status("digits").get("attempt", {}).get("number") == 1

    cluster.until("digits", started_again)
    cluster.is_running("digits", attempt=1)
    assert cluster.status("digits")["restarts"] == 1


# The members of attempt 1 by their index, after the failure of node 1.
MEMBERS = {"Recreate": ("1-0", "1-1"), "InPlace": ("0-0", "1-1")}


# `make test` has each value once: the moment and the recovery are independent of each other.
@pytest.mark.parametrize(
    ("passed_on", "recovery"),
    [
        pytest.param(False, "InPlace", id="before-the-write-InPlace"),
        pytest.param(True, "Recreate", id="after-the-write-Recreate"),
        pytest.param(False, "Recreate", id="before-the-write-Recreate", marks=pytest.mark.slow),
        pytest.param(True, "InPlace", id="after-the-write-InPlace", marks=pytest.mark.slow),
    ],
)
def test_an_operator_killed_at_any_write_of_a_restart_loses_and_repeats_nothing(
    cluster, an_operator, a_gate, passed_on, recovery
):
    gate = a_gate()

    # Without the Lease of the operator before, a new one need not wait for its expiry.
    def fresh():
        cluster.remove_lease("ddpjob-operator")
        return an_operator(kubeconfig=gate.kubeconfig)

    operator = fresh()
    for k in itertools.count(1):
        job = f"job-{k}"
        cluster.create_job(job, recovery=recovery)
        cluster.is_running(job)
        gate.on_shut = operator.kill
        gate.shut_at(k, passed_on)
        cluster.ends(f"{job}-0-1", code=1)
        cluster.until(job, lambda: gate.is_shut or _is_settled(cluster, job))  # noqa: B023
        was_killed = gate.is_shut
        gate.open()
        if was_killed:
            assert operator.is_over
            operator = fresh()
        cluster.is_running(job, attempt=1)
        members = [f"{job}-{member}" for member in MEMBERS[recovery]]
        _is_one_whole_restart(cluster, job, members)
        if not was_killed:
            break
        for member in members:
            cluster.ends(member)
    assert k > 8, "not every write of a restart was tried: status, deletions, pods and event"


def _is_settled(cluster, job):
    """Return True if the new attempt runs and its event exists, the last write of a restart."""
    path = f"/api/v1/namespaces/{cluster.namespace}/events"
    events = cluster.apiserver.request("GET", path).body["items"]
    told = [e["message"] for e in events if e["involvedObject"]["name"] == job]
    return cluster.status(job)["phase"] == "Running" and "attempt 1 runs on 2 nodes" in told


def _is_one_whole_restart(cluster, job, members):
    status, pods = cluster.status(job), cluster.pods(job)
    assert (status["attempt"]["number"], status["restarts"]) == (1, 1)
    assert status["budget"]["disruptions"] == 0
    of_attempt = {
        name: pod["metadata"]["labels"]["ddpjob.dev/attempt"] for name, pod in pods.items()
    }
    assert sorted(name for name, attempt in of_attempt.items() if attempt == "1") == members
    phases = [
        pods[name]["status"]["phase"] for name, attempt in of_attempt.items() if attempt == "0"
    ]
    assert set(phases) <= {"Failed", "Succeeded"}


def test_of_two_operators_one_writes_and_the_other_takes_over_at_once(cluster, an_operator, a_gate):
    gates = a_gate(), a_gate()
    first = an_operator(kubeconfig=gates[0].kubeconfig)
    cluster.until("digits", cluster.holder)
    holder = cluster.holder()
    second = an_operator(kubeconfig=gates[1].kubeconfig)
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.until("digits", lambda: "waiting for the Lease" in second.log)
    assert gates[0].writes
    assert not gates[1].writes
    told = time.monotonic()
    assert first.stop() == 0
    cluster.until("digits", lambda: cluster.holder() not in ("", holder))
    assert time.monotonic() - told < DURATION
    cluster.ends("digits-0-1", code=1)
    cluster.is_running("digits", attempt=1)
    assert cluster.status("digits")["restarts"] == 1


def test_the_operator_ends_at_once_despite_an_open_connection_to_its_probes(cluster, an_operator):
    operator = an_operator()
    cluster.until("digits", lambda: "leading" in operator.log)
    probe = http.client.HTTPConnection("127.0.0.1", operator.port)
    probe.request("GET", "/healthz")
    assert probe.getresponse().read() == b"ok\n"
    cluster.create_job("digits")
    cluster.is_running("digits")
    told = time.monotonic()
    code = operator.stop()
    took = time.monotonic() - told
    probe.close()
    assert code == 0
    assert cluster.holder() == ""
    assert took < 5, "kopf waits that long for what it takes for tasks of its own"


# --- rights


def uses_every_right(cluster, operator):
    """Run a job that needs each verb.

    Its name is in use at first. It fails, loses a pod, completes, and is deleted.
    """
    service = {"metadata": {"name": "digits"}, "spec": {"clusterIP": "None"}}
    path = f"/api/v1/namespaces/{cluster.namespace}/services"
    assert cluster.apiserver.request("POST", path, service).code == 201
    cluster.create_job("digits")
    cluster.until("digits", lambda: cluster.status("digits").get("reason") == "NameInUse")
    cluster.apiserver.request("DELETE", f"{path}/digits")
    cluster.is_running("digits")
    cluster.ends("digits-0-1", code=1)
    cluster.is_running("digits", attempt=1)
    cluster.vanishes("digits-1-0")
    cluster.is_running("digits", attempt=2)
    cluster.ends("digits-2-0")
    cluster.ends("digits-2-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")
    status = cluster.status("digits")
    assert status["budget"] == {"failures": 1, "disruptions": 1, "announced": 0}
    assert status["restarts"] == 2
    events = f"/api/v1/namespaces/{cluster.namespace}/events"

    def told():
        return {event["reason"] for event in cluster.apiserver.request("GET", events).body["items"]}

    cluster.until("digits", lambda: told() >= {"Running", "Restarting", "Complete"})
    cluster.apiserver.kubectl(
        *("patch", "ddp/digits", "-n", cluster.namespace, "--type=merge"),
        *("-p", '{"spec": {"ttlSecondsAfterFinished": 0}}'),
    )
    cluster.until("digits", lambda: not cluster.exists("digits"))
    assert operator.stop() == 0
    assert cluster.holder("ddpjob-ddpjob-operator") == ""
    assert "forbidden" not in operator.log.lower()


@needs_helm
def test_the_charts_cluster_role_is_enough(apiserver, namespace, cluster, an_operator, tmp_path):
    chart = rendered(namespace)
    kubeconfig, options = with_the_rights_of(chart, apiserver, namespace, tmp_path)
    uses_every_right(cluster, an_operator(*options, kubeconfig=kubeconfig, scope=()))


@needs_helm
def test_the_charts_roles_in_the_watched_namespaces_are_enough(
    apiserver, namespace, cluster, an_operator, tmp_path
):
    chart = rendered(
        namespace,
        *("--set", f"watchNamespaces={{{namespace}}}", "--set", "rbac.aggregateRoles=false"),
        *("--set", "kueue.enabled=false"),
    )
    assert "ClusterRole" not in chart
    kubeconfig, options = with_the_rights_of(chart, apiserver, namespace, tmp_path)
    assert f"--namespace={namespace}" in options
    uses_every_right(cluster, an_operator(*options, kubeconfig=kubeconfig, scope=()))
