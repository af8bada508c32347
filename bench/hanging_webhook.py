"""Delay of healthy jobs while an admission webhook hangs for others, on a real API server.

    python -m bench.hanging_webhook                                    # a quarter of an hour
    python -m bench.hanging_webhook --cases creates:20x20 --seconds 10

A case is `KIND:NAMESPACESxJOBS`: requests of one kind (creates of pods, statuses, deletions of
pods) hang for so many jobs in each of so many namespaces, from the same moment on. Meanwhile a
healthy job of two nodes is created every 0.7 s in a namespace exempt from the webhook. It is
suspended as soon as its pods exist. The API server is as in tests/apiserver, without kubelets. Each
case also runs without the webhook: so many jobs at the same moment delay each other on any machine.

Prints the seconds from the user's request until the pods of a healthy job exist (start), and until
they are gone (stop): the median and the longest, without the webhook and with it.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envtest import MERGE, ApiServer, temporary_server
from play import Operator, end

CASES = (
    "creates:1x200",
    "creates:20x20",
    "creates:200x1",
    "statuses:3x100",
    "statuses:10x30",
    "statuses:200x1",
    "deletions:5x20",
    "deletions:200x1",
)

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
RULES = {
    "creates": {"apiGroups": [""], "resources": ["pods"], "operations": ["CREATE"]},
    "statuses": {
        "apiGroups": ["ddpjob.dev"],
        "resources": ["ddpjobs/status"],
        "operations": ["UPDATE"],
    },
    "deletions": {"apiGroups": [""], "resources": ["pods"], "operations": ["DELETE"]},
}
LABEL = {"webhook": "hangs"}

# Seconds between two healthy jobs, and between two looks at their pods.
INTERVAL = 0.7
LOOK = 0.05

# The longest counted time of a healthy job's start or stop, in seconds.
TOO_LONG = 90.0


@dataclass
class Case:
    """A kind of request that hangs, in so many namespaces, for so many jobs in each."""

    kind: str
    namespaces: int
    jobs: int
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> "Case":
        kind, _, size = text.partition(":")
        namespaces, _, jobs = size.partition("x")
        if kind not in RULES or not (namespaces.isdecimal() and jobs.isdecimal()):
            raise argparse.ArgumentTypeError(
                f"expected KIND:NAMESPACESxJOBS with a kind of {', '.join(RULES)}, got {text!r}"
            )
        return cls(kind, int(namespaces), int(jobs))

    def __str__(self) -> str:
        return f"{self.kind} {self.namespaces} x {self.jobs}"

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}-{number}" for number in range(self.namespaces)]


@dataclass
class Healthy:
    """Creates healthy jobs, and measures how long they take to start and to stop."""

    server: ApiServer
    namespace: str
    started: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)
    created: int = 0

    def run(self, seconds: float) -> None:
        """Create a job every INTERVAL, and return when all have stopped."""
        jobs = []
        begin = time.monotonic()
        with ThreadPoolExecutor(100) as pool:
            for number in range(int(seconds / INTERVAL)):
                time.sleep(max(0.0, begin + number * INTERVAL - time.monotonic()))
                # No garbage collector runs, so the Service of an earlier job keeps its name.
                jobs.append(pool.submit(self._measure, f"job-{self.created}"))
                self.created += 1
        for job in jobs:
            job.result()

    def _measure(self, name: str) -> None:
        """Create a job, wait for its pods, suspend it, and wait until they are gone."""
        self.started.append(
            self._wait_for(name, 2, lambda: create_job(self.server, self.namespace, name))
        )
        path = f"{jobs_path(self.namespace)}/{name}"
        body = {"spec": {"suspend": True}}
        self.stopped.append(
            self._wait_for(name, 0, lambda: send(self.server, "PATCH", path, body, MERGE))
        )
        send(self.server, "DELETE", path)

    def _wait_for(self, name: str, pods: int, act: Callable[[], object]) -> float:
        begin = time.monotonic()
        act()
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=ddpjob.dev/job={name}"
        while len(send(self.server, "GET", path)["items"]) != pods:
            if time.monotonic() > begin + TOO_LONG:
                return TOO_LONG
            time.sleep(LOOK)
        return time.monotonic() - begin


def send(server: ApiServer, *request: Any) -> dict[str, Any]:
    answer = server.request(*request)
    assert answer.code in (200, 201), answer.body
    return answer.body


def jobs_path(namespace: str) -> str:
    return f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs"


def create_job(server: ApiServer, namespace: str, name: str) -> None:
    body = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"nodes": 2, "image": "i", "args": ["train.py"]},
    }
    send(server, "POST", jobs_path(namespace), body)


@contextmanager
def silent_server() -> Iterator[int]:
    """Yield the port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]


