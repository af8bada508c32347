"""A namespace of a test: apply objects, look at jobs and pods, and wait for states."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cluster import SYSTEM, Cluster
from .commands import CommandFailed, Object, T, wait_until

# How long a state may take, in seconds. An idle machine needs less than a fifth of it.
DEADLINE = 600.0


def attempt_of(status: Object) -> int:
    """Return the number of the current attempt in a status; before the first, it is 0."""
    return int(status.get("attempt", {}).get("number", 0))


class Namespace:
    """One namespace of the cluster, created with `labels`."""

    def __init__(self, cluster: Cluster, name: str, **labels: str) -> None:
        self.cluster = cluster
        self.name = name
        metadata = {"name": name, "labels": labels}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def delete(self) -> None:
        """Delete the namespace and its volumes, without waiting."""
        kubectl = self.cluster.kubectl
        kubectl("delete", "namespace", self.name, "--wait=false", "--ignore-not-found")
        kubectl("delete", "persistentvolume", "--selector", f"test={self.name}", "--wait=false")

    def folder(self, claim: str) -> Path:
        """Return the folder of a claim on this machine."""
        return self.cluster.shared / self.name / claim

    def claim(self, name: str) -> None:
        """Create a ReadWriteMany claim over a new folder. Every user may write to it."""
        folder = self.folder(name)
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

    # -- act

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.name, *arguments, stdin=stdin)

    def apply(self, *objects: Object) -> None:
        self.cluster.apply(*objects, namespace=self.name)

    def uids(self, job: str) -> dict[str, str]:
        """Return the UIDs of a job's pods by name."""
        return {name: pod["metadata"]["uid"] for name, pod in self.pods(job).items()}

    def python(self, pod: str, program: str) -> None:
        """Run a Python program inside a pod's trainer."""
        self.kubectl("exec", pod, "--container", "trainer", "--", "python", "-c", program)

    def patch(self, job: str, **spec: Any) -> None:
        """Change fields of a job's spec."""
        change = json.dumps({"spec": spec})
        self.kubectl("patch", "ddpjob", job, "--type=merge", "--patch", change)

    # -- look

    def job(self, name: str) -> Object:
        """Return the DDPJob, or an empty dict if it does not exist."""
        return self.cluster.read.job(name, self.name) or {}

    def status(self, name: str) -> Object:
        status: Object = self.job(name).get("status", {})
        return status

    def pods(self, job: str) -> dict[str, Object]:
        """Return the pods of a job by name."""
        found = self.cluster.read.pods(self.name, f"ddpjob.dev/job={job}")
        return {pod["metadata"]["name"]: pod for pod in found}

    def nodes_of(self, job: str) -> dict[str, str]:
        """Return the Kubernetes nodes of a job's pods, by the names of the pods."""
        return {name: pod["spec"].get("nodeName", "") for name, pod in self.pods(job).items()}

    def unfinished(self, job: str) -> list[str]:
        """Return the unfinished pods of a job."""
        ended = ("Succeeded", "Failed")
        return [name for name, pod in self.pods(job).items() if pod["status"]["phase"] not in ended]

    def json_lines(self, pod: str) -> list[Object]:
        """Return the JSON objects in a pod's log, one a line."""
        lines = self.cluster.read.log(pod, self.name, "trainer").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def progress(self, pod: str, event: str) -> list[Object]:
        """Return a pod's progress events of one kind, written by rank 0 so far."""
        try:
            records = self.json_lines(pod)
        except CommandFailed:
            # The pod does not exist yet, or its container has not started.
            return []
        return [record for record in records if record.get("event") == event]

    def progress_of(self, job: str, attempt: int, event: str) -> list[Object]:
        """Return the progress events of one kind, written by rank 0 in an attempt.

        If a pod stays, its log has a line at the beginning of each of its attempts.
        """
        for pod in self.pods(job):
            if pod.endswith("-0"):
                try:
                    text = self.cluster.read.log(pod, self.name, "trainer")
                except CommandFailed:
                    continue
                _, begun, rest = text.partition(f"ddpjob agent: attempt {attempt} begins")
                if begun:
                    lines = rest.partition("ddpjob agent: attempt ")[0].splitlines()
                    records = [json.loads(line) for line in lines if line.startswith("{")]
                    return [record for record in records if record.get("event") == event]
        return []

    @contextmanager
    def watching_pods(self) -> Iterator[list[str]]:
        """Collect "NAME UID" of every existing pod during the block.

        The list is complete after the block.
        """
        seen: list[str] = []
        lines = set()
        for pod in self.cluster.read.pods(self.name):
            lines.add(f"{pod['metadata']['name']} {pod['metadata']['uid']}")
        command = ["kubectl", f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={self.name}"]
        columns = "--output=custom-columns=NAME:.metadata.name,UID:.metadata.uid"
        watch = subprocess.Popen(
            [*command, "get", "pods", "--watch", "--no-headers", columns],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield seen
        finally:
            watch.terminate()
            printed, _ = watch.communicate()
            for line in printed.splitlines():
                lines.add(" ".join(line.split()))
            seen += sorted(lines)

    # -- wait

    def wait(self, what: str, look: Callable[[], T | None], seconds: float = DEADLINE) -> T:
        """Return the first true answer of `look`.

        After `seconds`, raises AssertionError with everything in the namespace.
        """
        return wait_until(what, look, seconds, self.explain)

    def wait_for_status(self, job: str, seconds: float = DEADLINE, **expected: Any) -> Object:
        """Return the status as soon as it has every value of `expected`. `attempt` is a number.

        Fails at once if the job is finished without them.
        """

        def look() -> Object | None:
            status = self.status(job)
            found = {**status, "attempt": attempt_of(status)}
            if all(found.get(key) == value for key, value in expected.items()):
                return status
            finished = status.get("phase") in ("Complete", "Failed")
            assert not finished, f"{job} is {status['phase']} before {expected}\n{self.explain()}"
            return None

        return self.wait(f"{job} has {expected}", look, seconds)

    def wait_for_complete(
        self,
        job: str,
        seconds: float = DEADLINE,
        failures: int = 0,
        disruptions: int = 0,
        announced: int = 0,
    ) -> Object:
        """Return the status of a job, completed on two nodes after these restarts."""
        status = self.wait_for_status(job, seconds, phase="Complete")
        found = {
            "failures": status["budget"]["failures"],
            "disruptions": status["budget"]["disruptions"],
            "announced": status["budget"]["announced"],
            "attempt": status["attempt"]["number"],
            "succeeded": status["nodes"]["succeeded"],
        }
        expected = {
            "failures": failures,
            "disruptions": disruptions,
            "announced": announced,
            "attempt": failures + disruptions + announced,
            "succeeded": 2,
        }
        assert found == expected, f"{status.get('lastFailure')}\n{self.explain()}"
        return status

    def wait_until_nothing_runs(self, job: str, seconds: float = DEADLINE) -> None:
        """Wait until every pod of a job has ended or is gone."""
        self.wait(f"no pod of {job} runs", lambda: not self.unfinished(job), seconds)

    def wait_for_checkpoint(self, job: str, attempt: int = 0) -> None:
        """Wait until rank 0 of this attempt has written a checkpoint: the middle of the job."""
        self.wait(
            f"attempt {attempt} of {job} has written a checkpoint",
            lambda: self.progress_of(job, attempt, "checkpoint"),
        )

    def explain(self) -> str:
        """Return what a person would look at: jobs, pods, events, and the end of every log."""
        looks: list[tuple[str, ...]] = [
            ("get", "ddpjobs", "--output", "yaml"),
            ("get", "pods,services,persistentvolumeclaims", "--output", "wide"),
            ("get", "events", "--sort-by", ".lastTimestamp"),
        ]
        for pod in self.cluster.read.pods(self.name):
            looks.append(("logs", pod["metadata"]["name"], "--all-containers", "--tail=90"))
        looks.append(("logs", "--namespace", SYSTEM, "deployment/ddpjob-operator", "--tail=60"))
        return "\n".join(f"--- kubectl {' '.join(look)}\n{self._try(*look)}" for look in looks)

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except CommandFailed as error:
            return str(error)
