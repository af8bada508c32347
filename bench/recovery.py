"""Seconds until a gang on kind trains: from apply, and again after the loss of a rank or of a pod.

    python -m bench.recovery --trials 10

The job has two pods on two nodes, and trains with gloo. Its script prints the time of every step. A
recovery is the time from the kill until every newly started rank has made a step. The variants take
turns, for a comparison within one run. One of them is torchrun by hand, in a StatefulSet. The
script needs Docker and kind. It uses the tests' cluster, and deletes the cluster at the end unless
KEEP_CLUSTER=1 is set. The table also has the published medians.
"""

import argparse
import math
import os
import re
import signal
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.cluster.builders import script_job
from tests.cluster.cluster import PLAIN, Cluster
from tests.cluster.commands import ROOT, CommandFailed, Object
from tests.cluster.namespace import Namespace

NAME = "steps"

# The longest wait for a recovery, in seconds. A longer one counts as infinite.
LIMIT = 90

SCRIPT = """
import json, os, time
begun = time.time()
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(20000):
    model(torch.ones(4, 8)).sum().backward()
    entry = {"rank": dist.get_rank(), "pid": os.getpid(), "begun": begun, "time": time.time()}
    print(json.dumps(entry), flush=True)
    time.sleep(0.1)
"""


def ddpjob(**spec: Any) -> list[Object]:
    # Restart at once: a back-off would be part of the measured time.
    policy = {"maxRestarts": 100, "windowSeconds": 1}
    spec = {"recovery": "InPlace", **spec}
    return list(script_job(NAME, SCRIPT, failurePolicy=policy, **spec))


