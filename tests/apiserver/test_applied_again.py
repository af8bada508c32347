"""What Argo CD and Flux do with jobs in Git, without either: their applies, and Flux's expressions.

The API server evaluates the expressions with the same library as Flux, as rules of a kind of object
that has the status of a job.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from envtest import APPLY, MERGE, ROOT, Answer, ApiServer

from ddpjob.core.api.yaml_text import load_yaml

FLUX = load_yaml((ROOT / "examples/flux/kustomization.yaml").read_text())
(EXPRESSIONS,) = FLUX["spec"]["healthCheckExprs"]
QUEUE = "kueue.x-k8s.io/queue-name"
STRING = {"type": "string", "maxLength": 64}
OTHERS = {"suspend": True, "retries": 2, "nodes": 3}

Apply = Callable[..., Answer]


def job(labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a job as it is in Git."""
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "job", "labels": labels or {}},
        "spec": {"image": "trainer:1", "args": ["train.py"], **spec},
    }


# The expressions for Flux


def about_self(expression: str) -> str:
    """Return an expression in which the status is a field of `self`, as rules of a CRD have it."""
    return re.sub(r"(?<![\w.])status(?=\.)", "self.status", expression)


def kind_with_rules() -> dict[str, Any]:
    """Return a CRD that refuses an object for each expression that holds for its status."""
    condition = {"type": "object", "properties": {"type": STRING, "status": STRING}}
    status = {
        "type": "object",
        "properties": {
            "phase": STRING,
            "conditions": {"type": "array", "maxItems": 9, "items": condition},
        },
    }
    rules = [
        {"rule": f"!({about_self(EXPRESSIONS[name])})", "message": f"is {name}"}
        for name in ("failed", "current")
    ]
    schema = {
        "type": "object",
        "properties": {"status": status},
        "x-kubernetes-validations": rules,
    }
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "healths.flux.test"},
        "spec": {
            "group": "flux.test",
            "scope": "Cluster",
            "names": {"plural": "healths", "kind": "Health"},
            "versions": [version],
        },
    }


@pytest.fixture(scope="module")
def health_of(bare_apiserver: ApiServer) -> Iterator[Callable[..., set[str]]]:
    """Return a function that tells which expressions hold for a status."""
    bare_apiserver.kubectl("apply", "-f", "-", stdin=json.dumps(kind_with_rules()))
    path = "/apis/flux.test/v1/healths"
    bare_apiserver.wait_for(lambda: bare_apiserver.request("GET", path).code == 200)

    def evaluate(status: dict[str, Any]) -> set[str]:
        health = {
            "apiVersion": "flux.test/v1",
            "kind": "Health",
            "metadata": {"name": "job"},
            "status": status,
        }
        answer = bare_apiserver.request("POST", f"{path}?dryRun=All", health)
        causes = answer.body.get("details", {}).get("causes", [])
        assert answer.code == (422 if causes else 201), answer.body
        return {cause["message"].rpartition("is ")[2] for cause in causes}

    yield evaluate
    bare_apiserver.kubectl("delete", "crd", "healths.flux.test")


def conditions(**holds: bool) -> list[dict[str, str]]:
    return [{"type": kind, "status": str(value)} for kind, value in holds.items()]


@pytest.mark.parametrize(
    ("status", "health"),
    [
        ({}, set()),
        ({"phase": "Pending"}, set()),
        ({"phase": "Starting", "conditions": conditions(Running=False)}, set()),
        ({"phase": "Restarting", "conditions": conditions(Suspended=False)}, set()),
        ({"phase": "Pending", "conditions": conditions(Suspended=True)}, {"current"}),
        ({"phase": "Suspended", "conditions": conditions(Suspended=True)}, {"current"}),
        ({"phase": "Running", "conditions": conditions(Running=True)}, {"current"}),
        ({"phase": "Complete", "conditions": conditions(Complete=True)}, {"current"}),
        ({"phase": "Failed", "conditions": conditions(Failed=True)}, {"failed"}),
    ],
)
def test_the_expressions_for_flux_hold_for_these_statuses(
    health_of: Callable[..., set[str]], status: dict[str, Any], health: set[str]
) -> None:
    assert health_of(status) == health


