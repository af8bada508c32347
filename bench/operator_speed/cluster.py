"""A kind cluster of one real node and many fake ones, with the operator on the real one.

API server, etcd, scheduler, controller manager and the operator's pod are real. kwok plays the
kubelets of the fake nodes. Nothing here measures.
"""

import base64
import shutil
from collections.abc import Sequence

import yaml

from ddpjob import __version__
from tests.cluster.commands import (
    ROOT,
    CommandFailed,
    Unavailable,
    node_image,
    require_tools,
    run,
    wait_until,
)

from .client import Access, Object
from .fake_nodes import FakeNodes

NAME = "ddpjob-bench"
NODE = f"{NAME}-control-plane"
SYSTEM = "ddpjob-system"  # the operator's namespace
OPERATOR_IMAGE = f"ddpjob-operator:{__version__}"

# Kubeconfig, certificates and the log of kwok.
SCRATCH = ROOT / "build" / "bench"

# Permitted requests per second of the controller manager and of the scheduler. With their defaults
# of 20 and 50, the benchmark would measure the rate limit. Two cores cannot use as many as these.
QPS = 1000
BURST = 2000


class Cluster:
    """The cluster, its fake nodes and the operator's release. `up` and `down` may be repeated."""

    def __init__(self, fake_nodes: int) -> None:
        self.kubeconfig = SCRATCH / "kubeconfig"
        self._fake_nodes = FakeNodes(fake_nodes, self.kubeconfig, SCRATCH / "kwok.log")

    @property
    def kwok_pid(self) -> int:
        return self._fake_nodes.kwok_pid

    def up(self, image: str | None) -> None:
        """Create the cluster, or take the existing one, and install the operator.

        `image` is the operator's. Without one, it is built from this tree.
        """
        require_tools()
        if not shutil.which("kwok"):
            raise Unavailable(
                "kwok is not installed: https://kwok.sigs.k8s.io says where to get it"
            )
        SCRATCH.mkdir(parents=True, exist_ok=True)
        if image is None:
            image = OPERATOR_IMAGE
            run("docker", "build", "--quiet", "--tag", image, ".")
        self._create()
        _require_no_rate_limit()
        run("kind", "load", "docker-image", "--name", NAME, image)
        self._fake_nodes.start()
        self._install_operator(image)

    def down(self, keep: bool) -> None:
        """Stop kwok and delete the cluster, unless `keep`."""
        self._fake_nodes.stop()
        if not keep:
            run("kind", "delete", "cluster", "--name", NAME, KUBECONFIG=str(self.kubeconfig))

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return run("kubectl", "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def access(self) -> Access:
        """Return the administrator's access for a plain HTTP client."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        user = config["users"][0]["user"]
        certificate = SCRATCH / "admin.pem"
        certificate.touch(mode=0o600)
        certificate.write_bytes(
            base64.b64decode(user["client-certificate-data"])
            + base64.b64decode(user["client-key-data"])
        )
        host, port = cluster["server"].removeprefix("https://").rsplit(":", 1)
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        return Access(host, int(port), authority, certificate)

    def make_namespace(self, name: str) -> None:
        """Create a namespace and wait for its ServiceAccount. Every pod needs one."""
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump(namespace))
        account = "serviceaccount/default"
        self.kubectl("wait", f"--namespace={name}", "--for=create", account, "--timeout=30s")

    def operator_process(self) -> tuple[str, int]:
        """Return the name of the operator's pod, and its process id on the real node."""
        selector = "--selector=app.kubernetes.io/name=ddpjob-operator"
        found = self.kubectl("get", "pods", f"--namespace={SYSTEM}", selector, "--output=name")
        pods = found.split()
        pids = run("docker", "exec", NODE, "pgrep", "-f", "ddpjob operator").split()
        if len(pids) != 1 or len(pods) != 1:
            raise RuntimeError(f"expected one operator, got pods {pods} and processes {pids}")
        return pods[0].removeprefix("pod/"), int(pids[0])

    def process_ids(self, programs: Sequence[str]) -> dict[str, int]:
        """Return the process id of each program. The real node must run each of them once."""
        pids = {}
        for name in programs:
            pids[name] = int(run("docker", "exec", NODE, "pgrep", "--full", f"^{name} "))
        return pids

    def _create(self) -> None:
        if NAME in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", self.kubeconfig)
            return
        config = SCRATCH / "kind.yaml"
        config.write_text(yaml.safe_dump(_kind_config()))
        command = ["kind", "create", "cluster", "--wait=180s"]
        command += ["--config", str(config), "--kubeconfig", str(self.kubeconfig)]
        image = node_image()
        if image:
            command += ["--image", image]
        run(*command)

    def _install_operator(self, image: str) -> None:
        repository, _, tag = image.rpartition(":")
        run(
            *("helm", "upgrade", "--install", "ddpjob-operator", "charts/ddpjob-operator"),
            *("--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout=3m"),
            *("--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"),
            KUBECONFIG=str(self.kubeconfig),
        )
        # In an existing cluster the old process may run an older image of the same tag.
        self.kubectl("rollout", "restart", "deployment", f"--namespace={SYSTEM}")
        self.kubectl("rollout", "status", "deployment", f"--namespace={SYSTEM}", "--timeout=3m")
        wait_until("only the new operator runs", self._one_operator_runs, 60)

    def _one_operator_runs(self) -> bool:
        try:
            self.operator_process()
        except (RuntimeError, CommandFailed):
            return False
        return True


def _require_no_rate_limit() -> None:
    """Raise RuntimeError if a controller runs with its default rate limit.

    A node image for another version of kubeadm's configuration ignores ours silently.
    """
    for program in ("kube-controller-manager", "kube-scheduler"):
        command_line = run("docker", "exec", NODE, "pgrep", "-a", "-f", program)
        if f"--kube-api-qps={QPS}" not in command_line:
            raise RuntimeError(
                f"{program} runs with its default rate limit: this node image ignores kubeadm's "
                "v1beta4 settings. Set KIND_NODE_IMAGE to Kubernetes 1.31 or newer"
            )


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
