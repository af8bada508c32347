"""What the chart renders: rights, switches, security and the refusal of typos. Needs helm, and no cluster."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "ddpjob-operator"
HELM = shutil.which("helm")
pytestmark = pytest.mark.skipif(
    HELM is None, reason="needs helm: see https://helm.sh/docs/intro/install/"
)

Manifest = dict[str, Any]

# Every right that the operator uses, as (group, resource, verbs).
RIGHTS = {
    ("ddpjob.dev", "ddpjobs", "get list watch"),
    ("ddpjob.dev", "ddpjobs/status", "update"),
    ("", "pods", "create delete get list watch"),
    ("", "services", "create get"),
    ("", "events", "create"),
}
LEASE_RIGHTS = {
    ("coordination.k8s.io", "leases", "create"),
    ("coordination.k8s.io", "leases", "get update"),
}


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


@cache
def rendered(*settings: str, release: str = "ddpjob-operator") -> list[Manifest]:
    """Every object that `helm template --set SETTING…` renders into the namespace `system`."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = helm("template", release, str(CHART), "--namespace", "system", *flags)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one object of that kind that is no part of `helm test`."""
    (found,) = of_kind(manifests, kind)
    return found


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    hooks = [m for m in manifests if "helm.sh/hook" in m["metadata"].get("annotations", {})]
    return [m for m in manifests if m["kind"] == kind and m not in hooks]


