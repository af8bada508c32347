"""The three cases of the comparison, with the objects to create in each."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.render import objects
from ddpjob.core.render.pod_context import Settings

from .client import Object
from .fake_nodes import NODE_SELECTOR, TOLERATIONS

NAMESPACE = "bench"

OURS = "DDPJob"
INDEXED = "Indexed Job"
FLOOR = "bare client"
CASES = (OURS, INDEXED, FLOOR)

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
COLLECTIONS = {
    OURS: f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}",
    INDEXED: f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
    FLOOR: PODS,
}


@dataclass(frozen=True)
class Shape:
    """`jobs` jobs of `nodes` nodes each."""

    jobs: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
        if not found:
            raise argparse.ArgumentTypeError(f'must be JOBSxNODES such as 100x4, got "{text}"')
        return cls(int(found[1]), int(found[2]))

    @property
    def pods(self) -> int:
        return self.jobs * self.nodes

    def __str__(self) -> str:
        return f"{self.jobs} x {self.nodes}"


def objects_of(
    case: str, shape: Shape, labels: Mapping[str, str] = MappingProxyType({})
) -> list[bytes]:
    """Return the objects to create in this case, each as JSON and with the `labels`."""
    bodies: list[Object] = []
    for name in _job_names(shape):
        if case == OURS:
            bodies.append(manifest(name, shape.nodes))
        elif case == INDEXED:
            bodies.append(indexed_job(name, shape.nodes))
        else:
            bodies += rendered_pods(name, shape.nodes)
    for body in bodies:
        body["metadata"]["labels"] = {**body["metadata"].get("labels", {}), **labels}
    return [json.dumps(created).encode() for created in bodies]


def _job_names(shape: Shape) -> Iterator[str]:
    return (f"job-{number:03d}" for number in range(shape.jobs))


def manifest(name: str, nodes: int) -> Object:
    """Return the DDPJob of every case: a plain trainer with a request for one core."""
    spec = {
        "nodes": nodes,
        # After a loss the other pods stay. `recovery.py` measures their wait for an assignment.
        "recovery": "InPlace",
        "image": "registry.invalid/trainer:1",
        "args": ["train.py", "--epochs", "1"],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "nodeSelector": NODE_SELECTOR,
        "tolerations": TOLERATIONS,
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}


def rendered_pods(name: str, nodes: int) -> list[Object]:
    """Return the operator's pods, without their owner and with another label for their job.

    With the original label, the operator would receive the events of these pods. Its work would
    slow down the cases without DDPJobs.
    """
    job = manifest(name, nodes)
    job["metadata"]["uid"] = "00000000-0000-4000-8000-000000000000"
    job["status"] = {"attempt": {"number": 0}, "nodes": {"desired": nodes}}
    pods = list(objects.pods(Job.from_dict(job), range(nodes), Settings()))
    for pod in pods:
        del pod["metadata"]["ownerReferences"]
        labels = pod["metadata"]["labels"]
        labels["operator-speed/job"] = labels.pop(names.LABEL_JOB)
    return pods


def indexed_job(name: str, nodes: int) -> Object:
    """Return a batch/v1 Indexed Job with the same pod template.

    The Job controller gives the pods their name, host name and index.
    """
    pod = rendered_pods(name, nodes)[0]
    del pod["spec"]["hostname"]
    metadata = {key: pod["metadata"][key] for key in ("labels", "annotations")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "template": {"metadata": metadata, "spec": pod["spec"]},
        },
    }