def stateful_set() -> list[Object]:
    """Return a gang kept running by torchrun alone: every pod and every worker is restarted."""
    scripts, job = script_job(NAME, SCRIPT)
    labels = {"app": NAME}
    flags = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=100",
        "--rdzv-backend=c10d",
        "--rdzv-id=steps",
        f"--rdzv-endpoint={NAME}-0.{NAME}:29400",
    ]
    container = {
        "name": "trainer",
        "image": PLAIN,
        "command": ["torchrun", *flags, *job["spec"]["args"]],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumeMounts": job["spec"]["volumeMounts"],
    }
    spread = {
        **job["spec"]["topologySpreadConstraints"][0],
        "labelSelector": {"matchLabels": labels},
    }
    spread.pop("matchLabelKeys")
    pod = {
        "containers": [container],
        "volumes": job["spec"]["volumes"],
        "topologySpreadConstraints": [spread],
        "terminationGracePeriodSeconds": 45,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": NAME},
        "spec": {
            "replicas": 2,
            "serviceName": NAME,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [scripts, service, stateful_set]


VARIANTS: dict[str, Callable[[], list[Object]]] = {
    "in place, fast start": ddpjob,
    "in place": lambda: ddpjob(fastStart=False),
    "Recreate": lambda: ddpjob(recovery="Recreate", fastStart=False),
    "torchrun in a StatefulSet": stateful_set,
}


def kill_rank(namespace: Namespace) -> None:
    """Kill the training process of pod 1. Its output contains its process id."""
    pod = pod_of(namespace, 1)
    process = entries_of(namespace, pod)[-1]["pid"]
    namespace.python(pod, f"import os; os.kill({process}, {signal.SIGKILL:d})")


def delete(namespace: Namespace, index: int) -> None:
    namespace.kubectl("delete", "pod", pod_of(namespace, index), "--wait=false")


# What is lost, and how.
LOSSES: dict[str, Callable[[Namespace], None]] = {
    "a rank": kill_rank,
    "a pod": lambda namespace: delete(namespace, 1),
    "the pod of node 0": lambda namespace: delete(namespace, 0),
}


def pods(namespace: Namespace) -> list[str]:
    """Return the unfinished pods, without those being deleted."""
    found = namespace.cluster.read.pods(namespace.name, "")
    ended = ("Succeeded", "Failed")
    return [
        pod["metadata"]["name"]
        for pod in found
        if pod["status"]["phase"] not in ended and "deletionTimestamp" not in pod["metadata"]
    ]


def pod_of(namespace: Namespace, index: int) -> str:
    (pod,) = (name for name in pods(namespace) if name.endswith(f"-{index}"))
    return pod


def first_steps(namespace: Namespace, since: float) -> dict[int, float]:
    """Return the time of each rank's first step, in processes begun after `since`."""
    firsts: dict[int, float] = {}
    for pod in pods(namespace):
        for entry in entries_of(namespace, pod):
            if entry["begun"] > since:
                firsts.setdefault(entry["rank"], entry["time"])
    return firsts


def entries_of(namespace: Namespace, pod: str) -> list[Object]:
    try:
        return namespace.json_lines(pod)
    except (CommandFailed, ValueError):
        # The pod has not started, or a line is not whole yet.
        return []


def wait_for_steps(namespace: Namespace, since: float) -> float:
    """Return the seconds from `since` until both newly started ranks have made a step."""

    def look() -> float | None:
        steps = first_steps(namespace, since)
        return max(steps.values()) if len(steps) == 2 else None

    return namespace.wait("both ranks train", look, LIMIT) - since


def measure(cluster: Cluster, variant: str) -> dict[str, float]:
    """Run one job through all losses. Return the seconds of the start and of each recovery."""
    namespace = Namespace(cluster, f"recovery-{uuid.uuid4().hex[:6]}")
    found: dict[str, float] = {}
    try:
        started = time.time()
        namespace.apply(*VARIANTS[variant]())
        found["apply"] = wait_for_steps(namespace, started)
        for what, lose in LOSSES.items():
            wait_until_settled(namespace)
            killed = time.time()
            lose(namespace)
            found[what] = wait_for_steps(namespace, killed)
        return found
    except AssertionError:
        # torchrun alone may need minutes, or never continue.
        return dict.fromkeys(("apply", *LOSSES), math.inf) | found
    finally:
        namespace.delete()


def wait_until_settled(namespace: Namespace) -> None:
    """Wait until every pod is ready, and the operator has seen it."""

    def look() -> bool:
        found = namespace.cluster.read.pods(namespace.name, "")
        conditions = [c for pod in found for c in pod["status"].get("conditions", [])]
        ready = sum(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        phase: str = namespace.status(NAME).get("phase", "Running")
        return ready == 2 and phase == "Running"

    namespace.wait("both pods are ready", lambda: look() or None)


def as_text(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else f"> {LIMIT}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    options = parser.parse_args()
    cluster = Cluster()
    cluster.up()
    variants = options.variant or list(VARIANTS)
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    try:
        for trial in range(options.trials):
            for variant in variants:
                results[variant].append(measure(cluster, variant))
                numbers = {what: round(value, 1) for what, value in results[variant][-1].items()}
                load = os.getloadavg()[0]
                print(
                    f"{trial + 1}/{options.trials} {variant}: {numbers}, load {load:.1f}",
                    flush=True,
                )
    finally:
        if os.environ.get("KEEP_CLUSTER") != "1":
            cluster.delete()
    print_table(results)


def published() -> dict[str, list[str]]:
    """Return the medians of each variant in the table of docs/developers/evidence.md."""
    text = (ROOT / "docs/developers/evidence.md").read_text()
    _, _, section = text.partition("## Recovery\n")
    rows = re.findall(r"^\|[^|]+((?:\| [\d.]+ ){4})\|$", section, re.MULTILINE)
    return {variant: row.split("|")[1:] for variant, row in zip(VARIANTS, rows, strict=False)}


def print_table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Print the median, the longest and the published time of each variant."""
    print("\n| seconds: median (longest; published) | " + " | ".join(["apply", *LOSSES]) + " |")
    print("|---|" + "---|" * (len(LOSSES) + 1))
    before = published()
    for variant, found in results.items():
        cells = []
        for what, last in zip(("apply", *LOSSES), before[variant], strict=True):
            times = [each[what] for each in found]
            median, longest = as_text(statistics.median(times)), as_text(max(times))
            cells.append(f"{median} ({longest}; {last.strip()})")
        print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
