"""The fake nodes: Node objects without machines. kwok simulates their kubelets (kwok.yaml)."""

import subprocess
from pathlib import Path

import yaml

from tests.cluster.commands import run, wait_until

from .client import Object

# The selector and the toleration put a pod on the fake nodes. Their taint keeps other pods away.
ANNOTATION = "kwok.x-k8s.io/node"
NODE_SELECTOR = {"type": "kwok"}
TOLERATIONS = [{"key": ANNOTATION, "operator": "Equal", "value": "fake", "effect": "NoSchedule"}]

# kwok renews the Lease of each fake node four times in this time. The load is negligible.
LEASE_SECONDS = 120


class FakeNodes:
    """The fake nodes of the cluster behind `kubeconfig`, and their kwok process."""

    def __init__(self, count: int, kubeconfig: Path, log: Path) -> None:
        self._names = [f"fake-{number:03d}" for number in range(count)]
        self._kubeconfig = kubeconfig
        self._log = log
        self._kwok: subprocess.Popen[bytes] | None = None

    @property
    def kwok_pid(self) -> int:
        assert self._kwok, "start() was not called"
        return self._kwok.pid

    def start(self) -> None:
        """Start kwok, create the missing nodes and wait until all are ready."""
        # Until they expire, the Leases of an earlier kwok process keep this one from the nodes.
        leases = [f"lease/{name}" for name in self._names]
        self._kubectl("delete", "--namespace=kube-node-lease", "--ignore-not-found", *leases)
        self._start_kwok()
        existing = self._kubectl("get", "nodes", "--selector=type=kwok", "--output=name").split()
        missing = [_fake_node(name) for name in self._names if f"node/{name}" not in existing]
        if missing:
            self._kubectl("create", "--filename=-", stdin=yaml.safe_dump_all(missing))
        wait_until("every fake node is ready", self._all_ready, 120, self._end_of_log)

    def stop(self) -> None:
        if self._kwok:
            self._kwok.terminate()
            self._kwok.wait()
            self._kwok = None

    def _start_kwok(self) -> None:
        with self._log.open("wb") as log:
            self._kwok = subprocess.Popen(
                [
                    "kwok",
                    f"--kubeconfig={self._kubeconfig}",
                    f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
                    f"--node-lease-duration-seconds={LEASE_SECONDS}",
                    f"--config={Path(__file__).with_name('kwok.yaml')}",
                ],
                stdout=log,
                stderr=log,
            )

    def _all_ready(self) -> bool:
        ready = ".status.conditions[?(@.type=='Ready')].status"
        columns = f"--output=custom-columns=READY:{ready},TAINTS:.spec.taints[*].key"
        table = self._kubectl("get", "nodes", "--selector=type=kwok", "--no-headers", columns)
        rows = [line.split() for line in table.splitlines()]
        # The node controller removes its own taints late. Only ours may be left.
        return rows.count(["True", ANNOTATION]) >= len(self._names)

    def _end_of_log(self) -> str:
        return self._log.read_text()[-2000:]

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return run("kubectl", "--kubeconfig", self._kubeconfig, *arguments, stdin=stdin)


def _fake_node(name: str) -> Object:
    """Return a node of 96 cores.

    DaemonSets of the cluster select the label kubernetes.io/os. Without it they put no pod here.
    """
    size = {"cpu": "96", "memory": "768Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": dict(NODE_SELECTOR),
        },
        "spec": {"taints": [{"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": size, "capacity": size},
    }
