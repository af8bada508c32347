"""What `ddpjob doctor` finds of an operator that does nothing in the user's namespace."""

from pathlib import Path

import pytest
from fake_api import FakeApi

from ddpjob.client import AsyncClient
from ddpjob.client.doctor import OPERATOR, check_operator


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