@contextmanager
def webhook_hangs(server: ApiServer, case: Case) -> Iterator[None]:
    """Let requests of the case's kind hang in the namespaces with LABEL."""
    with silent_server() as port:
        rule = {**RULES[case.kind], "apiVersions": ["*"], "scope": "Namespaced"}
        webhook = {
            "name": "hangs.ddpjob.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/"},
            "rules": [rule],
            "namespaceSelector": {"matchLabels": LABEL},
            "timeoutSeconds": 30,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        metadata = {"name": "bench"}
        send(server, "POST", WEBHOOKS, {"metadata": metadata, "webhooks": [webhook]})
        # The API server needs about a second until it calls a new webhook.
        time.sleep(3)
        try:
            yield
        finally:
            send(server, "DELETE", f"{WEBHOOKS}/bench")


def create_namespace(server: ApiServer, name: str, labels: dict[str, str]) -> None:
    send(server, "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})


def measure(server: ApiServer, folder: Path, case: Case, *, hangs: bool, seconds: float) -> Healthy:
    """Run one case with an operator of its own, with or without the webhook."""
    healthy = Healthy(server, f"{case.prefix}-healthy")
    create_namespace(server, healthy.namespace, {})
    bad = [(name, f"bad-{number}") for name in case.names for number in range(case.jobs)]
    act = suspend_job if case.kind == "deletions" else create_job
    operator = Operator(folder, server.kubeconfig, "--lease-namespace=default")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: create_namespace(server, name, LABEL), case.names))
        try:
            # The first jobs wait until the operator leads.
            healthy.run(2 * INTERVAL)
            warm = len(healthy.started)
            if case.kind == "deletions":
                list(pool.map(lambda job: create_job(server, *job), bad))
                wait_for_pods(server, case)
            with webhook_hangs(server, case) if hangs else nullcontext():
                acting = [pool.submit(act, server, *job) for job in bad]
                healthy.run(seconds)
                for one in acting:
                    one.result()
        finally:
            end(operator)
        list(pool.map(server.delete_jobs, [*case.names, healthy.namespace]))
    del healthy.started[:warm], healthy.stopped[:warm]
    return healthy


def suspend_job(server: ApiServer, namespace: str, name: str) -> None:
    send(server, "PATCH", f"{jobs_path(namespace)}/{name}", {"spec": {"suspend": True}}, MERGE)


def wait_for_pods(server: ApiServer, case: Case) -> None:
    """Wait until all bad jobs have their pods."""
    deadline = time.monotonic() + TOO_LONG
    for name in case.names:
        while len(send(server, "GET", f"/api/v1/namespaces/{name}/pods")["items"]) < 2 * case.jobs:
            assert time.monotonic() < deadline, "the jobs have no pods"
            time.sleep(LOOK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        type=Case.parse,
        default=[Case.parse(text) for text in CASES],
        metavar="KIND:NAMESPACESxJOBS",
        help=f"which cases, by default {' '.join(CASES)}",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each case")
    options = parser.parse_args()
    print("| | start | start, webhook hangs | stop | stop, webhook hangs |\n|---|---|---|---|---|")
    with temporary_server() as server:
        for number, case in enumerate(options.cases):
            found = []
            for hangs in (False, True):
                case.prefix = f"case-{number}-{int(hangs)}"
                found.append(
                    measure(server, server.folder, case, hangs=hangs, seconds=options.seconds)
                )
            times = [one.started for one in found] + [one.stopped for one in found]
            cells = [f"{statistics.median(each):.2f}, {max(each):.2f}" for each in times]
            print(f"| {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
