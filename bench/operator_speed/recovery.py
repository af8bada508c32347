"""Measure how long a gang waits for the operator after it has lost a pod.

The time ends when every other pod has the assignment of the next attempt, and the new pod exists.
Fake nodes start nothing, so this is the operator's part, and the API server's.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob.core.api import names

from .cases import COLLECTIONS, OURS, PODS, Shape, objects_of
from .client import Access, Client, Object, Write, send_all
from .measure import CONNECTIONS, Bench
from .pod_watch import PodWatch

# The longest wait for one recovery, in seconds.
LIMIT = 60.0

NEXT = "1"
MERGE = "application/merge-patch+json"


@dataclass(frozen=True)
class Recovery:
    """Seconds from the deletion of a pod to the last write for the next attempt.

    `bare` is a bare client's time for the same patches of the other pods.
    """

    seconds: float
    bare: float


def measure_recovery(bench: Bench, shape: Shape) -> Recovery:
    """Delete a pod of a gang, and measure how long the others wait for the next attempt."""
    (manifest,) = objects_of(OURS, Shape(1, shape.nodes))
    watch = PodWatch(bench.access, shape.nodes)
    bench.client.json("POST", COLLECTIONS[OURS], json.loads(manifest))
    watch.follow()
    bench.wait_for_status(1)

    lost = sorted(watch.running)[-1]
    seconds = _follow(bench.access, lost, shape.nodes)
    bare = _patch_all(bench, [name for name in watch.running if name != lost])
    bench.clear()
    return Recovery(seconds, bare)


def _patch_all(bench: Bench, pods: Sequence[str]) -> float:
    """Patch the fields of a recovery in each pod, and return the seconds of all patches."""
    pod = bench.client.json("GET", f"{PODS}/{pods[0]}")["metadata"]
    keys = (names.ANNOTATION_ASSIGNMENT, names.ANNOTATION_READY_BEFORE)
    annotations = {key: f"{pod['annotations'].get(key, '')} " for key in keys}
    change = {"metadata": {"labels": {names.LABEL_ATTEMPT: "2"}, "annotations": annotations}}
    body = json.dumps(change).encode()
    writes = [Write("PATCH", f"{PODS}/{name}", body, MERGE) for name in pods]
    began = bench.creator.submit(send_all, bench.access, writes, CONNECTIONS).result()
    return time.monotonic() - began


def _follow(access: Access, lost: str, nodes: int) -> float:
    """Delete a pod, and watch until all pods of the gang belong to the next attempt."""
    client = Client(access)
    newest = client.json("GET", f"{PODS}?limit=1")["metadata"]["resourceVersion"]
    stream = client.send("GET", f"{PODS}?watch=1&resourceVersion={newest}")
    began = time.monotonic()
    Client(access).json("DELETE", f"{PODS}/{lost}")
    ready: set[str] = set()
    while len(ready) < nodes:
        line = stream.readline()
        now = time.monotonic()
        if not line or now - began > LIMIT:
            raise RuntimeError(f"{len(ready)} of {nodes} pods have the next attempt")
        pod = json.loads(line)["object"]
        if _belongs_to_next(pod):
            ready.add(pod["metadata"]["name"])
    return now - began


def _belongs_to_next(pod: Object) -> bool:
    metadata = pod["metadata"]
    assignment = json.loads(metadata.get("annotations", {}).get(names.ANNOTATION_ASSIGNMENT, "{}"))
    in_attempt = metadata.get("labels", {}).get(names.LABEL_ATTEMPT) == NEXT
    return in_attempt and assignment.get("attempt") == int(NEXT) and bool(assignment["start"])
