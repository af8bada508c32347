"""What many jobs cost the operator at rest, end to end: a real API server, kopf's watches, LISTs.

    python -m bench.many_jobs
    python -m bench.many_jobs --jobs 100 --pods 0 --megabytes 1

Half of the jobs run and half are complete. Each has `--pods` pods, with statuses as from a kubelet.
With `--pods 0` the jobs have no status either. With `--megabytes` each job has environment
variables of this size in all, and all jobs are in one namespace. The API server is as in
tests/apiserver: etcd and kube-apiserver on this machine.

Prints the time until the operator is ready, and its resident memory: the highest until then, and
after the LISTs of the next minutes the current and the highest value. The last minutes of these
give the CPU time of the operator and the API server, the operator's reads, and the size of their
answers. Then two new jobs are created, and it prints the time until their pods exist, and the
writes of the agent's ConfigMap.
1 MB is 10^6 bytes.
"""

import argparse
import multiprocessing
import os
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envtest import MERGE, ApiServer, temporary_server
from play import Cluster, Operator, end

from bench.metric_text import samples
from ddpjob.core.api.job import Job
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import observe
from ddpjob.core.observe.pods import read_pod
from ddpjob.core.render import objects
from ddpjob.core.render.pod_context import Settings

NAMESPACES = 20
THREADS = 8

# Seconds after the operator is ready until it is at rest: the first LISTs are over.
SETTLED = 60

# Seconds of observation at rest: two of the minutes with a LIST of one object.
OBSERVED = 120

REQUESTS = "apiserver_request_total"
ANSWERS = "apiserver_response_sizes_sum"
CPU = "process_cpu_seconds_total"

# What an operator reads. The API server itself reads other kinds.
READ = {"ddpjobs", "pods", "nodes"}

# The state of a pod's container.
CONTAINER = {"name": "trainer", "image": "i", "imageID": "", "restartCount": 0, "ready": True}
BEGUN = {**CONTAINER, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
OVER = {
    **CONTAINER,
    "state": {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:10:00Z"}},
}

# Statuses of pods.
RUNNING = {"phase": "Running", "containerStatuses": [BEGUN]}
ENDED = {"phase": "Succeeded", "containerStatuses": [OVER]}


@dataclass(frozen=True)
class Filler:
    """Creates jobs with pods and statuses, as written by an operator and kubelets.

    - `pods`: of each job. `megabytes`: the size of its spec.
    - `statuses`: of the pods, one status for each job in turn.
    - `namespaces`: their number, from bench-0 on.
    """

    server: ApiServer
    pods: int
    megabytes: float = 0.0
    statuses: Sequence[dict[str, Any]] = (ENDED, RUNNING)
    namespaces: int = NAMESPACES

    def fill(self, jobs: int) -> None:
        """Create the namespaces and so many jobs."""
        for number in range(self.namespaces):
            body = {"metadata": {"name": f"bench-{number}"}}
            self._send("POST", "/api/v1/namespaces", body)
        with ThreadPoolExecutor(THREADS) as pool:
            for done, _ in enumerate(pool.map(self.create, range(jobs)), 1):
                if done % 1000 == 0:
                    print(f"{done} jobs", file=sys.stderr)

    def create(self, number: int) -> None:
        namespace = f"bench-{number % self.namespaces}"
        spec: dict[str, Any] = {"nodes": max(1, self.pods), "image": "i", "args": ["train.py"]}
        # The CRD allows 32,768 characters per value.
        values = range(int(self.megabytes * 2**20 / 32_000))
        spec["env"] = [{"name": f"LARGE_{n}", "value": "x" * 32_000} for n in values]
        body = {
            "apiVersion": "ddpjob.dev/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": f"job-{number}"},
            "spec": spec,
        }
        path = f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs"
        made = self._send("POST", path, body)
        if self.pods:
            self._run(made, path, self.statuses[number % len(self.statuses)])

    def _run(self, made: dict[str, Any], path: str, reported: dict[str, Any]) -> None:
        """Create the job's pods, and write the statuses of the operator and the kubelets."""
        now = datetime.now(UTC)
        job = Job.from_dict(made)
        begun = Job.from_dict({**made, "status": decide(observe(job, ()), now).status.to_dict()})
        seen = []
        for body in objects.pods(begun, range(self.pods), Settings()):
            pod = self._create_pod(job.namespace, body, reported)
            seen.append(read_pod(pod))
        plan = decide(observe(begun, [pod for pod in seen if pod]), now)
        status = {"metadata": made["metadata"], "status": plan.status.to_dict()}
        header = {"apiVersion": made["apiVersion"], "kind": made["kind"]}
        self._send("PUT", f"{path}/{job.name}/status", {**header, **status})

    def _create_pod(
        self, namespace: str, body: dict[str, Any], reported: dict[str, Any]
    ) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        if "containerStatuses" in reported:
            body["spec"]["nodeName"] = "node"
        self._send("POST", path, body)
        path += f"/{body['metadata']['name']}/status"
        return self._send("PATCH", path, {"status": reported}, MERGE)

    def _send(self, *request: Any) -> dict[str, Any]:
        answer = self.server.request(*request)
        assert answer.code in (200, 201), answer.body
        return answer.body


class NewOperator(Operator):
    """An operator in a new Python. A fork would share memory with its parent."""

    context = multiprocessing.get_context("spawn")

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid


def memory_of(process: int) -> tuple[float, float]:
    """Return (resident memory now, its maximum so far) of a process in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


@dataclass(frozen=True)
class Costs:
    """Costs so far of an operator and of its API server.

    - `operator`, `server`: seconds of CPU time.
    - `reads`, `answered`: GETs and LISTs of what an operator reads, and the bytes of their answers.
    - `config_maps`: writes of ConfigMaps.
    """

    operator: float
    server: float
    reads: float
    answered: float
    config_maps: float

    def since(self, earlier: "Costs") -> "Costs":
        return Costs(
            *(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True))
        )


def costs(server: ApiServer, operator: NewOperator) -> Costs:
    """Read the costs so far, from /proc and the metrics of the API server."""
    totals: defaultdict[str, float] = defaultdict(float)
    text = server.request("GET", "/metrics").body["message"]
    for name, label, value in samples(text, REQUESTS, ANSWERS, CPU):
        verb, resource = label.get("verb"), label.get("resource")
        is_write = verb in ("POST", "PUT", "PATCH", "APPLY")
        if name == CPU:
            totals["server"] += value
        elif verb in ("GET", "LIST") and resource in READ:
            totals["reads" if name == REQUESTS else "answered"] += value
        elif is_write and resource == "configmaps" and name == REQUESTS:
            totals["config_maps"] += value
    own = cpu_seconds(operator.pid)
    return Costs(own, totals["server"], totals["reads"], totals["answered"], totals["config_maps"])


def cpu_seconds(process: int) -> float:
    """Return the CPU time so far of a process and of its ended children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:.0f} s"
        time.sleep(0.02)


