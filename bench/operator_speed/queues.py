"""Measure jobs that go through a queue of Kueue, beside Indexed Jobs through the same queue.

    python -m bench.operator_speed.queues                          # three runs of 1000x2
    python -m bench.operator_speed.queues --runs 1 --shape 50x2    # a short try

Run it from the root of the repository. It uses the cluster of operator_speed. INSTALL_KUEUE names a
program to install Kueue. The program gets the name of the kind cluster as its argument. Kueue's
configuration must name DDPJobs, see docs/users/queues.md. The queue has room for all jobs, so only
Kueue and the creator of the pods limit the rate.
"""

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import yaml

from tests.cluster.commands import ROOT, CommandFailed, Unavailable, run, wait_until

from .cases import INDEXED, NAMESPACE, OURS, Shape
from .client import Client
from .cluster import NAME, Cluster
from .measure import Bench, Sample
from .processes import PROGRAMS, CpuClock, OperatorProcess

API = "kueue.x-k8s.io/v1beta2"
QUEUE = "team"
QUOTAS = ["cpu", "memory"]
CASES = (OURS, INDEXED)
INSTALL = os.environ.get("INSTALL_KUEUE", str(ROOT.parent / "shared" / "lab" / "kueue"))


def objects_of_queue() -> list[dict[str, Any]]:
    """Return a queue with room for everything."""
    resources = [{"name": name, "nominalQuota": "1000000Gi"} for name in QUOTAS]
    group = {"coveredResources": QUOTAS, "flavors": [{"name": "any", "resources": resources}]}
    queue = {"namespaceSelector": {}, "resourceGroups": [group]}
    local = {"clusterQueue": "all"}
    return [
        {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": queue},
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": QUEUE, "namespace": NAMESPACE},
            "spec": local,
        },
    ]


def has_queue(cluster: Cluster) -> bool:
    """Create the queue, and return True if Kueue accepts it."""
    text = yaml.safe_dump_all(objects_of_queue(), sort_keys=False)
    try:
        cluster.kubectl("apply", "--filename=-", stdin=text)
    except CommandFailed:
        return False
    return True


def measure(cluster: Cluster, chosen: argparse.Namespace) -> list[Sample]:
    """Return a sample for each case of each run."""
    cluster.make_namespace(NAMESPACE)
    run(INSTALL, NAME, KUBECONFIG=str(cluster.kubeconfig))
    # The webhooks of Kueue answer a moment after its pod is ready.
    wait_until("Kueue accepts a queue", lambda: has_queue(cluster), 60)
    client = Client(cluster.access())
    operator = OperatorProcess(client, *cluster.operator_process())
    in_node = {**cluster.process_ids(PROGRAMS), "operator": operator.pid}
    clock = CpuClock(in_node, {"kwok": cluster.kwok_pid})
    samples = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as creator:
        creator.submit(os.getpid).result()
        labels = {"kueue.x-k8s.io/queue-name": QUEUE}
        bench = Bench(cluster.access(), client, operator, clock, creator, labels)
        bench.clear()
        for case in CASES:
            bench.measure(case, Shape(5, 2), 0)
        for number in range(1, chosen.runs + 1):
            for case in CASES if number % 2 else reversed(CASES):
                samples.append(bench.measure(case, chosen.shape, number))
                say(samples[-1], chosen.shape)
    return samples


def say(sample: Sample, shape: Shape) -> None:
    rate = shape.jobs / sample.running
    calls = sample.writes() / shape.jobs
    print(
        f"run {sample.run}  {sample.case:12} all Running {sample.running:6.1f} s, "
        f"{rate:5.1f} jobs a second, writes per job {calls:5.1f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(1000, 2), help="JOBSxNODES")
    parser.add_argument("--fake-nodes", type=int, default=200)
    parser.add_argument("--keep", action="store_true", help="keep the cluster for the next call")
    chosen = parser.parse_args()
    cluster = Cluster(chosen.fake_nodes)
    began = time.monotonic()
    try:
        cluster.up(None)
        samples = measure(cluster, chosen)
    except (Unavailable, CommandFailed, RuntimeError, AssertionError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cluster.down(chosen.keep)
    for case in CASES:
        rates = [chosen.shape.jobs / one.running for one in samples if one.case == case]
        spread = f"{min(rates):.1f}-{max(rates):.1f}"
        print(f"{case:12} {statistics.median(rates):5.1f} jobs a second ({spread})")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
