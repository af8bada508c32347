"""Kueue as a test plays it: its API without its controllers. Each test decides what Kueue does."""

from typing import Any

from envtest import MERGE, ApiServer
from play import Cluster

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
ROOT = f"/apis/{GROUP}/{VERSION}"

# Whether objects of a kind are in a namespace.
KINDS = {
    "Workload": True,
    "LocalQueue": True,
    "ResourceFlavor": False,
    "WorkloadPriorityClass": False,
}


def plural_of(kind: str) -> str:
    return f"{kind.lower()}es" if kind.endswith("Class") else f"{kind.lower()}s"


def install_kueue(apiserver: ApiServer) -> None:
    """Let the API server serve Kueue's kinds, of any shape."""
    for kind, is_namespaced in KINDS.items():
        apiserver.request(
            "POST",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            crd_of(kind, is_namespaced),
        )
    apiserver.wait_for(lambda: all(is_served_now(apiserver, kind) for kind in KINDS))
    flavor = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "ResourceFlavor",
        "metadata": {"name": "workers"},
        "spec": {"nodeLabels": {"pool": "training"}, "tolerations": [{"key": "training"}]},
    }
    apiserver.request("POST", f"{ROOT}/resourceflavors", flavor)


def serve_kueue(apiserver: ApiServer, *, is_served: bool) -> None:
    """Let the API server serve Kueue's kinds again, or no more. The objects stay."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for kind in KINDS:
        name = f"{plural_of(kind)}.{GROUP}"
        versions = apiserver.request("GET", f"{path}/{name}").body["spec"]["versions"]
        change = {"spec": {"versions": [{**versions[0], "served": is_served}]}}
        assert apiserver.request("PATCH", f"{path}/{name}", change, MERGE).code == 200
    apiserver.wait_for(lambda: all(is_served_now(apiserver, kind) is is_served for kind in KINDS))


def is_served_now(apiserver: ApiServer, kind: str) -> bool:
    return apiserver.request("GET", f"{ROOT}/{plural_of(kind)}").code == 200


def crd_of(kind: str, is_namespaced: bool) -> dict[str, Any]:
    plural = plural_of(kind)
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            # The API server keeps names below k8s.io for itself.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "plural": plural,
                "singular": kind.lower(),
                "listKind": f"{kind}List",
            },
            "scope": "Namespaced" if is_namespaced else "Cluster",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": anything},
                    "subresources": {"status": {}} if is_namespaced else {},
                }
            ],
        },
    }


class Queue:
    """The Workloads of a namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.path = f"{ROOT}/namespaces/{cluster.namespace}/workloads"

    def create_default(self) -> None:
        """Create the LocalQueue for jobs without a queue."""
        queue = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "LocalQueue",
            "metadata": {"name": "default"},
            "spec": {"clusterQueue": "all"},
        }
        path = f"{ROOT}/namespaces/{self.cluster.namespace}/localqueues"
        assert self.cluster.apiserver.request("POST", path, queue).code == 201

    def workloads(self, job: str) -> list[dict[str, Any]]:
        query = f"labelSelector=ddpjob.dev/job={job}"
        found: list[dict[str, Any]] = self.cluster.apiserver.request(
            "GET", f"{self.path}?{query}"
        ).body["items"]
        return found

    def unfinished(self, job: str) -> list[dict[str, Any]]:
        return [one for one in self.workloads(job) if not holds(one, "Finished")]

    def admit(self, job: str) -> None:
        """Give the job room, once it has asked for it."""
        self.cluster.until(job, lambda: self.unfinished(job))
        for workload in self.unfinished(job):
            assignment = {"name": "main", "flavors": {"cpu": "workers"}, "count": 2}
            conditions = {"QuotaReserved": "QuotaReserved", "Admitted": "Admitted"}
            self._set(workload, {"podSetAssignments": [assignment]}, conditions, Evicted="False")

    def evict(self, job: str, reason: str = "Preempted") -> None:
        for workload in self.unfinished(job):
            self._set(workload, None, {"Evicted": reason})

    def delete(self, job: str) -> None:
        for workload in self.unfinished(job):
            self.cluster.apiserver.request("DELETE", f"{self.path}/{workload['metadata']['name']}")

    def _set(
        self, workload: dict[str, Any], admission: Any, conditions: dict[str, str], **statuses: str
    ) -> None:
        found = {one["type"]: one for one in workload.get("status", {}).get("conditions", ())}
        for kind, reason in {**conditions, **dict.fromkeys(statuses, "QuotaReserved")}.items():
            found[kind] = {
                "type": kind,
                "status": statuses.get(kind, "True"),
                "reason": reason,
                "message": f"{reason} by the test",
                "lastTransitionTime": "2026-11-21T12:00:00Z",
            }
        status: dict[str, Any] = {"conditions": list(found.values())}
        if admission:
            status["admission"] = admission
        path = f"{self.path}/{workload['metadata']['name']}/status"
        answer = self.cluster.apiserver.request("PATCH", path, {"status": status}, MERGE)
        assert answer.code == 200, answer.body


def holds(workload: dict[str, Any], kind: str) -> bool:
    conditions = workload.get("status", {}).get("conditions", ())
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def has_room(workload: dict[str, Any]) -> bool:
    return holds(workload, "QuotaReserved") and not holds(workload, "Finished")