def is_ready(operator: Operator) -> bool:
    assert not operator.is_over, operator.log
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/readyz", timeout=1):
            return True
    except OSError:
        return False


def measure(server: ApiServer, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table."""
    started = time.monotonic()
    operator = NewOperator(folder, server.kubeconfig, "--lease-namespace=default")
    try:
        wait_for(lambda: is_ready(operator), 300)
        yield "ready after", f"{time.monotonic() - started:.1f} s"
        yield "highest until then", f"{memory_of(operator.pid)[1]:.0f} MB"
        time.sleep(SETTLED)
        before = costs(server, operator)
        time.sleep(OBSERVED)
        used = costs(server, operator).since(before)
        now, highest = memory_of(operator.pid)
        yield f"after {SETTLED + OBSERVED} s", f"{now:.0f} MB"
        yield "highest", f"{highest:.0f} MB"
        yield from at_rest(used, OBSERVED / 60)
        yield from of_a_new_job(server, operator)
    finally:
        end(operator)


def at_rest(used: Costs, minutes: float) -> Iterator[tuple[str, str]]:
    yield "CPU time of a minute, operator", f"{used.operator / minutes:.2f} s"
    yield "CPU time of a minute, API server", f"{used.server / minutes:.2f} s"
    yield "reads of a minute", f"{used.reads / minutes:.0f}"
    yield "their answers", f"{used.answered / minutes / 1e6:.3f} MB"


def of_a_new_job(server: ApiServer, operator: NewOperator) -> Iterator[tuple[str, str]]:
    """Start a job beside the others. The first one of a namespace makes the agent's ConfigMap."""
    cluster = Cluster(server, server.create_namespace("new"))
    for which in ("first", "next"):
        before = costs(server, operator)
        began = time.monotonic()
        cluster.create_job(which)
        wait_for(lambda: len(cluster.pods(which)) == 2, 60)  # noqa: B023
        seconds = time.monotonic() - began
        used = costs(server, operator).since(before)
        yield f"{which} job of a namespace, pods after", f"{seconds:.2f} s"
        yield "    writes of ConfigMaps", f"{used.config_maps:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000, help="number of jobs")
    parser.add_argument("--pods", type=int, default=2, help="pods of each job")
    parser.add_argument("--megabytes", type=float, default=0.0, help="size of each job's spec")
    options = parser.parse_args()
    with temporary_server() as server:
        namespaces = 1 if options.megabytes else NAMESPACES
        filler = Filler(server, options.pods, options.megabytes, namespaces=namespaces)
        filler.fill(options.jobs)
        print(f"{options.jobs} jobs, {options.jobs * options.pods} pods")
        for name, value in measure(server, server.folder):
            print(f"{name:35} {value}")


if __name__ == "__main__":
    main()
