"""The chart's roles on the API server, and users with these roles.

The administrator impersonates the users, so none needs a certificate. What a user may do is
asked and tried.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from envtest import ADMIN, APPLY, ROOT, Answer, ApiServer

from ddpjob.core.api.yaml_text import load_all_yaml

CHART = ROOT / "charts" / "ddpjob-operator"
RBAC = "rbac.authorization.k8s.io"

Object = dict[str, Any]
Chart = Mapping[str, Sequence[Object]]

# The kinds of the objects granting the operator its rights.
GRANTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")

# The API groups of resources outside core/v1, with their versions.
GROUPS = {
    "ddpjobs": "ddpjob.dev/v1alpha1",
    "leases": "coordination.k8s.io/v1",
    "workloads": "kueue.x-k8s.io/v1beta2",
    "localqueues": "kueue.x-k8s.io/v1beta2",
    "podgroups": "scheduling.k8s.io/v1beta1",
    "roles": f"{RBAC}/v1",
    "rolebindings": f"{RBAC}/v1",
}
METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
RULES_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"

needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None, reason="needs helm: see https://helm.sh/docs/intro/install/"
)


# The chart


def rendered(namespace: str, *settings: str) -> Chart:
    """Return the chart's objects by kind."""
    command = ["helm", "template", "ddpjob", str(CHART), f"--namespace={namespace}", *settings]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = [obj for obj in load_all_yaml(text) if obj]
    return {
        kind: [obj for obj in objects if obj["kind"] == kind]
        for kind in {obj["kind"] for obj in objects}
    }


def grant(apiserver: ApiServer, chart: Chart) -> None:
    """Create the operator's ServiceAccount with its rights, without those of `helm test`."""
    for obj in (obj for kind in GRANTS for obj in chart.get(kind, [])):
        if "helm.sh/hook" not in obj["metadata"].get("annotations", {}):
            _apply(apiserver, obj)


def with_the_rights_of(
    chart: Chart, apiserver: ApiServer, namespace: str, folder: Path
) -> tuple[Path, list[str]]:
    """Grant the chart's rights. Return a kubeconfig of its ServiceAccount, and its options."""
    grant(apiserver, chart)
    pod = chart["Deployment"][0]["spec"]["template"]["spec"]
    kubeconfig = folder / "kubeconfig"
    token = token_of(apiserver, namespace, pod["serviceAccountName"])
    kubeconfig.write_text(apiserver.kubeconfig_for(token))
    options = pod["containers"][0]["args"]
    assert options[0] == "operator"
    return kubeconfig, [o for o in options[1:] if not o.startswith(("--http-port", "--log-format"))]


def token_of(apiserver: ApiServer, namespace: str, account: str) -> str:
    """Return a token of a ServiceAccount."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = apiserver.request("POST", path, request)
    assert answer.code == 201, answer.body
    return str(answer.body["status"]["token"])


def aggregated(apiserver: ApiServer, chart: Chart, name: str) -> list[Object]:
    """Return the rules of a ClusterRole of Kubernetes, with those of the chart.

    In a cluster, the controller manager writes the rules selected by the labels into the role.
    """
    path = f"/apis/{RBAC}/v1/clusterroles?labelSelector=kubernetes.io/bootstrapping=rbac-defaults"
    roles = [*apiserver.request("GET", path).body["items"], *chart["ClusterRole"]]
    return _rules_of(name, roles)


def _rules_of(name: str, roles: Iterable[Object]) -> list[Object]:
    (role,) = (role for role in roles if role["metadata"]["name"] == name)
    aggregation = role.get("aggregationRule")
    if not aggregation:
        return list(role.get("rules") or [])
    rules: list[Object] = []
    for selector in aggregation["clusterRoleSelectors"]:
        for other in roles:
            labels = other["metadata"].get("labels") or {}
            if selector["matchLabels"].items() <= labels.items():
                rules += _rules_of(other["metadata"]["name"], roles)
    return rules


def _apply(apiserver: ApiServer, obj: Object) -> None:
    """Create an object, or change it if a test before has created it."""
    metadata = obj["metadata"]
    place = f"namespaces/{metadata['namespace']}/" if "namespace" in metadata else ""
    root = "api/v1" if obj["apiVersion"] == "v1" else f"apis/{obj['apiVersion']}"
    path = f"/{root}/{place}{obj['kind'].lower()}s/{metadata['name']}"
    answer = apiserver.request("PATCH", f"{path}?fieldManager=tests&force=true", obj, APPLY)
    assert answer.code in (200, 201), answer.body


# Users


class User(NamedTuple):
    """A client of the API server with other credentials than the administrator's."""

    apiserver: ApiServer
    credentials: Mapping[str, str]

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Answer:
        return self.apiserver.request(method, path, body, content_type, self.credentials)

    def may(self, right: str, namespace: str) -> bool:
        """Return True if the user has a right in a namespace: `VERB RESOURCE[/PART] [NAME]`.

        Ask the API server, and send the request too, as a dry run for an absent or invalid object.
        Both answers must agree.
        """
        verb, resource, name = [*right.split(), "absent"][:3]
        plural, _, part = resource.partition("/")
        if verb == "list" or (verb == "create" and not part):
            name = ""
        attributes = {
            "namespace": namespace,
            "verb": verb,
            "group": GROUPS.get(plural, "").rpartition("/")[0],
            "resource": plural,
            "subresource": part,
            "name": name,
        }
        review = self.request("POST", REVIEWS, {"spec": {"resourceAttributes": attributes}})
        # Without credentials not even this may be asked.
        said = review.code == 201 and review.body["status"]["allowed"]
        path = "/".join(filter(None, [path_of(plural, namespace), name, part]))
        body = {} if verb in ("create", "update", "patch") else None
        content_type = "application/merge-patch+json" if verb == "patch" else "application/json"
        done = self.request(METHODS[verb], f"{path}?dryRun=All", body, content_type)
        assert said == (done.code != 403), f"{right}: {review.body}, but {done}"
        return said


