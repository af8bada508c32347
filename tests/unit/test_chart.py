"""The rendered chart: rights, values, security, and the refusal of wrong values.

These tests need helm, and no cluster.
"""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from goldens import check_golden

from ddpjob import __version__
from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api.pod_groups import BACKENDS
from ddpjob.core.api.yaml_text import load_all_yaml, load_yaml
from ddpjob.core.render.job_defaults import read_job_defaults

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "ddpjob-operator"
HELM = shutil.which("helm")
pytestmark = pytest.mark.skipif(
    HELM is None, reason="needs helm: see https://helm.sh/docs/intro/install/"
)

Manifest = dict[str, Any]
Right = tuple[str, str, str]

# Every right used by the operator, as (group, resource, verbs).
RIGHTS = {
    ("ddpjob.dev", "ddpjobs", "delete get list watch"),
    ("ddpjob.dev", "ddpjobs/status", "update"),
    ("", "pods", "create delete get list patch watch"),
    ("", "services", "create get"),
    ("", "configmaps", "create"),
    ("", "configmaps", "get"),
    ("", "events", "create"),
    ("coordination.k8s.io", "leases", "create"),
    ("coordination.k8s.io", "leases", "get update"),
    ("kueue.x-k8s.io", "workloads", "create delete get list patch watch"),
    ("kueue.x-k8s.io", "workloads/status", "patch"),
    ("kueue.x-k8s.io", "localqueues", "list watch"),
    ("ddpjob.dev", "ddpjobs", "patch"),
    *((one.group, "podgroups", "create delete get list patch watch") for one in BACKENDS),
}
OF_QUEUES = {right for right in RIGHTS if right[0] == "kueue.x-k8s.io"}
OF_QUEUES.add(("ddpjob.dev", "ddpjobs", "patch"))
# What it reads of the whole cluster for queues.
PLACES = {
    ("kueue.x-k8s.io", "resourceflavors", "get"),
    ("kueue.x-k8s.io", "workloadpriorityclasses", "get"),
    ("scheduling.k8s.io", "priorityclasses", "get"),
}
# What it uses in addition if it watches all namespaces.
CLUSTER_RIGHTS = {("", "nodes", "list watch")}
LEASE_RIGHTS = {
    ("coordination.k8s.io", "leases", "create"),
    ("coordination.k8s.io", "leases", "get update"),
}


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


def template(
    *args: str, release: str = "ddpjob-operator", namespace: str = "system"
) -> list[Manifest]:
    """Return the objects from `helm template` with further arguments."""
    done = helm("template", release, str(CHART), "--namespace", namespace, *args)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in load_all_yaml(done.stdout) if manifest]


@cache
def rendered(*settings: str, release: str = "ddpjob-operator") -> list[Manifest]:
    """Return the objects from `helm template --set SETTING…`."""
    return template(*(f"--set={setting}" for setting in settings), release=release)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Return the objects of a kind without those of `helm test`."""
    found = []
    for manifest in manifests:
        is_hook = "helm.sh/hook" in manifest["metadata"].get("annotations", {})
        if manifest["kind"] == kind and not is_hook:
            found.append(manifest)
    return found


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """Return the one object of a kind outside `helm test`."""
    (found,) = of_kind(manifests, kind)
    return found


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the object of a kind and a name, also one of `helm test`."""
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


def rights(role: Manifest) -> set[Right]:
    found = set()
    for rule in role["rules"]:
        verbs = " ".join(sorted(rule["verbs"]))
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.add((group, resource, verbs))
    return found


