"""What `ddpjob doctor` finds of the operator and of the networks in the user's namespace."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_api import FakeApi, Proceed, refusal

from ddpjob.client import AsyncClient
from ddpjob.client.doctor import OPERATOR, Finding, check_networks, check_operator, examine

OWN_NAMESPACE = {"kubernetes.io/metadata.name": "ml"}


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
    template = {"spec": {"containers": [{"name": "operator", "args": ["operator", argument]}]}}
    labels = dict(label.split("=") for label in OPERATOR.split(","))
    metadata = {"name": "operator", "namespace": "system", "labels": labels}
    fake.create("deployments", {"metadata": metadata, "spec": {"template": template}})
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        findings = await check_operator(client)
    about_namespaces = [
        one for one in findings if one.subject == "Operator" and "ready" not in one.found
    ]
    assert [one.found for one in about_namespaces] == ([found] if found else [])
    assert all(advice in one.advice for one in about_namespaces)


# Networks


def close(fake: FakeApi, name: str = "deny-all") -> None:
    """Create a NetworkPolicy that admits nothing."""
    spec = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    fake.create("networkpolicies", {"metadata": {"name": name, "namespace": "ml"}, "spec": spec})


async def networks(kubeconfig: Path) -> list[Finding]:
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        return list(await check_networks(client))


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
    assert all("docs/users/teams.md" in one.advice for one in findings)


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


async def test_doctor_says_that_the_user_may_not_list_policies(
    fake: FakeApi, kubeconfig: Path
) -> None:
    fake.fault("GET", ".*networkpolicies", refusal(403, "Forbidden", "you may not list them"))
    fake.fault("GET", "/version", version)
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        findings = [one async for one in examine(client) if one.subject == "Networks"]
    assert findings == [
        Finding("Networks", "cannot be read: you may not list them", is_hidden=True)
    ]


async def version(_: web.Request, __: Proceed) -> web.StreamResponse:
    return web.json_response({"gitVersion": "v1.36.1"})
