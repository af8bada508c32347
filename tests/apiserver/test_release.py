"""The chart as a release: install, upgrade, uninstall and install again, while a job exists."""

import importlib.util
import shutil
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from envtest import ADMIN_TOKEN, ROOT, ApiServer

from ddpjob.local.ports import free_port

CHART = ROOT / "charts" / "ddpjob-operator"

Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helm(apiserver: ApiServer, namespace: str) -> Iterator[Helm]:
    """Run helm in the namespace of the test. Remaining releases are uninstalled at the end."""
    path = shutil.which("helm")
    if path is None:
        pytest.skip("needs helm: see https://helm.sh/docs/intro/install/")

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [path, f"--namespace={namespace}", *args]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=apiserver.environment
        )
        assert done.returncode == 0 or not check, done.stderr
        return done

    yield run
    for release in run("list", "--short").stdout.split():
        run("uninstall", release)


def job_in_notes(notes: str) -> str:
    """Return the manifest in the heredoc of NOTES."""
    return textwrap.dedent(notes.partition("<<'JOB'\n")[2].partition("  JOB\n")[0])


def test_uninstalling_and_installing_again_leaves_jobs_alone(
    apiserver: ApiServer, namespace: str, helm: Helm
) -> None:
    # The CRD exists already, because it was applied from the file. The release adopts it.
    helm(
        "install",
        "ddpjob",
        str(CHART),
        "--take-ownership",
        "--set",
        f"watchNamespaces={{{namespace}}}",
    )
    notes = helm("get", "notes", "ddpjob").stdout
    apiserver.kubectl("apply", "-f", "-", stdin=job_in_notes(notes))
    path = f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs/digits"
    before = apiserver.request("GET", path)
    assert before.code == 200

    helm("upgrade", "ddpjob", str(CHART), "--set", "podSecurity=restricted")
    helm("uninstall", "ddpjob")
    deployments = apiserver.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments")
    assert deployments.body["items"] == []
    assert apiserver.request("GET", path) == before

    refused = helm("install", "other", str(CHART), check=False)
    assert 'must equal "other": current value is "ddpjob"' in refused.stderr
    helm("install", "other", str(CHART), "--set", "crds.enabled=false")
    helm("install", "ddpjob", str(CHART))
    assert apiserver.request("GET", path) == before


def test_the_operator_may_do_what_it_needs_and_no_more(
    apiserver: ApiServer, namespace: str, helm: Helm
) -> None:
    helm("install", "ddpjob-operator", str(CHART), "--set", "crds.enabled=false")
    operator = f"--as=system:serviceaccount:{namespace}:ddpjob-operator"

    def may(verb: str, what: str, where: str = "default", part: str = "") -> bool:
        question = ("auth", "can-i", verb, what, f"--subresource={part}", "-n", where, operator)
        return apiserver.kubectl(*question, check=False).stdout.strip() == "yes"

    assert may("update", "ddpjobs.ddpjob.dev", part="status")
    assert may("create", "pods")
    assert may("update", "leases.coordination.k8s.io/ddpjob-operator", namespace)
    assert not may("update", "ddpjobs.ddpjob.dev")
    assert not may("update", "pods")
    assert not may("get", "secrets")
    assert not may("update", "leases.coordination.k8s.io/kube-scheduler", namespace)
    # It marks its namespaces.
    assert may("create", "leases.coordination.k8s.io")
    assert may("update", "leases.coordination.k8s.io/ddpjob-installation")
    assert not may("update", "leases.coordination.k8s.io")
    assert not may("delete", "leases.coordination.k8s.io")
    assert not may("get", "nodes")
    assert may("list", "nodes")


def test_the_owner_of_one_namespace_can_install_for_it(
    apiserver: ApiServer, namespace: str, helm: Helm
) -> None:
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "owner", "namespace": namespace},
        "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
    }
    apiserver.kubectl("apply", "-f", "-", stdin=yaml.dump(role))
    apiserver.kubectl(
        "create", "rolebinding", "owner", "--role=owner", "--user=owner", "-n", namespace
    )
    mine = [
        "--set",
        f"crds.enabled=false,rbac.aggregateRoles=false,watchNamespaces={{{namespace}}},"
        "kueue.enabled=false",
    ]
    helm("install", "mine", str(CHART), "--kube-as-user=owner", *mine)
    assert helm("status", "mine", "-o", "yaml").stdout


@pytest.fixture
def helm_test(apiserver: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script of `helm test` for this API server, with an administrator's token."""
    spec = importlib.util.spec_from_file_location("helm_test", CHART / "files" / "helm_test.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "token").write_text(ADMIN_TOKEN)
    (tmp_path / "ca.crt").write_bytes(apiserver.certificate.read_bytes())
    monkeypatch.setattr(script, "ACCOUNT", tmp_path)
    monkeypatch.setattr(script, "API", apiserver.url)
    monkeypatch.setattr(script, "PATIENCE", 0)
    return script


@pytest.fixture
def readyz() -> Iterator[str]:
    """Serve a probe with the answer "ready", and return its URL."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ok")

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/readyz"
        server.shutdown()
        thread.join()


def test_helm_test_prints_its_checks(
    apiserver: ApiServer,
    namespace: str,
    helm_test: ModuleType,
    readyz: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    helm_test.main(readyz, namespace)
    said = capsys.readouterr().out
    assert "ok: the operator is ready (ok)" in said
    assert "ok: a good job is accepted (created)" in said
    assert "the job's Service has the same name" in said
    assert (
        apiserver.request("GET", f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs").body[
            "items"
        ]
        == []
    )


def test_helm_test_fails_with_a_message_if_the_operator_is_not_ready(
    namespace: str, helm_test: ModuleType
) -> None:
    with pytest.raises(
        SystemExit, match=r"failed: the operator is ready: expected 200, got 0: .*refused"
    ):
        helm_test.main(f"http://127.0.0.1:{free_port()}/readyz", namespace)
