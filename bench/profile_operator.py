"""Where the operator's CPU time goes while many small gangs come up: cProfile inside it, against a bare API server.

    .venv/bin/python bench/profile_operator.py                 # the functions that cost most
    .venv/bin/python bench/profile_operator.py --plain         # without the profiler: the honest CPU time per pod
    .venv/bin/python bench/profile_operator.py --out FILE      # for `python -m pstats FILE` and the like

Needs etcd and kube-apiserver as the tests in tests/apiserver do. A second process creates the jobs and plays scheduler
and kubelet, so that the operator sees every pod as on a cluster: added, bound to a node, running.
"""

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import queue
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from fake_cluster import ROOT, Access
from operator_speed import (
    COLLECTIONS,
    CONNECTIONS,
    NAMESPACE,
    OURS,
    PODS,
    Client,
    Shape,
    create_all,
    objects_of,
)

from ddpjob.controller.main import Options, operate, set_up_logging
from ddpjob.core import names

sys.path.append(str(ROOT / "tests" / "apiserver"))
from envtest import ADMIN_TOKEN, CRD, MISSING, NEEDED, ApiServer, find_binaries, free_ports

RUNNING = {
    "status": {
        "phase": "Running",
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [
            {"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "ContainersReady")
        ],
        "containerStatuses": [
            {
                "name": names.TRAINER,
                "image": "trainer",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }
        ],
    }
}


# --- the other process


def drive(access: Access, operator: int, port: int, shape: Shape) -> None:
    """Create the jobs once the operator (process id, HTTP port) leads, run their pods, then end it with SIGTERM."""
    try:
        _wait(
            lambda: "ddpjob_leader 1.0" in _get(port, "metrics") and _get(port, "readyz") == "ok\n"
        )
        threading.Thread(target=play_kubelet, args=(access,), daemon=True).start()
        cpu, began = _cpu(operator), time.monotonic()
        create_all(access, COLLECTIONS[OURS], objects_of(OURS, shape), CONNECTIONS)
        _wait(lambda: f'ddpjob_jobs{{phase="Running"}} {shape.jobs}.0' in _get(port, "metrics"))
        seconds, spent = time.monotonic() - began, _cpu(operator) - cpu
        looks = re.search(
            r"^ddpjob_reconcile_seconds_count (\S+)$", _get(port, "metrics"), re.MULTILINE
        )
        print(
            f"{shape} pods Running after {seconds:.1f} s; CPU of the operator {spent:.2f} s, "
            f"{spent / shape.pods * 1e3:.2f} ms a pod; looks at jobs {looks[1] if looks else 'not counted'}"
        )
    finally:
        os.kill(operator, signal.SIGTERM)


def play_kubelet(access: Access) -> None:
    """Bind every new pod to a node and set it Running, over several connections."""
    pods: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work() -> None:
        client = Client(access)
        while True:
            name = pods.get()
            target = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"name": "node-1"},
            }
            client.json("POST", f"{PODS}/{name}/binding", target)
            body = json.dumps(RUNNING).encode()
            client.send(
                "PATCH", f"{PODS}/{name}/status", body, "application/merge-patch+json"
            ).read()

    for _ in range(CONNECTIONS):
        threading.Thread(target=work, daemon=True).start()
    stream = Client(access).send("GET", f"{PODS}?watch=1")
    for line in iter(stream.readline, b""):
        event = json.loads(line)
        if event["type"] == "ADDED":
            pods.put(event["object"]["metadata"]["name"])


def _wait(look: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise RuntimeError("the jobs did not come up in time")
        time.sleep(0.5)


def _get(port: int, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def _cpu(pid: int) -> float:
    """Seconds of user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- this process


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=Shape.parse, default=Shape(100, 4), help="JOBSxNODES (default: 100x4)"
    )
    parser.add_argument(
        "--plain", action="store_true", help="no profiler, which itself doubles what is measured"
    )
    parser.add_argument("--lines", type=int, default=45, help="functions to print (default: 45)")
    parser.add_argument("--out", type=Path, help="write the profile there for other tools")
    chosen = parser.parse_args()
    binaries = find_binaries()
    if missing := [name for name in NEEDED if name not in binaries]:
        print(MISSING.format(", ".join(missing)), file=sys.stderr)
        return 1
    set_up_logging("plain", "warning")
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as after:
        server = ApiServer(Path(folder), binaries)
        after.callback(server.stop)
        server.start()
        server.kubectl("apply", "--server-side", "-f", str(CRD))
        server.kubectl(
            "wait", "--for=condition=Established", "--timeout=30s", "crd/ddpjobs.ddpjob.dev"
        )
        server.kubectl("create", "namespace", NAMESPACE)
        host, port = server.url.removeprefix("https://").split(":")
        access = Access(host, int(port), server.certificate.read_text(), token=ADMIN_TOKEN)
        (http_port,) = free_ports(1)
        work = (access, os.getpid(), http_port, chosen.jobs)
        driver = get_context("spawn").Process(target=drive, args=work, daemon=True)
        driver.start()
        with contextlib.nullcontext() if chosen.plain else profile:
            asyncio.run(operate(Options(kubeconfig=server.kubeconfig, http_port=http_port)))
        driver.join()
    if not chosen.plain:
        pstats.Stats(profile).sort_stats("tottime").print_stats(chosen.lines)
    if chosen.out:
        profile.dump_stats(chosen.out)
    return driver.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
