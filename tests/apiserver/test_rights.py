"""What each role in the table of SECURITY.md can and cannot do, on an API server with RBAC.

One operator serves one namespace for each test that needs it. It has the chart's Roles.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import pytest
from envtest import MERGE, ROOT, ApiServer
from play import Cluster, Operator, end
from roles import (
    Chart,
    User,
    aggregated,
    grant,
    impersonated,
    needs_helm,
    path_of,
    rendered,
    user_with,
    with_the_rights_of,
    without_token,
)

from ddpjob.controller.territory import MARK
from ddpjob.core.agent_files import agent_files, config_map_name

# The names of the rows, at the beginnings of the first cells.
ROWS = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)

AGENT = config_map_name()
ACCOUNT = "ddpjob-ddpjob-operator"
LEASE = "ddpjob-ddpjob-operator"

READING = (
    *("get ddpjobs", "list ddpjobs", "get ddpjobs/status", "get ddpjobs/scale"),
    *("get pods", "get pods/log", "list events", "get configmaps"),
)
EDITING = (
    *("create ddpjobs", "update ddpjobs", "patch ddpjobs", "delete ddpjobs", "patch ddpjobs/scale"),
    *("create pods", "patch pods", "delete pods", "create pods/exec", "get secrets"),
)
WRITING_CONFIG_MAPS = tuple(f"{verb} configmaps" for verb in ("create", "update", "delete"))
WRITING_LEASES = tuple(f"{verb} leases" for verb in ("get", "create", "update", "patch"))
# What is left to the operator and to administrators.
GOVERNING = (
    *("update ddpjobs/status", "patch ddpjobs/status", "create roles", "create rolebindings"),
)

Test = TypeVar("Test", bound=Callable[..., None])
tested: dict[str, str] = {}


def of_row(name: str) -> Callable[[Test], Test]:
    """Name the row of the table that a test is about."""

    def register(test: Test) -> Test:
        tested[name] = test.__name__
        return test

    return register


def check(user: User, namespace: str, can: Iterable[str], cannot: Iterable[str]) -> None:
    """Fail with the missing rights of a user, and with the excess ones."""
    assert [right for right in can if not user.may(right, namespace)] == []
    assert [right for right in cannot if user.may(right, namespace)] == []


def rules(group: str, resource: str, *rights: str) -> list[dict[str, Any]]:
    """Return the rules of a role for one resource, from rights such as `create leases`."""
    verbs = [right.split()[0] for right in rights]
    return [{"apiGroups": [group], "resources": [resource], "verbs": verbs}]


def a_job(name: str, **more: Any) -> dict[str, Any]:
    spec = {"image": "trainer:1", "args": ["train.py"], "serviceAccountName": "payroll"}
    kind = {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}}
    return {**kind, "spec": spec, **more}


def a_powerful_pod(account: str) -> dict[str, Any]:
    """Return a pod with an account, and with all files of its node."""
    volumes = [{"name": "node", "hostPath": {"path": "/"}}]
    spec = {"serviceAccountName": account, "volumes": volumes}
    containers = [{"name": "it", "image": "i"}]
    return {"metadata": {"name": "powerful"}, "spec": {**spec, "containers": containers}}


class Installation(NamedTuple):
    """An operator with its own namespace, and the watched namespaces."""

    operator: Operator
    home: str
    clusters: Mapping[str, Cluster]


@pytest.fixture(scope="module")
def chart() -> Chart:
    """Return the chart's objects, with rights in all namespaces."""
    return rendered("anywhere")


