"""A kind cluster for the tests, and what a test does with it: apply, look, wait for a state, break something.

Everything goes through the programs that a user types: docker, kind, helm, kubectl, examples/kind/up.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

ROOT = Path(__file__).parents[2]
NAME = "ddpjob-test"
SCRATCH = ROOT / "build" / "cluster-test"  # kubeconfig and the folder that the nodes share
SYSTEM = "ddpjob-system"
WORKERS = (f"{NAME}-worker", f"{NAME}-worker2")

OPERATOR = "ddpjob-operator:0.1.0"
TRAINER = "ddpjob-trainer:cpu"
PLAIN = "ddpjob-test-plain:cpu"
"""A user's own image: Python and torch, running as root, nothing of ours."""

Object = dict[str, Any]
T = TypeVar("T")


class Unavailable(Exception):
    """This machine cannot run a cluster; the sentence says what to install."""


class Refused(Exception):
    """kubectl did not do what it was told; the text is what it said."""


def run(*command: str | Path, stdin: str | None = None, **environment: str) -> str:
    """Standard output of a command. Raises Refused with what it said when it fails."""
    result = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    if result.returncode:
        raise Refused(
            f"{' '.join(map(str, command))}: {result.stderr.strip() or result.stdout.strip()}"
        )
    return result.stdout


def poll(
    what: str, look: Callable[[], T | None], seconds: float, explain: Callable[[], str] = str
) -> T:
    """The first true answer of `look`. After `seconds` without one, an AssertionError with `what` and `explain()`."""
    deadline = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}\n{explain()}")
        time.sleep(0.5)


def require_tools() -> None:
    """Raises Unavailable unless docker, kind, helm and kubectl are here and the Docker engine answers."""
    for program in ("docker", "kind", "helm", "kubectl"):
        if not shutil.which(program):
            raise Unavailable(
                f"{program} is not installed; docs/quickstart-kind.md says where to get it"
            )
    try:
        run("docker", "info")
    except Refused as error:
        raise Unavailable(
            "the Docker engine does not answer; start it (`docker info` shows why)"
        ) from error


def node_image() -> str:
    """The node image to use, or "" for the kind release's own. Raises Unavailable when a named one is not here."""
    beside = ROOT.parent / "shared" / "lab" / "node-image-name"
    image = os.environ.get("KIND_NODE_IMAGE") or (
        beside.read_text().strip() if beside.exists() else ""
    )
    if image:
        try:
            run("docker", "image", "inspect", image)
        except Refused as error:
            raise Unavailable(
                f"the node image is not here; `docker pull {image}`, or set KIND_NODE_IMAGE"
            ) from error
    return image


def build_images() -> None:
    """The three images, through the repository's own Dockerfiles; the plain one is a stage of the trainer's."""
    run("docker", "build", "--quiet", "--tag", OPERATOR, ".")
    trainer = ("docker", "build", "--quiet", "--file", "images/cpu/Dockerfile")
    run(*trainer, "--target", "torch", "--tag", PLAIN, ".")
    run(*trainer, "--tag", TRAINER, ".")


