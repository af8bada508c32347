"""Time until a healthy job has its pods, while thousands of jobs of one namespace are pending.

    python -m bench.pending_jobs
    python -m bench.pending_jobs --jobs 500 --trials 3

The pods of the pending jobs find no room in the cluster. Half of the trials run while a scheduler
repeats its verdict on these pods, PER_SECOND in a second: each is news of a job. The healthy job is
in another namespace. The API server is as in tests/apiserver: etcd and kube-apiserver on this
machine.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envtest import MERGE, ApiServer, temporary_server
from play import Cluster, end

from bench.many_jobs import Filler, NewOperator, is_ready, wait_for

PENDING = "bench-0"
NODES = 2

# Verdicts of the scheduler in a second.
PER_SECOND = 20


def no_room(message: str) -> dict[str, Any]:
    """Return the status of an unschedulable pod."""
    verdict = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {"phase": "Pending", "conditions": [{**verdict, "message": message}]}


@contextmanager
def busy_scheduler(server: ApiServer, jobs: int) -> Iterator[None]:
    """Repeat the scheduler's verdict on pods of the pending jobs, each time in other words."""
    stop = threading.Event()

    def repeat() -> None:
        number = 0
        while not stop.wait(1 / PER_SECOND):
            number += 1
            path = f"/api/v1/namespaces/{PENDING}/pods/job-{number % jobs}-0-1/status"
            message = f"0/{number} nodes are available: {number} Insufficient cpu."
            server.request("PATCH", path, {"status": no_room(message)}, MERGE)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def seconds_until_pods(cluster: Cluster, name: str) -> float:
    """Create a job, and return the seconds until its pods exist."""
    began = time.monotonic()
    cluster.create_job(name, NODES)
    wait_for(lambda: len(cluster.pods(name)) == NODES, 120)
    return time.monotonic() - began


def measure(server: ApiServer, folder: Path, options: argparse.Namespace) -> None:
    """Print the rows of the table."""
    healthy = Cluster(server, server.create_namespace("healthy"))
    operator = NewOperator(folder, server.kubeconfig, "--lease-namespace=default")
    try:
        wait_for(lambda: is_ready(operator), 600)
        for name in ("first", "second"):
            seconds_until_pods(healthy, name)
        quiet = [seconds_until_pods(healthy, f"q-{n}") for n in range(options.trials)]
        with busy_scheduler(server, options.jobs):
            busy = [seconds_until_pods(healthy, f"b-{n}") for n in range(options.trials)]
    finally:
        end(operator)
    for what, seconds in (("nothing else happens", quiet), ("the scheduler is busy", busy)):
        print(f"{what:24} median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5_000, help="number of pending jobs")
    parser.add_argument("--trials", type=int, default=10, help="healthy jobs in each case")
    options = parser.parse_args()
    with temporary_server() as server:
        no_node = no_room("0/9 nodes are available: 9 Insufficient cpu.")
        Filler(server, NODES, statuses=[no_node], namespaces=1).fill(options.jobs)
        print(f"{options.jobs} pending jobs with {NODES} pods each")
        measure(server, server.folder, options)


if __name__ == "__main__":
    main()