def pod_spec(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = only(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def helm_test_spec(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = named(manifests, "Pod", "ddpjob-operator-test")["spec"]
    return spec


def arguments(manifests: list[Manifest]) -> list[str]:
    return list(pod_spec(manifests)["containers"][0]["args"])


# Rights


def test_the_operator_has_exactly_the_rights_that_it_uses() -> None:
    manifests = rendered("rbac.aggregateRoles=false")
    role = named(manifests, "ClusterRole", "ddpjob-operator-system")
    assert rights(role) == RIGHTS | CLUSTER_RIGHTS
    places = named(manifests, "ClusterRole", "ddpjob-operator-system-places")
    assert rights(places) == PLACES
    assert rights(only(manifests, "Role")) == LEASE_RIGHTS


def test_the_operator_can_read_and_change_only_its_own_lease() -> None:
    manifests = rendered(release="one")
    flag = "--lease-name="
    (lease,) = (arg for arg in arguments(manifests) if arg.startswith(flag))
    bound = [rule.get("resourceNames") for rule in only(manifests, "Role")["rules"]]
    assert bound == [None, [lease.removeprefix(flag)]]


def test_the_operator_can_read_only_the_config_map_of_the_agent() -> None:
    """If this fails, write the new name into the chart's files/agent-config-map."""
    rules = named(rendered(), "ClusterRole", "ddpjob-operator-system")["rules"]
    (rule,) = (
        rule for rule in rules if (rule["resources"], rule["verbs"]) == (["configmaps"], ["get"])
    )
    assert rule["resourceNames"] == [config_map_name()]


def test_with_watched_namespaces_the_operator_has_no_cluster_wide_right() -> None:
    settings = ("watchNamespaces={a,b}", "rbac.aggregateRoles=false", "crds.enabled=false")
    manifests = rendered(*settings, "kueue.enabled=false")
    assert not [m for m in manifests if m["kind"].startswith("Cluster")]
    roles = {role["metadata"]["namespace"]: rights(role) for role in of_kind(manifests, "Role")}
    own = RIGHTS - OF_QUEUES
    assert roles == {"a": own, "b": own, "system": LEASE_RIGHTS}
    watched = [arg for arg in arguments(manifests) if arg.startswith("--namespace")]
    assert watched == ["--namespace=a", "--namespace=b"]


@pytest.mark.parametrize(
    ("settings", "queues", "roles"),
    [
        ((), "on", {"kueue", "places"}),
        (("watchNamespaces={a}",), "on", {"kueue", "places"}),
        (("kueue.clusterRead=false",), "refused", {"kueue"}),
        (("kueue.enabled=false",), "off", {"kueue"}),
        (("kueue.enabled=false", "kueue.account.name="), "off", set()),
        (("kueue.enabled=false", "watchNamespaces={a}"), "off", set()),
    ],
)
def test_queues_can_be_switched_off_and_need_rights_in_the_whole_cluster(
    settings: tuple[str, ...], queues: str, roles: set[str]
) -> None:
    manifests = rendered(*settings)
    assert f"--queues={queues}" in arguments(manifests)
    names = {role["metadata"]["name"] for role in of_kind(manifests, "ClusterRole")}
    ends = {name.removeprefix("ddpjob-operator-system-") for name in names}
    assert ends & {"kueue", "places"} == roles


def test_kueue_may_read_jobs_and_nothing_else() -> None:
    role = named(rendered(), "ClusterRole", "ddpjob-operator-system-kueue")
    assert rights(role) == {("ddpjob.dev", "ddpjobs", "get list watch")}


def test_every_binding_binds_the_operator_to_a_rendered_role() -> None:
    manifests = rendered("watchNamespaces={a}") + rendered()
    roles = set()
    for manifest in manifests:
        metadata = manifest["metadata"]
        roles.add((manifest["kind"], metadata["name"], metadata.get("namespace")))
    for binding in of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding"):
        role = binding["roleRef"]
        assert (role["kind"], role["name"], binding["metadata"].get("namespace")) in roles
        (subject,) = binding["subjects"]
        own = ("ddpjob-operator", "system")
        if role["name"] == "ddpjob-operator-system-kueue":
            own = ("kueue-controller-manager", "kueue-system")
        assert (subject["name"], subject["namespace"]) == own


def aggregation_labels(role: Manifest) -> set[str]:
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    labels = [label for label in role["metadata"]["labels"] if label.startswith(prefix)]
    return {label.removeprefix(prefix) for label in labels}


def test_view_and_edit_are_aggregated_into_the_roles_of_kubernetes() -> None:
    manifests = rendered()
    view = named(manifests, "ClusterRole", "ddpjob-operator-system-view")
    edit = named(manifests, "ClusterRole", "ddpjob-operator-system-edit")
    assert aggregation_labels(view) == {"view"}
    assert aggregation_labels(edit) == {"edit", "admin"}
    assert {verbs for _, _, verbs in rights(view)} == {"get list watch"}
    assert {resource for _, resource, _ in rights(edit)} == {"ddpjobs", "ddpjobs/scale"}


def cluster_wide_names(release: str) -> set[tuple[str, str]]:
    found = set()
    for manifest in rendered("crds.enabled=false", release=release):
        if "namespace" not in manifest["metadata"]:
            found.add((manifest["kind"], manifest["metadata"]["name"]))
    return found


def test_two_releases_have_different_cluster_wide_names() -> None:
    assert cluster_wide_names("one") & cluster_wide_names("two") == set()


# Values


@pytest.mark.parametrize("level", ["none", "restricted"])
def test_the_pod_security_level_is_an_argument_of_the_operator(level: str) -> None:
    assert f"--pod-security={level}" in arguments(rendered(f"podSecurity={level}"))


def test_the_crd_is_the_file_and_is_kept_by_default() -> None:
    crd = only(rendered(), "CustomResourceDefinition")
    assert crd["spec"] == load_yaml((CHART / "files" / "crd.yaml").read_text())["spec"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_crd_can_be_deleted_with_the_release_or_left_out() -> None:
    crd = only(rendered("crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in crd["metadata"]
    assert of_kind(rendered("crds.enabled=false"), "CustomResourceDefinition") == []


def test_a_disruption_budget_is_rendered_only_with_several_replicas() -> None:
    assert of_kind(rendered(), "PodDisruptionBudget") == []
    assert only(rendered("replicaCount=2"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_a_service_monitor_is_rendered_if_enabled_and_selects_the_service() -> None:
    assert of_kind(rendered(), "ServiceMonitor") == []
    manifests = rendered(
        "metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prometheus"
    )
    monitor = only(manifests, "ServiceMonitor")
    service = only(manifests, "Service")
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert selector <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_the_service_selects_only_the_operator() -> None:
    manifests = rendered("podLabels.team=a")
    selector = only(manifests, "Service")["spec"]["selector"].items()
    operator = only(manifests, "Deployment")["spec"]["template"]
    tested = named(manifests, "Pod", "ddpjob-operator-test")
    assert selector <= operator["metadata"]["labels"].items()
    assert not selector <= tested["metadata"]["labels"].items()


VERSION = load_yaml((CHART / "Chart.yaml").read_text())["appVersion"]
DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ((), f"ddpjob-operator:{VERSION}"),
        (("image.repository=r.example/x", "image.tag=v7"), "r.example/x:v7"),
        (("image.tag=v7", f"image.digest={DIGEST}"), f"ddpjob-operator@{DIGEST}"),
        (("image.registry=r.example", "image.tag=v7"), "r.example/ddpjob-operator:v7"),
        (
            ("image.registry=r.example", "global.imageRegistry=mirror/x", "image.tag=v7"),
            "mirror/x/ddpjob-operator:v7",
        ),
    ],
    ids=["default", "tag", "digest", "registry", "mirror"],
)
def test_the_image_comes_from_the_chart_or_from_the_values(
    settings: tuple[str, ...], image: str
) -> None:
    manifests = rendered(*settings)
    for spec in (pod_spec(manifests), helm_test_spec(manifests)):
        assert spec["containers"][0]["image"] == image


def test_a_namespace_may_consist_of_digits() -> None:
    # YAML would read it as a number without quotes.
    manifests = template("--set-string=watchNamespaces={34}", release="x", namespace="12")
    namespaces = {manifest["metadata"].get("namespace", "") for manifest in manifests}
    assert namespaces == {"", "12", "34"}


def test_values_for_placement_are_set_in_the_operators_pod() -> None:
    values = {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "s"}],
    }
    settings = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    spec = pod_spec(template(*settings))
    assert {key: spec[key] for key in values} == values


ALL_OBJECTS = (
    "replicaCount=2",
    "networkPolicy.enabled=true",
    "metrics.serviceMonitor.enabled=true",
    "metrics.podMonitor.enabled=true",
    "metrics.prometheusRule.enabled=true",
    "metrics.dashboard.enabled=true",
)


OVERRIDES = (
    "excludedNamespaces={kube-system,team-b}",
    "podSecurityContext.fsGroup=1000",
    "securityContext.readOnlyRootFilesystem=false",
    "revisionHistoryLimit=2",
    "hostNetwork=true",
    "dnsPolicy=ClusterFirstWithHostNet",
    "dnsConfig.searches={example.com}",
    "metrics.podMonitor.enabled=true",
    "networkPolicy.enabled=true",
    "networkPolicy.from[0].namespaceSelector.matchLabels.team=monitoring",
    "extraObjects[0].apiVersion=v1",
    "extraObjects[0].kind=ConfigMap",
    "extraObjects[0].metadata.name=of-{{ .Release.Name }}",
)


def test_all_objects_have_the_common_labels_and_annotations() -> None:
    manifests = rendered(*ALL_OBJECTS, "commonLabels.team=a", "commonAnnotations.by=b")
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert metadata["labels"]["team"] == "a", manifest["kind"]
        assert metadata["annotations"]["by"] == "b", manifest["kind"]
    pod = only(manifests, "Deployment")["spec"]["template"]["metadata"]
    assert (pod["labels"]["team"], pod["annotations"]["by"]) == ("a", "b")


def test_a_common_label_cannot_replace_one_of_the_chart() -> None:
    manifests = rendered(r"commonLabels.app\.kubernetes\.io/name=mine")
    for manifest in manifests:
        labels = manifest["metadata"].get("labels", {})
        assert labels.get("app.kubernetes.io/name") != "mine", manifest["kind"]


def test_the_pod_of_the_test_is_none_of_the_operators() -> None:
    manifests = rendered(r"commonLabels.app\.kubernetes\.io/name=ddpjob-operator")
    pods = [one for one in manifests if one["kind"] == "Pod"]
    selector = only(manifests, "Service")["spec"]["selector"]
    assert [selector.items() <= pod["metadata"]["labels"].items() for pod in pods] == [False]


def test_common_annotations_do_not_change_the_order_of_the_tests_objects() -> None:
    manifests = template(r"--set-string=commonAnnotations.helm\.sh/hook-weight=5")
    hooks = [
        one["metadata"]["annotations"] for one in manifests if "-test" in one["metadata"]["name"]
    ]
    weights = [annotations["helm.sh/hook-weight"] for annotations in hooks]
    assert weights == ["-1", "-1", "-1", "0"]


def test_a_label_by_which_the_deployment_finds_its_pods_cannot_be_replaced() -> None:
    manifests = rendered(r"podLabels.app\.kubernetes\.io/name=mine", "podLabels.team=a")
    deployment = only(manifests, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert labels["team"] == "a"


def test_further_arguments_variables_and_volumes_are_in_the_operators_pod() -> None:
    values = {
        "extraArgs": ["--log-level=debug"],
        "extraEnv": [{"name": "A", "value": "1"}],
        "extraVolumes": [{"name": "v", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    }
    settings = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    spec = pod_spec(template(*settings))
    (container,) = spec["containers"]
    assert container["args"][-1] == "--log-level=debug"
    assert container["env"][-1] == values["extraEnv"][0]
    assert spec["volumes"][-1] == values["extraVolumes"][0]
    assert container["volumeMounts"][-1] == values["extraVolumeMounts"][0]


@pytest.mark.parametrize("spec_of", [pod_spec, helm_test_spec], ids=["operator", "helm test"])
def test_the_security_contexts_can_be_changed_and_fields_of_them_removed(spec_of: Any) -> None:
    settings = ("podSecurityContext.runAsUser=1000", "securityContext.capabilities=null")
    spec = spec_of(rendered(*settings, "podSecurityContext.seccompProfile=null"))
    assert spec["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000}
    (container,) = spec["containers"]
    assert container["securityContext"].keys() == {
        "allowPrivilegeEscalation",
        "readOnlyRootFilesystem",
    }


def test_in_the_network_of_the_node_the_old_pod_ends_before_the_new_one_begins() -> None:
    manifests = rendered("hostNetwork=true", "dnsPolicy=Default")
    deployment = only(manifests, "Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert pod_spec(manifests)["hostNetwork"] is True
    assert pod_spec(manifests)["dnsPolicy"] == "Default"
    # The pod of `helm test` finds the Service by its name.
    assert not helm_test_spec(manifests).keys() & {"hostNetwork", "dnsPolicy"}


@pytest.mark.parametrize("limit", [0, 3])
def test_the_number_of_old_replica_sets_can_be_chosen(limit: int) -> None:
    assert "revisionHistoryLimit" not in only(rendered(), "Deployment")["spec"]
    chosen = rendered(f"revisionHistoryLimit={limit}")
    assert only(chosen, "Deployment")["spec"]["revisionHistoryLimit"] == limit


def test_further_objects_are_rendered_as_templates() -> None:
    text = '{{ .Release.Namespace }}/{{ include "ddpjob.fullname" . }}'
    metadata = {"name": "{{ .Release.Name }}-extra"}
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"place": text}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata},
    ]
    manifests = template(f"--set-json=extraObjects={json.dumps(objects)}")
    extra = named(manifests, "ConfigMap", "ddpjob-operator-extra")
    assert extra["data"] == {"place": "system/ddpjob-operator"}
    assert named(manifests, "Secret", "ddpjob-operator-extra")


def test_excluded_namespaces_are_arguments_and_are_not_scraped() -> None:
    manifests = rendered("excludedNamespaces={a,b}", "metrics.podMonitor.enabled=true")
    excluded = [arg for arg in arguments(manifests) if arg.startswith("--exclude-namespace")]
    assert excluded == ["--exclude-namespace=a", "--exclude-namespace=b"]
    (endpoint,) = only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"][0] == {
        "sourceLabels": ["__meta_kubernetes_namespace"],
        "regex": "a|b",
        "action": "drop",
    }


def test_namespaces_cannot_be_excluded_from_a_list_of_watched_ones() -> None:
    settings = "watchNamespaces={a},excludedNamespaces={b}"
    done = helm("template", "x", str(CHART), "--set", settings)
    assert done.returncode != 0
    assert "excludedNamespaces cannot be combined with watchNamespaces" in done.stderr


def test_several_operators_prefer_different_nodes() -> None:
    assert "topologySpreadConstraints" not in pod_spec(rendered())
    (constraint,) = pod_spec(rendered("replicaCount=2"))["topologySpreadConstraints"]
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    own = '[{"topologyKey": "zone", "maxSkew": 1}]'
    chosen = template("--set=replicaCount=2", f"--set-json=topologySpreadConstraints={own}")
    assert pod_spec(chosen)["topologySpreadConstraints"][0]["topologyKey"] == "zone"


def test_the_disruption_budget_can_be_changed_and_left_out() -> None:
    budget = only(rendered("replicaCount=3", "podDisruptionBudget.maxUnavailable=2"), PDB)
    assert budget["spec"]["maxUnavailable"] == 2
    assert of_kind(rendered("replicaCount=3", "podDisruptionBudget.enabled=false"), PDB) == []


PDB = "PodDisruptionBudget"


def test_a_network_policy_lets_only_the_port_of_probes_be_reached() -> None:
    assert of_kind(rendered(), "NetworkPolicy") == []
    source = '[{"namespaceSelector": {}}]'
    manifests = template(
        "--set=networkPolicy.enabled=true", f"--set-json=networkPolicy.from={source}"
    )
    policy = only(manifests, "NetworkPolicy")["spec"]
    labels = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    # Egress to the API server must stay open.
    assert policy["policyTypes"] == ["Ingress"]
    # `/metrics` names all jobs, so other namespaces may not read it.
    own = {"podSelector": {}}
    assert policy["ingress"] == [{"ports": [{"port": "http"}], "from": [own, *json.loads(source)]}]
    alone = only(rendered("networkPolicy.enabled=true"), "NetworkPolicy")["spec"]
    assert alone["ingress"] == [{"ports": [{"port": "http"}], "from": [own]}]


@pytest.mark.parametrize("more", ["[]", '[{"namespaceSelector": {}}]'], ids=["alone", "from"])
def test_the_network_policy_admits_the_pod_of_helm_test(more: str) -> None:
    manifests = template(
        "--set=networkPolicy.enabled=true", f"--set-json=networkPolicy.from={more}"
    )
    policy = only(manifests, "NetworkPolicy")
    pod = named(manifests, "Pod", "ddpjob-operator-test")["metadata"]
    assert pod["namespace"] == policy["metadata"]["namespace"]
    (rule,) = policy["spec"]["ingress"]
    (container,) = pod_spec(manifests)["containers"]
    assert rule["ports"] == [{"port": container["ports"][0]["name"]}]
    # A podSelector alone selects pods of the namespace of the policy; an empty one, all of them.
    own = [peer["podSelector"] for peer in rule["from"] if peer.keys() == {"podSelector"}]
    wanted = [selector.get("matchLabels", {}).items() for selector in own]
    assert any(labels <= pod["labels"].items() for labels in wanted)


@pytest.mark.parametrize("name", ["a" * 53, "a" * 50 + "-bc"])
def test_labels_are_short_enough_whatever_the_release_is_called(name: str) -> None:
    done = helm("template", name, str(CHART), "--set", f"fullnameOverride={'f' * 63}")
    assert done.returncode == 0, done.stderr
    for manifest in load_all_yaml(done.stdout):
        for value in ((manifest or {}).get("metadata", {}).get("labels") or {}).values():
            assert len(str(value)) <= 63


def test_a_chart_that_depends_on_this_one_can_switch_it_off() -> None:
    # Helm checks the value of `condition: ddpjob-operator.enabled` against the schema too.
    done = helm("template", "x", str(CHART), "--set", "enabled=true")
    assert done.returncode == 0, done.stderr


def test_a_pod_monitor_selects_the_agents_of_jobs() -> None:
    (monitor,) = of_kind(rendered("metrics.podMonitor.enabled=true"), "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    pod = load_yaml((ROOT / "tests/unit/golden/pod-cpu.yaml").read_text())
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression["operator"] == "Exists"
    assert expression["key"] in pod["metadata"]["labels"]
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    watched = rendered(
        "metrics.podMonitor.enabled=true", "watchNamespaces={a}", "rbac.aggregateRoles=false"
    )
    (monitor,) = of_kind(watched, "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a"]}


def test_metrics_of_each_job_can_be_switched_off() -> None:
    assert "--job-metrics" in arguments(rendered())
    assert "--no-job-metrics" in arguments(rendered("metrics.jobs=false"))


# Rules and dashboard


def test_the_rule_object_has_the_rules_of_the_file() -> None:
    rule = only(rendered("metrics.prometheusRule.enabled=true"), "PrometheusRule")
    assert rule["spec"] == load_yaml((CHART / "files" / "rules.yaml").read_text())


def test_the_dashboard_is_a_config_map_that_grafanas_sidecar_finds() -> None:
    text = (CHART / "files" / "dashboard.json").read_text()
    found = only(rendered("metrics.dashboard.enabled=true"), "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["ddpjob.json"]) == json.loads(text)


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "release" / "dashboard.py"))
    written = script["OUT"].read_text()
    assert written == script["build"](), "run python release/dashboard.py"


# Golden files


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chart-default.yaml", ()),
        ("chart-namespaces.yaml", ("watchNamespaces={team-a,team-b}", "podSecurity=restricted")),
        ("chart-all.yaml", (*ALL_OBJECTS, "global.imageRegistry=registry.example")),
        ("chart-overrides.yaml", OVERRIDES),
    ],
)
def test_the_chart_equals_its_golden_file(name: str, settings: tuple[str, ...]) -> None:
    objects = []
    for manifest in rendered(*settings):
        # These have the text of files beside the templates.
        if manifest["kind"] in ("CustomResourceDefinition", "PrometheusRule"):
            manifest["spec"] = "see files/"
        if manifest["metadata"]["name"].endswith("-dashboard"):
            manifest["data"] = "see files/"
        if "helm.sh/hook" not in manifest["metadata"].get("annotations", {}):
            text = json.dumps(manifest).replace(__version__, "VERSION")
            objects.append(json.loads(text.replace(config_map_name(), "AGENT")))
    check_golden(name, *objects)


# The chart's own pods


@pytest.mark.parametrize("spec_of", [pod_spec, helm_test_spec], ids=["operator", "helm test"])
def test_the_charts_own_pods_pass_the_level_restricted(spec_of: Any) -> None:
    spec = spec_of(rendered())
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


def test_the_operator_has_probes_and_resources() -> None:
    (container,) = pod_spec(rendered())["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["resources"] == {
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }
    assert {variable["name"] for variable in container["env"]} == {"POD_NAME", "POD_NAMESPACE"}


# The schema of the values


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
        "fullnameOverride=Foo_Bar",
        "image.registry=r.example/",
        "podDisruptionBudget.maxUnavailable=0",
        "networkPolicy.egress=true",
        "commonLabels.team=a b",
        "extraEnv={a}",
        "excludedNamespaces={A_b}",
        "revisionHistoryLimit=-1",
        "hostNetwork=1",
        "dnsPolicy=Cluster",
        "dnsConfig={a}",
        "podSecurityContext={a}",
        "extraObjects={a}",
    ],
)
def test_a_wrong_value_is_refused(setting: str) -> None:
    done = helm("template", "x", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


KUBERNETES_OWN = ("resources", "labels", "podSecurityContext", "securityContext")


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values. Objects of Kubernetes count as one."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in KUBERNETES_OWN:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_value_is_documented_in_its_file_and_in_the_readme() -> None:
    text = (CHART / "values.yaml").read_text()
    readme = (CHART / "README.md").read_text()
    documented = set(re.findall(r"^\| `([^`]+)` \|", readme, re.MULTILINE))
    values = set(leaves(load_yaml(text)))
    assert documented == values
    assert text.count("# -- ") == len(values)


def test_the_defaults_of_all_jobs_reach_the_operator_as_json() -> None:
    taint = "jobDefaults.tolerations[0].key=training"
    manifests = rendered(taint, "jobDefaults.nodeSelector.pool=training")
    (option,) = (arg for arg in arguments(manifests) if arg.startswith("--job-defaults="))
    found = read_job_defaults(json.loads(option.partition("=")[2]))
    assert found == {"tolerations": [{"key": "training"}], "nodeSelector": {"pool": "training"}}
    assert not [arg for arg in arguments(rendered()) if arg.startswith("--job-defaults")]
