"""The command line with the rights of ordinary users, on an API server with RBAC."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from envtest import MERGE, ApiServer
from play import Cluster, Operator
from roles import Chart, aggregated, kubeconfig_with, needs_helm, path_of, rendered
from typer.testing import CliRunner

from ddpjob import DDPJob
from ddpjob.cli.main import app
from ddpjob.core.api import names

ROLEBINDING = re.compile(r"create rolebinding (\S+) --clusterrole=(\w+) --user=(\S+);")


def run(kubeconfig: Path, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, f"--kubeconfig={kubeconfig}"], env={"COLUMNS": "400"})


@pytest.fixture(scope="module")
def chart() -> Chart:
    """Return the chart's objects, with rights in all namespaces."""
    return rendered("anywhere")


@pytest.fixture
def editor(apiserver: ApiServer, chart: Chart, namespace: str, tmp_path: Path) -> Path:
    """Return a kubeconfig of one who has the role `edit` in the namespace."""
    return kubeconfig_with(apiserver, namespace, aggregated(apiserver, chart, "edit"), tmp_path)


def lines_of(text: str) -> dict[str, str]:
    """Return the marks of doctor's lines by their subjects. An arrow continues a line."""
    return {line[4:18].strip(): line[:4].strip() for line in text.splitlines() if line[:4].strip()}


# -- doctor


@needs_helm
def test_doctor_answers_an_editor_in_few_lines(
    cluster: Cluster, editor: Path, an_operator: Callable[..., Operator]
) -> None:
    before = run(editor, "doctor")
    assert (before.exit_code, lines_of(before.stdout)["Operator"]) == (0, "?")
    an_operator()
    cluster.create_job("digits")
    cluster.wait(lambda: cluster.holder(names.INSTALLATION_LEASE))
    after = run(editor, "doctor")
    assert (after.exit_code, lines_of(after.stdout)) == (
        0,
        {
            **dict.fromkeys(("Kubernetes", "DDPJobs", "Operator", "Rights"), "ok"),
            **dict.fromkeys(("Pod Security", "Quota", "Storage", "Networks"), "ok"),
            "Not checked": "?",
        },
    )
    assert f"{cluster.namespace}/ddpjob-operator serves namespace" in after.stdout
    assert "you may not look at: Nodes, DNS" in after.stdout
    # Each line that is not ok has advice below it.
    assert after.stdout.count("?   ") == after.stdout.count("→")


@needs_helm
def test_the_advice_for_missing_rights_gives_them(
    apiserver: ApiServer, chart: Chart, namespace: str, tmp_path: Path
) -> None:
    (edit,) = (one for one in chart["ClusterRole"] if one["metadata"]["name"].endswith("-edit"))
    # The chart's own role only adds to the role of Kubernetes, so alone it is not enough.
    kubeconfig = kubeconfig_with(apiserver, namespace, edit["rules"], tmp_path)
    refused = run(kubeconfig, "doctor")
    assert (refused.exit_code, lines_of(refused.stdout)["Rights"]) == (1, "!!")
    assert "you may not get, list, watch ddpjobs; list, watch pods; get pods/log" in refused.stdout
    found = ROLEBINDING.search(refused.stdout)
    assert found
    assert found[3] == f"system:serviceaccount:{namespace}:person"

    rules = aggregated(apiserver, chart, found[2])
    granted = run(kubeconfig_with(apiserver, namespace, rules, tmp_path), "doctor")
    assert (granted.exit_code, lines_of(granted.stdout)["Rights"]) == (0, "ok")


@needs_helm
def test_the_advice_for_one_who_only_cannot_read_is_the_role_view(
    apiserver: ApiServer, chart: Chart, namespace: str, tmp_path: Path
) -> None:
    writing = [{"apiGroups": ["", names.GROUP], "resources": ["configmaps", names.PLURAL]}]
    rules = [{**rule, "verbs": ["create", "patch", "delete"]} for rule in writing]
    refused = run(kubeconfig_with(apiserver, namespace, rules, tmp_path), "doctor")
    found = ROLEBINDING.search(refused.stdout)
    assert found
    assert found[2] == "view"
    rules += aggregated(apiserver, chart, "view")
    granted = run(kubeconfig_with(apiserver, namespace, rules, tmp_path), "doctor")
    assert lines_of(granted.stdout)["Rights"] == "ok"


@needs_helm
def test_doctor_finds_the_quota_by_which_the_api_server_refuses_a_pod(
    apiserver: ApiServer, namespace: str, editor: Path
) -> None:
    hard = {"requests.cpu": "8", "limits.memory": "8Gi"}
    quotas = path_of("resourcequotas", namespace)
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    assert apiserver.request("POST", quotas, quota).code == 201
    # There is no controller to count.
    status = {"status": {"hard": hard, "used": {"requests.cpu": "0", "limits.memory": "0"}}}
    assert apiserver.request("PATCH", f"{quotas}/team/status", status, MERGE).code == 200

    def create_pod() -> Any:
        pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        return apiserver.request("POST", path_of("pods", namespace) + "?dryRun=All", pod)

    # Admission plugins read quotas and limit ranges from caches, which follow a moment later.
    apiserver.wait_for(lambda: create_pod().code == 403)
    refusal = "must specify limits.memory for: c; requests.cpu for: c"
    assert refusal in create_pod().body["message"]
    found = run(editor, "doctor")
    assert (found.exit_code, lines_of(found.stdout)["Quota"]) == (1, "!!")
    assert "requests.cpu, limits.memory" in found.stdout
    assert "submit jobs with --cpu 4 --memory 16Gi" in found.stdout

    defaults = {"type": "Container", "default": {"memory": "1Gi"}, "defaultRequest": {"cpu": "1"}}
    limits = {"metadata": {"name": "defaults"}, "spec": {"limits": [defaults]}}
    assert apiserver.request("POST", path_of("limitranges", namespace), limits).code == 201
    apiserver.wait_for(lambda: create_pod().code == 201)
    assert lines_of(run(editor, "doctor").stdout)["Quota"] == "ok"


# -- submit


@needs_helm
def test_an_editor_is_told_that_a_claim_does_not_exist(
    apiserver: ApiServer, namespace: str, editor: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    script = ("--script", str(tmp_path / "train.py"), "--image", "i", "--checkpoints", "nope")
    refused = run(editor, "submit", *script)
    assert refused.exit_code == 2
    assert f'PersistentVolumeClaim "nope" does not exist in namespace {namespace}' in refused.stderr
    for plural in ("configmaps", names.PLURAL):
        found = apiserver.request("GET", path_of(plural, namespace)).body["items"]
        assert [one for one in found if one["metadata"]["name"] != "kube-root-ca.crt"] == []


def test_without_the_right_to_read_claims_a_job_is_submitted(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    rules = [{"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": ["*"]}]
    kubeconfig = kubeconfig_with(apiserver, namespace, rules, tmp_path)
    job = DDPJob.create("digits", image="i", args=["a.py"], checkpoint={"claimName": "unseen"})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.manifest()))
    assert run(kubeconfig, "submit", str(file)).exit_code == 0
