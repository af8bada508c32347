"""What `ddpjob doctor` finds in a namespace, with many rights and with few."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_api import FakeApi, Proceed, refusal

from ddpjob import DDPJob
from ddpjob.client import AsyncClient
from ddpjob.client.doctor import (
    Check,
    check_networks,
    check_pod_security,
    check_quota,
    check_storage,
    examine,
)
from ddpjob.client.findings import Finding
from ddpjob.client.operators import OPERATOR, check_operator
from ddpjob.core.api import names

OWN_NAMESPACE = {"kubernetes.io/metadata.name": "ml"}
HOLDER = "system/operator"


async def findings_of(check: Check, kubeconfig: Path) -> list[Finding]:
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        return list(await check(client))


def forbid(fake: FakeApi, *plurals: str) -> None:
    """Let the user read none of these, in no namespace."""
    for plural in plurals:
        answer = refusal(403, "Forbidden", f"you may not list {plural}")
        fake.fault("GET", f".*/{plural}(/.*)?", answer, times=99)


def a_job(fake: FakeApi, name: str = "digits", reason: str = "", **spec: Any) -> None:
    """Create a job old enough for an operator to have seen it."""
    body = DDPJob.create(name, image="i", args=["train.py"], **spec).manifest()
    status = {"status": {"reason": reason}} if reason else {}
    fake.create("ddpjobs", {**body, **status})
    fake.objects["ddpjobs", "ml", name]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"


def mark(fake: FakeApi, age: timedelta = timedelta(seconds=30)) -> None:
    """Create the Lease of an installation for the namespace."""
    renewed = (datetime.now(UTC) - age).isoformat(timespec="microseconds")
    spec = {"holderIdentity": HOLDER, "leaseDurationSeconds": 180, "renewTime": renewed}
    fake.create("leases", {"metadata": {"name": names.INSTALLATION_LEASE}, "spec": spec})


# The operator


def deploy(fake: FakeApi, argument: str) -> None:
    """Create the Deployment of an operator with an argument."""
    template = {"spec": {"containers": [{"name": "operator", "args": ["operator", argument]}]}}
    labels = dict(label.split("=") for label in OPERATOR.split(","))
    metadata = {"name": "operator", "namespace": "system", "labels": labels}
    fake.create("deployments", {"metadata": metadata, "spec": {"template": template}})


@pytest.mark.parametrize(
    ("argument", "found", "advice"),
    [
        ("--namespace=a", "operator watches only a", "add ml to watchNamespaces"),
        ("--exclude-namespace=ml", "operator excludes the namespace ml", "excludedNamespaces"),
        ("--namespace=ml", None, ""),
        ("--exclude-namespace=a", None, ""),
    ],
)
async def test_doctor_says_whether_the_operator_serves_the_namespace(
    fake: FakeApi, kubeconfig: Path, argument: str, found: str | None, advice: str
) -> None:
    deploy(fake, argument)
    findings = await findings_of(check_operator, kubeconfig)
    about_namespaces = [
        one for one in findings if one.subject == "Operator" and "ready" not in one.found
    ]
    assert [one.found for one in about_namespaces] == ([found] if found else [])
    assert all(advice in one.advice for one in about_namespaces)


async def test_the_lease_of_the_namespace_says_who_serves_it(
    fake: FakeApi, kubeconfig: Path
) -> None:
    forbid(fake, "deployments")
    mark(fake)
    assert await findings_of(check_operator, kubeconfig) == [
        Finding("Operator", f"{HOLDER} serves namespace ml")
    ]


async def test_a_served_namespace_needs_no_deployment_and_not_each_installation(
    fake: FakeApi, kubeconfig: Path
) -> None:
    mark(fake)
    (only,) = await findings_of(check_operator, kubeconfig)
    assert only == Finding("Operator", f"{HOLDER} serves namespace ml")
    deploy(fake, "--namespace=another")
    assert not [
        one for one in await findings_of(check_operator, kubeconfig) if "watches only" in one.found
    ]


async def test_a_job_that_no_operator_has_looked_at_is_a_problem(
    fake: FakeApi, kubeconfig: Path
) -> None:
    forbid(fake, "deployments", "leases")
    a_job(fake)
    (only,) = await findings_of(check_operator, kubeconfig)
    assert (only.is_problem, only.found) == (
        True,
        "no operator has looked at job digits of namespace ml",
    )
    assert "watchNamespaces" in only.advice
    assert "kubectl -n ml describe ddpjob digits" in only.advice


async def test_a_lease_that_is_not_renewed_while_there_are_jobs_is_a_problem(
    fake: FakeApi, kubeconfig: Path
) -> None:
    forbid(fake, "deployments")
    mark(fake, timedelta(minutes=10))
    a_job(fake, reason="NodesRunning")
    (only,) = await findings_of(check_operator, kubeconfig)
    assert (only.is_problem, only.found) == (
        True,
        f"no operator serves namespace ml, which has jobs; {HOLDER} did until 10m ago",
    )


@pytest.mark.parametrize(
    ("job", "forbidden", "answer"),
    [
        ({}, (), "a current Lease ddpjob-installation only while it has jobs → submit a job"),
        # A job of another controller tells nothing of this operator.
        ({"managedBy": "example.com/queue"}, (), "only while it has jobs → submit a job"),
        ({"reason": "NodesRunning"}, (), "it has jobs, and no Lease ddpjob-installation → if jobs"),
        ({}, ("leases",), "you may not read its Lease ddpjob-installation → if jobs do not run"),
    ],
)
async def test_it_is_no_problem_that_the_operator_is_not_known(
    fake: FakeApi,
    kubeconfig: Path,
    job: Mapping[str, str],
    forbidden: tuple[str, ...],
    answer: str,
) -> None:
    forbid(fake, "deployments", *forbidden)
    if job:
        a_job(fake, **job)
    (only,) = await findings_of(check_operator, kubeconfig)
    assert (only.is_unknown, only.is_problem) == (True, False)
    assert answer in f"{only.found} → {only.advice}"


async def test_without_the_crd_the_other_checks_go_on(fake: FakeApi, kubeconfig: Path) -> None:
    missing = refusal(404, "NotFound", "the server could not find the requested resource")
    fake.fault("GET", "/apis/ddpjob.dev/.*", missing, times=99)
    found = await findings_of(check_storage, kubeconfig)
    assert [one.subject for one in found] == ["Storage"]
    assert await findings_of(check_operator, kubeconfig)


# Quotas

CPU_QUOTA = {"hard": {"requests.cpu": "8", "limits.memory": "8Gi", "pods": "9"}}


def restrict(fake: FakeApi, **spec: Any) -> None:
    status = {"hard": spec["hard"], "used": dict.fromkeys(spec["hard"], "0")}
    fake.create("resourcequotas", {"metadata": {"name": "team"}, "spec": spec, "status": status})


async def test_a_quota_that_needs_requests_is_found_with_the_options_that_name_them(
    fake: FakeApi, kubeconfig: Path
) -> None:
    restrict(fake, **CPU_QUOTA)
    (only,) = await findings_of(check_quota, kubeconfig)
    assert only.found == "team refuses jobs without requests.cpu, limits.memory in spec.resources"
    assert "--cpu 4 --memory 16Gi, or ask for a LimitRange" in only.advice


async def test_a_limit_range_gives_what_a_quota_needs(fake: FakeApi, kubeconfig: Path) -> None:
    restrict(fake, **CPU_QUOTA)
    limits = [{"type": "Container", "defaultRequest": {"cpu": "1"}, "default": {"memory": "1Gi"}}]
    fake.create("limitranges", {"metadata": {"name": "defaults"}, "spec": {"limits": limits}})
    assert await findings_of(check_quota, kubeconfig) == [Finding("Quota", "team has room")]


# Storage


async def test_without_shared_storage_all_is_well(fake: FakeApi, kubeconfig: Path) -> None:
    forbid(fake, "storageclasses")
    (only,) = await findings_of(check_storage, kubeconfig)
    assert (only.is_problem, only.is_unknown) == (False, False)
    assert "only jobs of several nodes with spec.checkpoint need one" in only.found


async def test_a_job_whose_claim_does_not_exist_is_a_problem(
    fake: FakeApi, kubeconfig: Path
) -> None:
    fake.create("persistentvolumeclaims", {"metadata": {"name": "data"}, "spec": {}})
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    a_job(fake, checkpoint={"claimName": "ckpt"}, volumes=[volume])
    (only,) = await findings_of(check_storage, kubeconfig)
    assert only.found == "job digits mounts claim ckpt, which does not exist"
    assert only.is_problem


# Pod Security


async def test_a_restricted_namespace_is_no_problem_if_the_default_of_the_pods_is_not_known(
    fake: FakeApi, kubeconfig: Path
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    fake.create("namespaces", {"metadata": {"name": "ml", "namespace": "", "labels": labels}})
    forbid(fake, "deployments")
    (only,) = await findings_of(check_pod_security, kubeconfig)
    assert (only.is_unknown, only.is_problem) == (True, False)
    assert "spec.podSecurity: Restricted" in only.advice


# Networks


def close(fake: FakeApi, name: str = "deny-all") -> None:
    """Create a NetworkPolicy that admits nothing."""
    spec = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    fake.create("networkpolicies", {"metadata": {"name": name, "namespace": "ml"}, "spec": spec})


async def networks(kubeconfig: Path) -> list[Finding]:
    return await findings_of(check_networks, kubeconfig)


async def test_doctor_names_the_policy_that_keeps_pods_apart(
    fake: FakeApi, kubeconfig: Path
) -> None:
    close(fake)
    findings = await networks(kubeconfig)
    assert [one.found for one in findings] == [
        "the pods of a job cannot reach each other: NetworkPolicy deny-all admits no such Ingress",
        "the pods of a job cannot reach each other: NetworkPolicy deny-all admits no such Egress",
        "the pods of a job cannot reach the cluster's DNS: NetworkPolicy deny-all admits no such "
        "Egress",
    ]
    assert all(one.page == "users/teams.md#networks" and one.is_problem for one in findings)


async def test_doctor_names_all_policies_that_would_have_to_admit_them(
    fake: FakeApi, kubeconfig: Path
) -> None:
    close(fake)
    close(fake, "closed")
    first, *_ = await networks(kubeconfig)
    assert "NetworkPolicies closed, deny-all admit no such Ingress" in first.found


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ((), "namespace ml has no NetworkPolicy"),
        (({},), "no NetworkPolicy keeps the pods of a job apart"),
        # The label of the namespace is its name.
        (
            ({"from": [{"namespaceSelector": {"matchLabels": OWN_NAMESPACE}}]},),
            "no NetworkPolicy keeps the pods of a job apart",
        ),
    ],
)
async def test_doctor_finds_networks_that_are_open(
    fake: FakeApi, kubeconfig: Path, rules: tuple[Any, ...], found: str
) -> None:
    if rules:
        policy = {"podSelector": {}, "ingress": list(rules)}
        metadata = {"name": "open", "namespace": "ml"}
        fake.create("networkpolicies", {"metadata": metadata, "spec": policy})
    assert await networks(kubeconfig) == [Finding("Networks", found)]


async def test_what_the_user_may_not_look_at_is_one_line(fake: FakeApi, kubeconfig: Path) -> None:
    forbid(fake, "networkpolicies", "nodes")
    fake.fault("GET", "/version", version)
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        findings = [one async for one in examine(client)]
    assert not [one for one in findings if one.subject in ("Networks", "Nodes")]
    advice = "if jobs do not run, ask an administrator for ddpjob doctor -n ml"
    assert findings[-1] == Finding(
        "Not checked", "you may not look at: Nodes, Networks", advice, is_unknown=True
    )


async def test_an_error_that_is_no_refusal_has_its_own_line(
    fake: FakeApi, kubeconfig: Path
) -> None:
    fake.fault("GET", ".*networkpolicies", refusal(500, "InternalError", "etcd is down"), times=9)
    fake.fault("GET", "/version", version)
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        findings = [one async for one in examine(client) if one.subject == "Networks"]
    found, advice = "cannot be read: etcd is down", "run ddpjob doctor again"
    assert findings == [Finding("Networks", found, advice, is_unknown=True)]


async def version(_: web.Request, __: Proceed) -> web.StreamResponse:
    return web.json_response({"gitVersion": "v1.36.1"})