@pytest.fixture(scope="module")
def installation(
    apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Run the operator with the chart's Roles for `watchNamespaces`."""
    home = apiserver.create_namespace("home")
    names = {purpose: apiserver.create_namespace(purpose) for purpose in ("maps", "lease", "code")}
    watched = f"watchNamespaces={{{','.join(names.values())}}}"
    chart = rendered(home, "--set", watched, "--set", "rbac.aggregateRoles=false")
    folder = tmp_path_factory.mktemp("rights")
    kubeconfig, options = with_the_rights_of(chart, apiserver, home, folder)
    operator = Operator(folder, kubeconfig, f"--lease-namespace={home}", *options)
    clusters = {purpose: Cluster(apiserver, name) for purpose, name in names.items()}
    yield Installation(operator, home, clusters)
    end(operator)
    for name in names.values():
        apiserver.delete_jobs(name)


def test_each_row_of_the_table_has_a_test() -> None:
    assert sorted(ROWS) == sorted(tested)


# People


@needs_helm
@of_row("reader")
def test_a_reader_sees_jobs_and_changes_nothing(
    apiserver: ApiServer, chart: Chart, cluster: Cluster, other_namespace: Cluster
) -> None:
    reader = user_with(apiserver, cluster.namespace, aggregated(apiserver, chart, "view"))
    changing = (*EDITING, *WRITING_CONFIG_MAPS, *WRITING_LEASES, *GOVERNING)
    check(reader, cluster.namespace, can=READING, cannot=changing)
    check(reader, other_namespace.namespace, can=(), cannot=READING)

    cluster.create_job("digits")
    path = path_of("ddpjobs", cluster.namespace, "digits")
    assert reader.request("GET", path).body["spec"]["args"] == ["train.py"]
    assert reader.request("PATCH", path, {"spec": {"suspend": True}}, MERGE).code == 403
    assert reader.request("DELETE", path).code == 403
    assert cluster.exists("digits")


@needs_helm
@of_row("editor")
def test_an_editor_runs_jobs_with_any_account_and_writes_no_status(
    apiserver: ApiServer, chart: Chart, cluster: Cluster, other_namespace: Cluster
) -> None:
    editor = user_with(apiserver, cluster.namespace, aggregated(apiserver, chart, "edit"))
    can = (*READING, *EDITING, *WRITING_CONFIG_MAPS, *WRITING_LEASES)
    check(editor, cluster.namespace, can=can, cannot=GOVERNING)
    check(editor, other_namespace.namespace, can=(), cannot=EDITING)

    forged = {"phase": "Complete", "restarts": 0}
    jobs = path_of("ddpjobs", cluster.namespace)
    path = f"{jobs}/digits"
    assert editor.request("POST", jobs, a_job("digits", status=forged)).code == 201
    assert editor.request("PATCH", path, {"status": forged}, MERGE).code == 200
    assert editor.request("PATCH", f"{path}/status", {"status": forged}, MERGE).code == 403
    assert cluster.status("digits") == {}
    assert editor.request("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, MERGE).code == 200
    assert editor.request("GET", path).body["spec"]["nodes"] == 3
    assert editor.request("DELETE", path).code == 200
    elsewhere = path_of("ddpjobs", other_namespace.namespace)
    assert editor.request("POST", elsewhere, a_job("digits")).code == 403


@needs_helm
@of_row("ConfigMap writer")
def test_whoever_replaces_config_maps_runs_code_in_the_pods(
    apiserver: ApiServer, installation: Installation, tmp_path: Any
) -> None:
    cluster = installation.clusters["maps"]
    namespace = cluster.namespace
    writer = user_with(apiserver, namespace, rules("", "configmaps", *WRITING_CONFIG_MAPS))
    check(writer, namespace, can=WRITING_CONFIG_MAPS, cannot=(*EDITING, *WRITING_LEASES))

    # A ConfigMap created before the operator's is not used, even if it only has one file more.
    maps = path_of("configmaps", namespace)
    data = {**agent_files(), "types.py": "raise SystemExit('code runs')"}
    added = {"metadata": {"name": AGENT}, "immutable": True, "data": data}
    assert writer.request("POST", maps, added).code == 201
    assert "code runs" in output_of_the_agent(data, tmp_path)
    cluster.create_job("digits", nodes=1, serviceAccountName="payroll")
    cluster.wait(lambda: cluster.status("digits").get("reason") == "NameInUse")
    assert f"{AGENT} exists with other content" in cluster.status("digits")["message"]
    assert cluster.pods("digits") == {}
    assert writer.request("DELETE", f"{maps}/{AGENT}").code == 200
    cluster.wait(lambda: cluster.pods("digits"))
    config_map = apiserver.request("GET", f"{maps}/{AGENT}").body
    assert config_map["data"] == agent_files()

    # The operator's own is immutable, but can be replaced, and no pod compares it.
    metadata = {"metadata": {"name": AGENT}}
    forged = {**metadata, "immutable": True, "data": {"agent.py": "print('code runs')"}}
    assert writer.request("PUT", f"{maps}/{AGENT}", {**config_map, **forged}).code == 422
    assert writer.request("DELETE", f"{maps}/{AGENT}").code == 200
    assert writer.request("POST", maps, forged).code == 201
    spec = cluster.pods("digits")["digits-0-0"]["spec"]
    assert AGENT in [volume.get("configMap", {}).get("name") for volume in spec["volumes"]]
    assert spec["serviceAccountName"] == "payroll"

    cluster.create_job("next", nodes=1)
    cluster.wait(lambda: cluster.pods("next"))


def output_of_the_agent(files: Mapping[str, str], folder: Any) -> str:
    """Start the agent from a folder with these files, as a pod does, and return its output."""
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-IS", str(folder), "agent", "{}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr


# Training code


@needs_helm
@of_row("training code")
def test_training_code_decides_its_own_job_only(
    apiserver: ApiServer, installation: Installation
) -> None:
    cluster = installation.clusters["code"]
    for job in ("forger", "neighbour"):
        cluster.create_job(job, nodes=1)
    for job in ("forger", "neighbour"):
        cluster.is_running(job)
    spec = cluster.pods("forger")["forger-0-0"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    assert not [volume for volume in spec["volumes"] if "projected" in volume or "secret" in volume]
    check(without_token(apiserver), cluster.namespace, can=(), cannot=(*READING, *EDITING))

    names = {"job": "neighbour", "pod": "neighbour-0-0"}
    report = {"agent": 1, "attempt": 0, "cause": "Succeeded", "result": {"accuracy": "2"}, **names}
    cluster.ends("forger-0-0", message=json.dumps(report))
    cluster.until("forger", lambda: cluster.status("forger")["phase"] == "Complete")
    assert cluster.status("forger")["result"] == {"accuracy": "2"}
    neighbour = cluster.status("neighbour")
    assert (neighbour["phase"], neighbour["attempt"]["number"]) == ("Running", 0)
    assert not {"result", "lastFailure"}.intersection(neighbour)


# The operator

OPERATING = (
    *("list pods", "create pods", "patch pods", "delete pods", "get services", "create services"),
    *("list ddpjobs", "patch ddpjobs", "delete ddpjobs", "update ddpjobs/status", "create events"),
    *("create configmaps", f"get configmaps {AGENT}", "create leases", f"update leases {MARK}"),
    *("create workloads", "patch workloads", "delete workloads", "patch workloads/status"),
    *("create podgroups", "patch podgroups", "delete podgroups", "list localqueues"),
)
NOT_OPERATING = (
    *("create pods/exec", "create pods/attach", "create pods/portforward", "get pods/proxy"),
    *("get pods/log", "get secrets", "list secrets", "create secrets", "create roles"),
    *("create rolebindings", "create serviceaccounts/token", "create ddpjobs", "update ddpjobs"),
    *("get configmaps", "list configmaps", "patch configmaps", "get leases"),
    *("update leases", "delete leases", "create localqueues", "patch localqueues"),
)


@needs_helm
@of_row("operator")
def test_the_operator_can_use_any_account_of_any_namespace(
    apiserver: ApiServer, namespace: str, other_namespace: Cluster
) -> None:
    grant(apiserver, rendered(namespace))
    operator = impersonated(apiserver, f"system:serviceaccount:{namespace}:{ACCOUNT}")
    check(operator, other_namespace.namespace, can=OPERATING, cannot=NOT_OPERATING)
    # With this account of Kubernetes, a pod gives itself every right.
    pods = path_of("pods", "kube-system")
    pod = a_powerful_pod("clusterrole-aggregation-controller")
    assert operator.request("POST", pods, pod).code == 201
    assert operator.request("DELETE", f"{pods}/powerful").code == 200


@needs_helm
@of_row("operator with `watchNamespaces`")
def test_the_operator_can_use_the_accounts_of_the_watched_namespaces_only(
    apiserver: ApiServer, installation: Installation
) -> None:
    home, watched = installation.home, installation.clusters["code"].namespace
    operator = impersonated(apiserver, f"system:serviceaccount:{home}:{ACCOUNT}")
    check(operator, watched, can=OPERATING, cannot=NOT_OPERATING)
    check(operator, "kube-system", can=(), cannot=OPERATING)
    own = ("create leases", f"get leases {LEASE}", f"update leases {LEASE}")
    check(operator, home, can=own, cannot=[right for right in OPERATING if right not in own])
    for place, code in ((watched, 201), ("kube-system", 403)):
        answer = operator.request("POST", path_of("pods", place), a_powerful_pod("payroll"))
        assert answer.code == code
    assert operator.request("DELETE", path_of("pods", watched, "powerful")).code == 200


# It ends the operator, so it is the last one.


@needs_helm
@of_row("Lease writer")
def test_whoever_writes_leases_stops_the_operator(
    apiserver: ApiServer, installation: Installation
) -> None:
    cluster = installation.clusters["lease"]
    namespace, home = cluster.namespace, installation.home
    writing = rules("coordination.k8s.io", "leases", *WRITING_LEASES)
    writer = user_with(apiserver, namespace, writing)
    check(writer, namespace, can=WRITING_LEASES, cannot=(*EDITING, *WRITING_CONFIG_MAPS))

    mark = {"metadata": {"name": MARK}, "spec": {"holderIdentity": "somebody"}}
    assert writer.request("POST", path_of("leases", namespace), mark).code == 201
    cluster.create_job("digits")
    cluster.wait(lambda: "NotServed" in cluster.event_reasons())
    assert (cluster.status("digits"), cluster.pods("digits")) == ({}, {})
    assert cluster.holder(MARK) == "somebody"

    at_home = user_with(apiserver, home, writing)
    taken = {"spec": {"holderIdentity": "somebody"}}
    assert at_home.request("PATCH", path_of("leases", home, LEASE), taken, MERGE).code == 200
    cluster.wait(lambda: installation.operator.is_over)