class Cluster:
    """The cluster, its operator, and the folder that its nodes share."""

    def __init__(self) -> None:
        self.kubeconfig = SCRATCH / "kubeconfig"
        self.shared = SCRATCH / "shared"

    # -- making and removing

    def up(self) -> None:
        """Make the cluster, or take the one that is there; images and chart are brought up to date."""
        SCRATCH.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            for step in [pool.submit(build_images), pool.submit(self._create, node_image())]:
                step.result()
        run(
            "kind",
            "load",
            "docker-image",
            "--name",
            NAME,
            "--nodes",
            ",".join(WORKERS),
            OPERATOR,
            TRAINER,
            PLAIN,
        )
        self.install()
        # In a kept cluster the operator may still run an older image of the same tag.
        self.kubectl("rollout", "restart", "deployment", "--namespace", SYSTEM)
        self.kubectl("rollout", "status", "deployment", "--namespace", SYSTEM, "--timeout=2m")

    def _create(self, image: str) -> None:
        if NAME in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", self.kubeconfig)
        settings = {"KIND_IMAGE": image} if image else {}
        run(
            "examples/kind/up",
            CLUSTER=NAME,
            SHARED=str(self.shared),
            KUBECONFIG=str(self.kubeconfig),
            **settings,
        )

    def delete(self) -> None:
        run("kind", "delete", "cluster", "--name", NAME, KUBECONFIG=str(self.kubeconfig))
        shutil.rmtree(SCRATCH, ignore_errors=True)

    # -- commands

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return run("kubectl", "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def apply(self, *objects: Object, namespace: str = "default") -> None:
        """Raises Refused with the API server's words."""
        self.kubectl(
            "apply", "--namespace", namespace, "--filename", "-", stdin=yaml.safe_dump_all(objects)
        )

    def get(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        found: Object = json.loads(
            self.kubectl(
                "get",
                kind,
                name,
                "--namespace",
                namespace,
                "--ignore-not-found",
                "--output",
                "json",
            )
            or "{}"
        )
        return found or None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        answer = self.kubectl(
            "get", kind, "--namespace", namespace, "--selector", selector, "--output", "json"
        )
        items: list[Object] = json.loads(answer)["items"]
        return items

    # -- the operator

    def install(self, **values: str) -> None:
        """Install or upgrade the chart with `values` (and only these) and wait until the new operator is ready."""
        settings = [
            argument for key, value in values.items() for argument in ("--set", f"{key}={value}")
        ]
        chart = (
            "ddpjob-operator",
            "charts/ddpjob-operator",
            "--namespace",
            SYSTEM,
            "--create-namespace",
            "--reset-values",
        )
        run(
            "helm",
            "upgrade",
            "--install",
            *chart,
            *settings,
            "--wait",
            "--timeout",
            "3m",
            KUBECONFIG=str(self.kubeconfig),
        )

    def uninstall(self) -> None:
        run(
            "helm",
            "uninstall",
            "ddpjob-operator",
            "--namespace",
            SYSTEM,
            "--wait",
            KUBECONFIG=str(self.kubeconfig),
        )

    @contextmanager
    def operator_down(self) -> Iterator[None]:
        """Inside, no operator runs; afterwards one does."""
        self._scale(0)
        poll("the operator's pod is gone", lambda: not self.list("pods", SYSTEM), 60)
        try:
            yield
        finally:
            self._scale(1)

    def _scale(self, replicas: int) -> None:
        self.kubectl(
            "scale", "deployment", "--all", "--namespace", SYSTEM, f"--replicas={replicas}"
        )


class Space:
    """A namespace of a test's own, and the test's eyes and hands in it."""

    def __init__(self, cluster: Cluster, name: str, **labels: str) -> None:
        self.cluster = cluster
        self.name = name
        cluster.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        )

    def close(self) -> None:
        """Remove the namespace without waiting for it, and the volumes made for it."""
        self.cluster.kubectl("delete", "namespace", self.name, "--wait=false", "--ignore-not-found")
        self.cluster.kubectl(
            "delete", "persistentvolume", "--selector", f"test={self.name}", "--wait=false"
        )

    def claim(self, name: str) -> None:
        """A ReadWriteMany claim over a new folder that every user may write to."""
        folder = self.cluster.shared / self.name / name
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
        volume = f"{self.name}-{name}"
        common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume, "labels": {"test": self.name}},
                "spec": {
                    **common,
                    "capacity": {"storage": "1Gi"},
                    "claimRef": {"namespace": self.name, "name": name},
                    "hostPath": {"path": f"/var/ddpjob/{self.name}/{name}", "type": "Directory"},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name},
                "spec": {
                    **common,
                    "volumeName": volume,
                    "resources": {"requests": {"storage": "1Gi"}},
                },
            },
        )

    # -- doing

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.name, *arguments, stdin=stdin)

    def apply(self, *objects: Object) -> None:
        self.cluster.apply(*objects, namespace=self.name)

    def python(self, pod: str, program: str) -> None:
        """Run a Python program inside a pod's trainer."""
        self.kubectl("exec", pod, "--container", "trainer", "--", "python", "-c", program)

    # -- looking

    def job(self, name: str) -> Object:
        return self.cluster.get("ddpjob", name, self.name) or {}

    def status(self, name: str) -> Object:
        status: Object = self.job(name).get("status", {})
        return status

    def pods(self, job: str) -> dict[str, Object]:
        """Pods of a job by name."""
        selector = f"ddpjob.dev/job={job}"
        return {
            pod["metadata"]["name"]: pod for pod in self.cluster.list("pods", self.name, selector)
        }

    def logs(self, pod: str) -> str:
        return self.kubectl("logs", pod, "--container", "trainer")

    def progress(self, pod: str, event: str) -> list[Object]:
        """The progress lines of one kind that a pod's rank 0 has written so far."""
        try:
            lines = self.logs(pod).splitlines()
        except Refused:  # its container has not started, or the pod is not there yet
            return []
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == event]

    @contextmanager
    def watching_pods(self) -> Iterator[list[str]]:
        """Collects "NAME UID" of every pod that this namespace ever had inside; complete after the block."""
        seen: list[str] = []
        there = {
            f"{pod['metadata']['name']} {pod['metadata']['uid']}"
            for pod in self.cluster.list("pods", self.name)
        }
        columns = "--output=custom-columns=NAME:.metadata.name,UID:.metadata.uid"
        command = ["kubectl", "--kubeconfig", self.cluster.kubeconfig, "--namespace", self.name]
        watch = subprocess.Popen(
            [*command, "get", "pods", "--watch", "--no-headers", columns],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield seen
        finally:
            watch.terminate()
            seen += sorted(
                there
                | {" ".join(line.split()) for line in (watch.communicate()[0] or "").splitlines()}
            )

    # -- waiting

    def wait(self, what: str, look: Callable[[], T | None], seconds: float = 180) -> T:
        """The first true answer of `look`; without one an AssertionError that shows everything in the namespace."""
        return poll(what, look, seconds, self.explain)

    def wait_for_status(self, job: str, seconds: float = 180, **expected: Any) -> Object:
        """The status once it shows every value of `expected`; fails at once when the job is finished before."""

        def look() -> Object | None:
            status = self.status(job)
            if all(status.get(key) == value for key, value in expected.items()):
                return status
            finished = status.get("phase") in ("Complete", "Failed")
            assert not finished, f"{job} is {status['phase']} before {expected}\n{self.explain()}"
            return None

        return self.wait(f"{job} has {expected}", look, seconds)

    def wait_for_complete(
        self, job: str, seconds: float = 180, restarts: int = 0, disruptions: int = 0
    ) -> Object:
        """The status of a job that is Complete on two nodes after exactly these restarts and disruptions."""
        status = self.wait_for_status(job, seconds, phase="Complete")
        found = (
            status["restarts"],
            status["disruptions"],
            status["attempt"],
            status["nodes"]["succeeded"],
        )
        expected = (restarts, disruptions, restarts + disruptions, 2)
        assert found == expected, (
            f"{found}, not {expected}: {status.get('lastFailure')}\n{self.explain()}"
        )
        return status

    def wait_for_checkpoint(self, job: str, attempt: int = 0) -> None:
        """Until rank 0 of this attempt has written a checkpoint: the middle of the job."""
        pod = f"{job}-{attempt}-0"
        self.wait(f"{pod} has written a checkpoint", lambda: self.progress(pod, "checkpoint"))

    def explain(self) -> str:
        """Everything a person would look at: jobs, pods, events, the end of every log."""
        looks: list[tuple[str, ...]] = [
            ("get", "ddpjobs", "--output", "yaml"),
            ("get", "pods,services,persistentvolumeclaims", "--output", "wide"),
            ("get", "events", "--sort-by", ".lastTimestamp"),
        ]
        looks += [
            ("logs", pod["metadata"]["name"], "--all-containers", "--tail=30")
            for pod in self._all_pods()
        ]
        looks += [("logs", "--namespace", SYSTEM, "deployment/ddpjob-operator", "--tail=60")]
        return "\n".join(f"--- kubectl {' '.join(look)}\n{self._try(*look)}" for look in looks)

    def _all_pods(self) -> list[Object]:
        return self.cluster.list("pods", self.name)

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except Refused as error:
            return str(error)