def rights(role: Manifest) -> set[tuple[str, str, str]]:
    return {
        (group, resource, " ".join(sorted(rule["verbs"])))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def pod_spec(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = only(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def arguments(manifests: list[Manifest]) -> list[str]:
    return list(pod_spec(manifests)["containers"][0]["args"])


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


# -- rights ----------------------------------------------------------------------------------------------------------
def test_the_operator_gets_exactly_the_rights_it_uses() -> None:
    manifests = rendered("rbac.aggregateRoles=false")
    assert rights(only(manifests, "ClusterRole")) == RIGHTS
    assert rights(only(manifests, "Role")) == LEASE_RIGHTS


def test_the_lease_is_the_only_one_it_can_read_or_change() -> None:
    manifests = rendered(release="one")
    lease = next(
        arg.removeprefix("--lease-name=")
        for arg in arguments(manifests)
        if arg.startswith("--lease-name=")
    )
    bound = [rule.get("resourceNames") for rule in only(manifests, "Role")["rules"]]
    assert bound == [None, [lease]]


def test_with_watched_namespaces_it_has_roles_there_and_no_cluster_wide_right() -> None:
    manifests = rendered("watchNamespaces={a,b}", "rbac.aggregateRoles=false", "crds.enabled=false")
    assert not [m for m in manifests if m["kind"].startswith("Cluster")]
    roles = {m["metadata"]["namespace"]: rights(m) for m in of_kind(manifests, "Role")}
    assert roles == {"a": RIGHTS, "b": RIGHTS, "system": LEASE_RIGHTS}
    assert [arg for arg in arguments(manifests) if arg.startswith("--namespace")] == [
        "--namespace=a",
        "--namespace=b",
    ]


def test_every_binding_is_for_the_operator_and_names_a_role_that_is_there() -> None:
    manifests = rendered("watchNamespaces={a}") + rendered()
    for binding in of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding"):
        role, where = binding["roleRef"], binding["metadata"].get("namespace")
        assert any(
            m["kind"] == role["kind"]
            and m["metadata"]["name"] == role["name"]
            and m["metadata"].get("namespace") == where
            for m in manifests
        )
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("ddpjob-operator", "system")


def test_view_and_edit_are_added_to_kubernetes_own_roles() -> None:
    manifests = rendered()
    view = named(manifests, "ClusterRole", "ddpjob-operator-system-view")
    edit = named(manifests, "ClusterRole", "ddpjob-operator-system-edit")
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    assert {k for k in view["metadata"]["labels"] if k.startswith(aggregate)} == {
        f"{aggregate}view"
    }
    assert {k for k in edit["metadata"]["labels"] if k.startswith(aggregate)} == {
        f"{aggregate}edit",
        f"{aggregate}admin",
    }
    assert {verbs for _, _, verbs in rights(view)} == {"get list watch"}
    assert {resource for _, resource, _ in rights(edit)} == {"ddpjobs", "ddpjobs/scale"}


def test_two_releases_share_no_cluster_wide_name() -> None:
    def names(release: str) -> set[tuple[str, str]]:
        manifests = rendered("crds.enabled=false", release=release)
        return {
            (m["kind"], m["metadata"]["name"])
            for m in manifests
            if "namespace" not in m["metadata"]
        }

    assert names("one") & names("two") == set()


# -- switches --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["none", "restricted"])
def test_the_pod_security_of_jobs_is_passed_on(level: str) -> None:
    assert f"--pod-security={level}" in arguments(rendered(f"podSecurity={level}"))


def test_the_crd_is_the_file_and_stays_by_default() -> None:
    crd = only(rendered(), "CustomResourceDefinition")
    assert crd["spec"] == yaml.safe_load((CHART / "files" / "crd.yaml").read_text())["spec"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_crd_can_go_with_the_release_or_be_left_out() -> None:
    assert (
        "annotations"
        not in only(rendered("crds.keep=false"), "CustomResourceDefinition")["metadata"]
    )
    assert of_kind(rendered("crds.enabled=false"), "CustomResourceDefinition") == []


def test_a_disruption_budget_needs_a_second_operator() -> None:
    assert of_kind(rendered(), "PodDisruptionBudget") == []
    assert only(rendered("replicaCount=2"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_a_service_monitor_comes_on_request_and_finds_the_service() -> None:
    assert of_kind(rendered(), "ServiceMonitor") == []
    manifests = rendered(
        "metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prometheus"
    )
    monitor, service = only(manifests, "ServiceMonitor"), only(manifests, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_the_service_finds_the_operator_alone() -> None:
    manifests = rendered("podLabels.team=a")
    selector = only(manifests, "Service")["spec"]["selector"].items()
    assert (
        selector <= only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )
    assert (
        not selector
        <= named(manifests, "Pod", "ddpjob-operator-test")["metadata"]["labels"].items()
    )


def test_the_image_is_the_charts_own_version_unless_told() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    digest = "sha256:" + "0" * 64
    for settings, image in {
        (): f"ddpjob-operator:{version}",
        ("image.repository=r.example/x", "image.tag=v7"): "r.example/x:v7",
        ("image.tag=v7", f"image.digest={digest}"): f"ddpjob-operator@{digest}",
    }.items():
        manifests = rendered(*settings)
        tested = named(manifests, "Pod", "ddpjob-operator-test")["spec"]
        assert [spec["containers"][0]["image"] for spec in (pod_spec(manifests), tested)] == [
            image,
            image,
        ]


def test_a_namespace_may_look_like_a_number() -> None:
    done = helm(
        "template", "x", str(CHART), "--namespace", "12", "--set-string", "watchNamespaces={34}"
    )
    namespaces = {m["metadata"].get("namespace", "") for m in yaml.safe_load_all(done.stdout) if m}
    assert namespaces == {"", "12", "34"}


# -- the pods' own security ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["operator", "helm test"])
def test_the_charts_own_pods_pass_the_level_restricted(which: str) -> None:
    manifests = rendered()
    spec = (
        pod_spec(manifests)
        if which == "operator"
        else named(manifests, "Pod", "ddpjob-operator-test")["spec"]
    )
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(volume.keys() == {"name", "emptyDir"} for volume in spec.get("volumes", []))


def test_the_operator_is_probed_and_bounded() -> None:
    (container,) = pod_spec(rendered())["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["resources"] == {
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "limits": {"memory": "256Mi"},
    }
    assert {variable["name"] for variable in container["env"]} == {"POD_NAME", "POD_NAMESPACE"}


def test_placement_values_reach_the_operator() -> None:
    values = {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "s"}],
    }
    done = helm(
        "template",
        "x",
        str(CHART),
        *(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()),
    )
    spec = pod_spec([manifest for manifest in yaml.safe_load_all(done.stdout) if manifest])
    assert {key: spec[key] for key in values} == values


# -- values ----------------------------------------------------------------------------------------------------------
def test_the_chart_passes_helms_strict_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "setting",
    [
        "replicas=2",
        "image.tags=1",
        "crds.keeps=true",
        "watchNamespace={a}",
        "watchNamespaces={A_b}",
        "podSecurity=baseline",
        "logLevel=loud",
        "metrics.port=80",
        "metrics.serviceMonitor.enable=true",
        "rbac.aggregateRoles=1",
    ],
)
def test_a_typo_in_a_value_is_refused(setting: str) -> None:
    done = helm("template", "x", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in ("resources",):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_value_is_explained_in_its_file_and_in_the_readme() -> None:
    text = (CHART / "values.yaml").read_text()
    documented = set(
        re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE)
    )
    values = set(leaves(yaml.safe_load(text)))
    assert documented == values
    assert text.count("# -- ") == len(values)
