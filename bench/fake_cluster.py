"""A kind cluster of one real node and many fake ones, with the operator on the real one, for benchmarks only.

API server, etcd, scheduler, controller manager and the operator's pod are real; kwok plays the kubelets (kwok.yaml).
Nothing here measures; operator_speed.py does.
"""

import base64
import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "cluster"))
from harness import Refused, Unavailable, node_image, poll, require_tools, run  # noqa: E402

NAME = "ddpjob-bench"
NODE = f"{NAME}-control-plane"
SCRATCH = ROOT / "build" / "bench"  # kubeconfig, certificates, kwok's log
SYSTEM = "ddpjob-system"
OPERATOR = "ddpjob-operator:0.1.0"

FAKE = "kwok.x-k8s.io/node"
NODE_SELECTOR = {"type": "kwok"}
TOLERATIONS = [{"key": FAKE, "operator": "Equal", "value": "fake", "effect": "NoSchedule"}]
"""By these two a pod lands on the fake nodes, and by the taint nothing else does."""

QPS, BURST = 1000, 2000
"""Far more than two cores can use: the controllers' default client limits (20 and 50 a second) would be what is measured."""

LEASE_SECONDS = 120
"""kwok renews each fake node's Lease four times as often as this: rare enough not to be a load of its own."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Access:
    """Where the API server listens, whom to trust (PEM text), and who asks: a certificate with its key (PEM file) or a token."""

    host: str
    port: int
    authority: str
    certificate: Path | None = None
    token: str = ""

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority)
        if self.certificate:
            context.load_cert_chain(self.certificate)
        return context


class FakeCluster:
    """The cluster, kwok and the operator's release. `up` and `down` are safe to repeat."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.kubeconfig = SCRATCH / "kubeconfig"
        self._kwok: subprocess.Popen[bytes] | None = None

    def up(self, image: str | None) -> None:
        """Make the cluster, or take the one that is there. `image`: the operator's; None builds it from this tree."""
        require_tools()
        if not shutil.which("kwok"):
            raise Unavailable(
                "kwok is not installed; https://kwok.sigs.k8s.io says where to get it"
            )
        SCRATCH.mkdir(parents=True, exist_ok=True)
        if image is None:
            run("docker", "build", "--quiet", "--tag", OPERATOR, ".")
        self._create_cluster()
        self._require_unthrottled()
        run("kind", "load", "docker-image", "--name", NAME, image or OPERATOR)
        self._start_kwok()
        self._create_nodes()
        self._install(image or OPERATOR)

    def down(self, keep: bool) -> None:
        """End kwok; with `keep` the cluster stays for the next run."""
        if self._kwok:
            self._kwok.terminate()
            self._kwok.wait()
            self._kwok = None
        if not keep:
            run("kind", "delete", "cluster", "--name", NAME, KUBECONFIG=str(self.kubeconfig))

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return run("kubectl", "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def access(self) -> Access:
        """The administrator's way in, for a plain HTTP client."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        certificate = SCRATCH / "admin.pem"
        certificate.touch(mode=0o600)
        certificate.write_bytes(
            base64.b64decode(user["client-certificate-data"])
            + base64.b64decode(user["client-key-data"])
        )
        host, port = cluster["server"].removeprefix("https://").rsplit(":", 1)
        return Access(
            host,
            int(port),
            base64.b64decode(cluster["certificate-authority-data"]).decode(),
            certificate,
        )

    def make_namespace(self, name: str) -> None:
        """Pods can be created in it afterwards: its default ServiceAccount is there."""
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump(_meta("v1", "Namespace", name)))
        self.kubectl(
            "wait", f"--namespace={name}", "--for=create", "serviceaccount/default", "--timeout=30s"
        )

    def operator_process(self) -> tuple[str, int]:
        """The operator's pod and its process id on the real node."""
        pod = self.kubectl(
            "get",
            "pods",
            f"--namespace={SYSTEM}",
            "--selector=app.kubernetes.io/name=ddpjob-operator",
            "--output=name",
        )
        pids = run("docker", "exec", NODE, "pgrep", "-f", "ddpjob operator").split()
        if len(pids) != 1 or len(pod.split()) != 1:
            raise RuntimeError(
                f"expected one operator, found pods {pod.split()} and processes {pids}"
            )
        return pod.strip().removeprefix("pod/"), int(pids[0])

    def process_ids(self, programs: Sequence[str]) -> dict[str, int]:
        """Of programs of which the real node runs one each."""
        return {
            name: int(run("docker", "exec", NODE, "pgrep", "--full", f"^{name} "))
            for name in programs
        }

    @property
    def kwok(self) -> int:
        """Process id of kwok, on this machine."""
        assert self._kwok, "up() starts it"
        return self._kwok.pid

    # -- parts

    def _create_cluster(self) -> None:
        if NAME in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", self.kubeconfig)
            return
        config = SCRATCH / "kind.yaml"
        config.write_text(yaml.safe_dump(_kind_config()))
        image = node_image()
        chosen = ("--image", image) if image else ()
        run(
            "kind",
            "create",
            "cluster",
            "--config",
            config,
            "--kubeconfig",
            self.kubeconfig,
            "--wait=180s",
            *chosen,
        )

    def _require_unthrottled(self) -> None:
        """A node image that reads another version of kubeadm's configuration would ignore ours without a word."""
        for program in ("kube-controller-manager", "kube-scheduler"):
            if f"--kube-api-qps={QPS}" not in run(
                "docker", "exec", NODE, "pgrep", "-a", "-f", program
            ):
                raise RuntimeError(
                    f"{program} runs throttled: this node image does not take kubeadm's v1beta4 settings"
                )

    def _start_kwok(self) -> None:
        # An earlier kwok's Leases would keep this one from its nodes until they end.
        leases = [f"lease/{name}" for name in self._node_names()]
        self.kubectl("delete", "--namespace=kube-node-lease", "--ignore-not-found", *leases)
        with (SCRATCH / "kwok.log").open("wb") as log:
            self._kwok = subprocess.Popen(
                [
                    "kwok",
                    f"--kubeconfig={self.kubeconfig}",
                    f"--manage-nodes-with-annotation-selector={FAKE}=fake",
                    f"--node-lease-duration-seconds={LEASE_SECONDS}",
                    f"--config={Path(__file__).with_name('kwok.yaml')}",
                ],
                stdout=log,
                stderr=log,
            )

    def _create_nodes(self) -> None:
        there = self.kubectl("get", "nodes", "--selector=type=kwok", "--output=name").split()
        missing = [_fake_node(name) for name in self._node_names() if f"node/{name}" not in there]
        if missing:
            self.kubectl("create", "--filename=-", stdin=yaml.safe_dump_all(missing))
        poll(
            "every fake node is ready",
            self._nodes_are_ready,
            120,
            lambda: (SCRATCH / "kwok.log").read_text()[-2000:],
        )

    def _node_names(self) -> list[str]:
        return [f"fake-{number:03d}" for number in range(self.nodes)]

    def _nodes_are_ready(self) -> bool:
        columns = "--output=custom-columns=READY:.status.conditions[?(@.type=='Ready')].status,T:.spec.taints[*].key"
        found = self.kubectl("get", "nodes", "--selector=type=kwok", "--no-headers", columns)
        return [line.split() for line in found.splitlines()].count(["True", FAKE]) >= self.nodes

    def _install(self, image: str) -> None:
        repository, _, tag = image.rpartition(":")
        settings = ("--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}")
        chart = (
            "ddpjob-operator",
            "charts/ddpjob-operator",
            "--namespace",
            SYSTEM,
            "--create-namespace",
        )
        environment = {"KUBECONFIG": str(self.kubeconfig)}
        run(
            "helm",
            "upgrade",
            "--install",
            *chart,
            *settings,
            "--wait",
            "--timeout=3m",
            **environment,
        )
        # Always a fresh process: in a kept cluster the old one may run an older image of the same tag.
        self.kubectl("rollout", "restart", "deployment", f"--namespace={SYSTEM}")
        self.kubectl("rollout", "status", "deployment", f"--namespace={SYSTEM}", "--timeout=3m")
        poll("only the new operator is left", self._one_operator, 60)

    def _one_operator(self) -> bool:
        try:
            self.operator_process()
        except (RuntimeError, Refused):
            return False
        return True


def _meta(api_version: str, kind: str, name: str, **metadata: Object) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, **metadata}}


def _kind_config() -> Object:
    limits = [
        {"name": "kube-api-qps", "value": str(QPS)},
        {"name": "kube-api-burst", "value": str(BURST)},
    ]
    patch = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "ClusterConfiguration",
        "controllerManager": {"extraArgs": limits},
        "scheduler": {"extraArgs": limits},
    }
    return {
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "kind": "Cluster",
        "name": NAME,
        "nodes": [{"role": "control-plane"}],
        "kubeadmConfigPatches": [yaml.safe_dump(patch, sort_keys=False)],
    }


def _fake_node(name: str) -> Object:
    """A machine of 96 cores. Without the label kubernetes.io/os no DaemonSet of the cluster wants a pod on it."""
    size = {"cpu": "96", "memory": "768Gi", "pods": "110"}
    node = _meta("v1", "Node", name, annotations={FAKE: "fake"}, labels=dict(NODE_SELECTOR))
    node["spec"] = {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]}
    node["status"] = {"allocatable": size, "capacity": size}
    return node
