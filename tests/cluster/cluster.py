"""The kind cluster of the tests and its operator, made with the programs of a user."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import yaml

from ddpjob import __version__

from .commands import ROOT, CommandFailed, Object, build_image, node_image, run, wait_until
from .reader import Reader

NAME = "ddpjob-test"
CONTROL_PLANE = f"{NAME}-control-plane"
WORKERS = (f"{NAME}-worker", f"{NAME}-worker2")
SYSTEM = "ddpjob-system"  # the operator's namespace

# The kubeconfig, and the shared folder of the nodes.
SCRATCH = ROOT / "build" / "cluster-test"

# Names the run of pytest that has brought the cluster up.
READY = SCRATCH / "ready"

CHART = ROOT / "charts" / "ddpjob-operator"

OPERATOR = f"ddpjob-operator:{__version__}"
TRAINER = "ddpjob-trainer:cpu"

# A user's own image: Python and torch, running as root, nothing of this project.
PLAIN = "ddpjob-test-plain:cpu"

# The same with one program on its path: neither torchrun nor python3.
PYTHON_ONLY = "ddpjob-test-python:cpu"


def build_operator_image() -> None:
    build_image(OPERATOR)


def build_trainer_images() -> None:
    """Build the plain image, a stage of the trainer's, and the trainer's own."""
    trainer = ("--file", "images/cpu/Dockerfile")
    build_image(PLAIN, *trainer, "--target", "torch")
    build_image(TRAINER, *trainer)
    # A link would not be part of the virtual environment.
    program = r'#!/bin/sh\nexec /opt/venv/bin/python "$@"\n'
    write = f"mkdir /only && printf '{program}' > /only/python && chmod +x /only/python"
    dockerfile = f"FROM {PLAIN}\nRUN {write}\nENV PATH=/only\n"
    build_image(PYTHON_ONLY, context="-", stdin=dockerfile)


def shorten_node_grace_period() -> None:
    """Let the control plane call a node unreachable after 20 s, not 50 s, to shorten the tests.

    The kubelet of the control plane restarts the controller manager when its manifest changes.
    """
    manifest = "/etc/kubernetes/manifests/kube-controller-manager.yaml"
    flag = "--node-monitor-grace-period=20s"
    # A new file is moved over the old one, so the kubelet never reads a part of it.
    edit = f"sed 's/^\\( *\\)- kube-controller-manager$/&\\n\\1- {flag}/' {manifest} > /root/new"
    run("docker", "exec", CONTROL_PLANE, "sh", "-c", f"{edit} && mv /root/new {manifest}")


class Cluster:
    """The cluster, its operator, and the shared folder of its nodes."""

    def __init__(self) -> None:
        self.kubeconfig = SCRATCH / "kubeconfig"
        self.shared = SCRATCH / "shared"

    # -- create and delete

    def is_of(self, run: str) -> bool:
        """Return True if a run of pytest has brought the cluster up."""
        return READY.exists() and READY.read_text() == run

    def up(self, run_name: str = "") -> None:
        """Create the cluster, or take the existing one, and bring images and chart up to date.

        `run_name` is the name of this run of pytest.
        """
        SCRATCH.mkdir(parents=True, exist_ok=True)
        kept = NAME in run("kind", "get", "clusters").split()
        with ThreadPoolExecutor() as pool:
            steps = [
                pool.submit(build_trainer_images),
                pool.submit(build_operator_image),
                pool.submit(self._create, kept),
            ]
            for step in steps:
                step.result()
        self.load(OPERATOR, TRAINER, PLAIN, PYTHON_ONLY)
        self.install()
        if kept:
            # The operator may still run an older image of the same tag.
            self.kubectl("rollout", "restart", "deployment", "--namespace", SYSTEM)
            self.kubectl("rollout", "status", "deployment", "--namespace", SYSTEM, "--timeout=2m")
        READY.write_text(run_name)

    def load(self, *images: str) -> None:
        """Copy images to the workers, each layer once, through the shared folder of the nodes.

        `kind load` would send all layers through a pipe to each node.
        """
        archive = self.shared / "images.tar"
        command = ("ctr", "--namespace", "k8s.io", "images", "import", "--digests")
        try:
            run("docker", "save", "--output", archive, *images)
            with ThreadPoolExecutor() as pool:
                steps = []
                for node in WORKERS:
                    into = ("docker", "exec", node, *command, f"/var/ddpjob/{archive.name}")
                    steps.append(pool.submit(run, *into))
                for step in steps:
                    step.result()
        finally:
            archive.unlink(missing_ok=True)

    def _create(self, kept: bool) -> None:
        if kept:
            run("kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", self.kubeconfig)
        settings = {
            "CLUSTER": NAME,
            "SHARED": str(self.shared),
            "KUBECONFIG": str(self.kubeconfig),
        }
        image = node_image()
        if image:
            settings["KIND_IMAGE"] = image
        run("examples/kind/up", **settings)
        if not kept:
            shorten_node_grace_period()
            self._keep_dns_off_workers()

    def _keep_dns_off_workers(self) -> None:
        """Pin CoreDNS to the control plane. A frozen worker would resolve no name for minutes."""
        selector = {"nodeSelector": {"node-role.kubernetes.io/control-plane": ""}}
        patch = json.dumps({"spec": {"template": {"spec": selector}}})
        deployment = ("--namespace", "kube-system", "deployment/coredns")
        self.kubectl("patch", *deployment, "--patch", patch)
        self.kubectl("rollout", "status", *deployment, "--timeout=2m")

    def delete(self) -> None:
        READY.unlink(missing_ok=True)
        run("kind", "delete", "cluster", "--name", NAME, KUBECONFIG=str(self.kubeconfig))
        shutil.rmtree(SCRATCH, ignore_errors=True)

    # -- objects

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return run("kubectl", "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def apply(self, *objects: Object, namespace: str = "default") -> None:
        """Apply objects. Raises CommandFailed with the answer of the API server."""
        manifest = yaml.safe_dump_all(objects)
        self.kubectl("apply", "--namespace", namespace, "--filename", "-", stdin=manifest)

    @cached_property
    def read(self) -> Reader:
        """Connection for the tests to look at objects. The cluster must be up."""
        return Reader(self.kubeconfig)

    # -- nodes

    @contextmanager
    def paused(self, node: str) -> Iterator[None]:
        """Freeze every process of a node for the duration of the block, as if it had crashed."""
        run("docker", "pause", node)
        try:
            yield
        finally:
            run("docker", "unpause", node)
        self.wait_for_node(node)

    def wait_for_node(self, node: str) -> None:
        """Wait until a node is ready, also if the API server does not answer at first."""

        def is_ready() -> bool:
            try:
                return self.read.is_ready(node)
            except CommandFailed:
                return False

        wait_until(f"{node} is ready", is_ready, 120)

    def pods_of_kubelet(self, node: str) -> list[str]:
        """Return the uids of the pods still known to the kubelet of a node.

        The API server forgets a pod deleted by force.
        """
        return run("docker", "exec", node, "ls", "/var/lib/kubelet/pods").split()

    # -- the operator

    def install(self, *, chart: Path = CHART, **values: str) -> None:
        """Install or upgrade the chart with `values` only, and wait until the operator is ready."""
        settings = []
        for key, value in values.items():
            settings += ["--set", f"{key}={value}"]
        run(
            *("helm", "upgrade", "--install", "ddpjob-operator", chart),
            *("--namespace", SYSTEM, "--create-namespace", "--reset-values"),
            *("--wait", "--timeout", "3m", *settings),
            KUBECONFIG=str(self.kubeconfig),
        )

    def rollback(self) -> None:
        """Go back to the release before, and wait until its operator is ready."""
        command = ("helm", "rollback", "ddpjob-operator", "--namespace", SYSTEM, "--wait")
        run(*command, "--timeout", "3m", KUBECONFIG=str(self.kubeconfig))

    def uninstall(self) -> None:
        command = ("helm", "uninstall", "ddpjob-operator", "--namespace", SYSTEM, "--wait")
        run(*command, KUBECONFIG=str(self.kubeconfig))

    @contextmanager
    def operator_down(self) -> Iterator[None]:
        """Stop the operator for the duration of the block."""
        self._scale(0)
        wait_until("the operator's pod is gone", lambda: not self.read.pods(SYSTEM), 60)
        try:
            yield
        finally:
            self._scale(1)

    def kill_operator(self) -> None:
        """Delete the operator's pod at once, before it can release its Lease."""
        how = ("--all", "--force", "--grace-period=0", "--wait=false")
        self.kubectl("delete", "pods", "--namespace", SYSTEM, *how)

    def operator_log(self, node: str) -> str:
        """Return the operator's log as the kubelet of its node keeps it.

        It can be read while the API server does not answer.
        """
        files = f"/var/log/pods/{SYSTEM}_*/operator/*.log"
        return run("docker", "exec", node, "sh", "-c", f"cat {files}")

    def _scale(self, replicas: int) -> None:
        target = ("deployment", "--all", "--namespace", SYSTEM)
        self.kubectl("scale", *target, f"--replicas={replicas}")