# A manifest is applied again


def applied_by_flux(server: ApiServer, path: str, manifest: dict[str, Any]) -> Answer:
    """Apply as Flux does, and as Argo CD with ServerSideApply=true."""
    query = "fieldManager=kustomize-controller&force=true"
    return server.request("PATCH", f"{path}?{query}", manifest, APPLY)


def applied_by_argo_cd(server: ApiServer, path: str, manifest: dict[str, Any]) -> Answer:
    """Apply as Argo CD does: like kubectl, with the last manifest in an annotation."""
    namespace = path.split("/")[5]
    done = server.kubectl(
        "apply", f"--namespace={namespace}", "-f", "-", stdin=json.dumps(manifest), check=False
    )
    return Answer(422 if done.returncode else 200, {"message": done.stderr}, [])


@pytest.fixture(params=[applied_by_flux, applied_by_argo_cd])
def apply(request: pytest.FixtureRequest, apiserver: ApiServer, path: str) -> Apply:
    return lambda manifest: request.param(apiserver, path, manifest)


@pytest.fixture
def path(namespace: str) -> str:
    return f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs/job"


def changed_by_others(server: ApiServer, path: str) -> None:
    change = {"metadata": {"labels": {QUEUE: "default"}}, "spec": OTHERS}
    answer = server.request("PATCH", path, change, MERGE)
    assert answer.code == 200, answer.body


def test_what_git_does_not_have_stays_as_others_have_set_it(
    apiserver: ApiServer, path: str, apply: Apply
) -> None:
    apply(job())
    changed_by_others(apiserver, path)
    assert apply(job()).code == 200
    found = apiserver.request("GET", path).body
    assert {field: found["spec"][field] for field in OTHERS} == OTHERS
    assert found["metadata"]["labels"][QUEUE] == "default"


def test_what_git_has_is_set_back_and_retries_cannot_be(
    apiserver: ApiServer, path: str, apply: Apply
) -> None:
    apply(job(suspend=False, nodes=1))
    changed_by_others(apiserver, path)
    assert apply(job(suspend=False, nodes=1)).code == 200
    spec = apiserver.request("GET", path).body["spec"]
    assert (spec["suspend"], spec["nodes"], spec["retries"]) == (False, 1, 2)
    refused = apply(job(retries=1))
    assert refused.code == 422
    assert "can only grow" in refused.body["message"]


def test_a_new_version_of_a_job_is_refused_as_invalid(apply: Apply) -> None:
    apply(job())
    refused = apply(job(image="trainer:2"))
    assert refused.code == 422
    assert "is immutable" in refused.body["message"]


def test_a_replaced_job_loses_what_others_have_set(apiserver: ApiServer, path: str) -> None:
    applied_by_flux(apiserver, path, job())
    apiserver.request("PATCH", path, {"spec": {"suspend": True}}, MERGE)
    apiserver.request("PATCH", path, {"metadata": {"labels": {QUEUE: "default"}}}, MERGE)
    found = apiserver.request("GET", path).body
    version = {"resourceVersion": found["metadata"]["resourceVersion"]}
    manifest = job()
    manifest["metadata"] |= version
    replaced = apiserver.request("PUT", path, manifest).body
    assert replaced["spec"]["suspend"] is False
    assert QUEUE not in replaced["metadata"].get("labels", {})
    apiserver.request("PATCH", path, {"spec": {"retries": 1}}, MERGE)
    del manifest["metadata"]["resourceVersion"]
    kubectl = ("replace", f"--namespace={path.split('/')[5]}", "-f", "-")
    refused = apiserver.kubectl(*kubectl, stdin=json.dumps(manifest), check=False)
    assert "can only grow" in refused.stderr
