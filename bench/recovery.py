"""Seconds until a gang on kind trains: from apply, and again after the loss of a rank or of a pod.

    python -m bench.recovery --trials 10

The job has two pods on two nodes, and trains with gloo. Its script prints the time of every step. A
recovery is the time from the kill to the first step that every rank makes in the next attempt. Both
values of `recovery` run in turns, so that they are compared in one run. It needs Docker and kind;
the cluster is that of the tests, and is deleted at the end unless KEEP_CLUSTER=1 is set.
"""

import argparse
import os
import signal
import statistics
import time
import uuid
from collections.abc import Callable

from tests.cluster.builders import script_job
from tests.cluster.cluster import Cluster
from tests.cluster.commands import CommandFailed, Object
from tests.cluster.namespace import Namespace
from tests.cluster.training import signal_workers

JOB = "steps"
MODES = ("InPlace", "Recreate")

SCRIPT = """
import json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

attempt = int(os.environ["DDP_ATTEMPT"])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(20000):
    model(torch.ones(4, 8)).sum().backward()
    entry = {"rank": dist.get_rank(), "attempt": attempt, "time": time.time()}
    print(json.dumps(entry), flush=True)
    time.sleep(0.1)
"""


def first_steps(namespace: Namespace, attempt: int) -> list[float]:
    """Return the time of the first step of each rank in an attempt, as far as there are any."""
    firsts: dict[int, float] = {}
    for pod in namespace.pods(JOB):
        for entry in entries_of(namespace, pod):
            if entry["attempt"] == attempt:
                firsts.setdefault(entry["rank"], entry["time"])
    return list(firsts.values())


def entries_of(namespace: Namespace, pod: str) -> list[Object]:
    try:
        return namespace.json_lines(pod)
    except (CommandFailed, ValueError):
        # The pod has not started, or a line is not whole yet.
        return []


def wait_for_steps(namespace: Namespace, attempt: int) -> float:
    """Return the time at which the last rank of an attempt has made its first step."""

    def look() -> float | None:
        steps = first_steps(namespace, attempt)
        return max(steps) if len(steps) == 2 else None

    return namespace.wait(f"both ranks train in attempt {attempt}", look)


def pod_of(namespace: Namespace, index: int) -> str:
    """Return the pod of a node that runs."""
    running = namespace.unfinished(JOB)
    (pod,) = (name for name in running if name.endswith(f"-{index}"))
    return pod


def delete(namespace: Namespace, index: int) -> None:
    namespace.kubectl("delete", "pod", pod_of(namespace, index), "--wait=false")


# What is lost, and how.
LOSSES: dict[str, Callable[[Namespace], None]] = {
    "a rank": lambda namespace: signal_workers(namespace, pod_of(namespace, 1), signal.SIGKILL),
    "a pod": lambda namespace: delete(namespace, 1),
    "the pod of node 0": lambda namespace: delete(namespace, 0),
}


def measure(cluster: Cluster, recovery: str) -> dict[str, float]:
    """Run one job through all losses. Return seconds by what was lost, and of the start."""
    namespace = Namespace(cluster, f"recovery-{uuid.uuid4().hex[:6]}")
    # A back-off would hide what is measured.
    policy = {"maxRestarts": 100, "windowSeconds": 1}
    try:
        started = time.time()
        namespace.apply(*script_job(JOB, SCRIPT, recovery=recovery, failurePolicy=policy))
        found = {"apply": wait_for_steps(namespace, 0) - started}
        for attempt, (what, lose) in enumerate(LOSSES.items(), start=1):
            namespace.wait_for_status(JOB, attempt=attempt - 1, phase="Running")
            killed = time.time()
            lose(namespace)
            found[what] = wait_for_steps(namespace, attempt) - killed
        return found
    finally:
        namespace.delete()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    trials = parser.parse_args().trials
    cluster = Cluster()
    cluster.up()
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    try:
        for trial in range(trials):
            for mode in MODES:
                results[mode].append(measure(cluster, mode))
                print(f"{trial + 1}/{trials} {mode}", results[mode][-1], flush=True)
    finally:
        if os.environ.get("KEEP_CLUSTER") != "1":
            cluster.delete()
    print("\n| seconds, median | " + " | ".join(["apply", *LOSSES]) + " |")
    print("|---|" + "---|" * (len(LOSSES) + 1))
    for mode, found in results.items():
        medians = [statistics.median(each[what] for each in found) for what in ("apply", *LOSSES)]
        print(f"| {mode} | " + " | ".join(f"{seconds:.1f}" for seconds in medians) + " |")


if __name__ == "__main__":
    main()
