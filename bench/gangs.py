"""What a gang costs: the time until all pods of some jobs have nodes, with PodGroups and without.

    python -m bench.gangs                          # two minutes
    python -m bench.gangs --cases 1x200 --runs 5
    python -m bench.gangs --qps 500                # a scheduler with a higher rate limit

A case is `JOBSxNODES`. The API server and the scheduler are those of Kubernetes, as in
tests/apiserver, with 60 nodes without kubelets. Each run has every case in both ways, one after the
other. Prints the median and the range of the seconds from the first request of the user until the
last pod has a node.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from envtest import GANG_FLAGS, GANG_GATES, ApiServer, temporary_server
from play import Cluster, Operator, end

CASES = ("1x200", "50x4")
WAYS = {"with PodGroups": "Auto", "without": "Off"}
NODES = 60
ROOM = {"cpu": "64", "memory": "256Gi", "pods": "250"}

# Seconds between two looks at the pods.
LOOK = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="JOBSxNODES")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--qps", type=int, help="requests a second of the scheduler (default: 50)")
    options = parser.parse_args()
    limits = [f"--kube-api-qps={options.qps}", f"--kube-api-burst={options.qps}"]
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with temporary_server(*GANG_FLAGS) as server:
        server.start_scheduler(GANG_GATES, *(limits if options.qps else []))
        for number in range(NODES):
            name = f"node-{number}"
            server.add_node(name, {"kubernetes.io/hostname": name}, ROOM)
        for _ in range(options.runs):
            for case in options.cases:
                for way, gang in WAYS.items():
                    times[case, way].append(measure(server, case, gang))
    for (case, way), seconds in times.items():
        spread = f"{min(seconds):.1f}-{max(seconds):.1f}"
        print(f"{case:8} {way:16} {statistics.median(seconds):5.1f} s  ({spread})")


def measure(server: ApiServer, case: str, gang: str) -> float:
    """Return the seconds until all pods of a case have nodes."""
    jobs, _, nodes = case.partition("x")
    cluster = Cluster(server, server.create_namespace("bench"))
    place = (f"--lease-namespace={cluster.namespace}", f"--namespace={cluster.namespace}")
    with tempfile.TemporaryDirectory() as folder:
        operator = Operator(Path(folder), server.kubeconfig, *place)
        try:
            cluster.wait(cluster.holder)
            begin = time.monotonic()
            for number in range(int(jobs)):
                cluster.create_job(f"job-{number}", int(nodes), scheduling={"gang": gang})
            wanted = int(jobs) * int(nodes)
            while count_bound(cluster) < wanted:
                time.sleep(LOOK)
            return time.monotonic() - begin
        finally:
            server.delete_jobs(cluster.namespace)
            end(operator)
            pods = f"/api/v1/namespaces/{cluster.namespace}/pods"
            server.request("DELETE", pods, {"gracePeriodSeconds": 0})


def count_bound(cluster: Cluster) -> int:
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    pods = cluster.apiserver.request("GET", path).body["items"]
    return sum("nodeName" in pod["spec"] for pod in pods)


if __name__ == "__main__":
    main()