def path_of(plural: str, namespace: str, name: str = "") -> str:
    """Return the path of a collection, or of one object in it."""
    root = f"/apis/{GROUPS[plural]}" if plural in GROUPS else "/api/v1"
    return f"{root}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def impersonated(apiserver: ApiServer, name: str) -> User:
    return User(apiserver, {**ADMIN, "Impersonate-User": name})


def without_token(apiserver: ApiServer) -> User:
    return User(apiserver, {})


def user_with(apiserver: ApiServer, namespace: str, rules: Sequence[Object]) -> User:
    """Return a new user who has these rules in one namespace, and no other rights."""
    user = impersonated(apiserver, f"user-of-{namespace}")
    _bind(apiserver, namespace, user, rules)
    return user


def kubeconfig_with(
    apiserver: ApiServer, namespace: str, rules: Sequence[Object], folder: Path
) -> Path:
    """Return a kubeconfig of one who has these rules in one namespace, and no other rights."""
    metadata = {"name": "person", "namespace": namespace}
    _apply(apiserver, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    name = f"system:serviceaccount:{namespace}:person"
    _bind(apiserver, namespace, impersonated(apiserver, name), rules)
    config = json.loads(apiserver.kubeconfig_for(token_of(apiserver, namespace, "person")))
    config["contexts"][0]["context"]["namespace"] = namespace
    path = folder / "kubeconfig-of-person"
    path.write_text(json.dumps(config))
    return path


def _bind(apiserver: ApiServer, namespace: str, user: User, rules: Sequence[Object]) -> None:
    """Give a user these rules in one namespace."""
    name = user.credentials["Impersonate-User"]
    metadata = {"name": name, "namespace": namespace}
    head = {"apiVersion": f"{RBAC}/v1", "metadata": metadata}
    subject = {"apiGroup": RBAC, "kind": "User", "name": name}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    _apply(apiserver, {**head, "kind": "Role", "rules": list(rules)})
    _apply(apiserver, {**head, "kind": "RoleBinding", "roleRef": role, "subjects": [subject]})
    _wait_for_rights(user, namespace, {one for rule in rules for one in rule["resources"]})


def _wait_for_rights(user: User, namespace: str, resources: Set[str]) -> None:
    """Wait until the authorizer has read a new role: it follows a watch."""
    deadline = time.monotonic() + 180.0
    while not resources <= _resources_of(user, namespace):
        assert time.monotonic() < deadline, f"no rights for {resources} in {namespace}"
        time.sleep(0.05)


def _resources_of(user: User, namespace: str) -> set[str]:
    """Return the resources for which a user has any right in a namespace."""
    review = user.request("POST", RULES_REVIEWS, {"spec": {"namespace": namespace}})
    return {one for rule in review.body["status"]["resourceRules"] for one in rule["resources"]}
