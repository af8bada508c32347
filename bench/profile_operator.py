"""Profile the operator (cProfile) while many small gangs come up against a bare API server.

    python -m bench.profile_operator              # the functions that cost most
    python -m bench.profile_operator --plain      # without the profiler: the real CPU time per pod
    python -m bench.profile_operator --out FILE   # for `python -m pstats FILE` and the like

Run it from the root of the repository. It needs etcd and kube-apiserver as tests/apiserver does. A
second process creates the jobs and plays scheduler and kubelet, so that the operator sees every pod
as on a cluster: added, bound to a node, running.
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

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "apiserver"), str(ROOT / "tests")]

from envtest import (  # noqa: E402
    ADMIN_TOKEN,
    CRD,
    MISSING,
    NEEDED,
    ApiServer,
    find_binaries,
    free_ports,
)

from ddpjob.controller.main import Options, operate, set_up_logging  # noqa: E402
from ddpjob.core.api import names  # noqa: E402

from .operator_speed.cases import COLLECTIONS, NAMESPACE, OURS, PODS, Shape, objects_of  # noqa: E402
from .operator_speed.client import Access, Client, create_all  # noqa: E402
from .operator_speed.measure import CONNECTIONS  # noqa: E402
from .operator_speed.processes import cpu_seconds_of  # noqa: E402

RECONCILES = re.compile(r"^ddpjob_reconcile_seconds_count (\S+)$", re.MULTILINE)

# The status that a kubelet writes for a pod whose trainer runs.
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


# --- the process that drives the operator


def drive(access: Access, operator: int, port: int, shape: Shape) -> None:
    """Create the jobs, wait until their pods run, print what the operator needed, and stop it.

    `operator` is its process id, `port` that of its probes and metrics.
    """
    try:
        _wait_until(lambda: _leads(port))
        threading.Thread(target=play_kubelet, args=(access,), daemon=True).start()
        cpu_before = cpu_seconds_of(operator)
        began = time.monotonic()
        create_all(access, COLLECTIONS[OURS], objects_of(OURS, shape), CONNECTIONS)
        all_running = f'ddpjob_jobs{{phase="Running"}} {shape.jobs}.0'
        _wait_until(lambda: all_running in _get(port, "metrics"))
        seconds = time.monotonic() - began
        cpu = cpu_seconds_of(operator) - cpu_before
        reconciles = RECONCILES.search(_get(port, "metrics"))
        count = reconciles[1] if reconciles else "not counted"
        print(
            f"{shape} pods Running after {seconds:.1f} s; CPU of the operator {cpu:.2f} s, "
            f"{cpu / shape.pods * 1e3:.2f} ms a pod; reconciles {count}"
        )
    finally:
        os.kill(operator, signal.SIGTERM)


def play_kubelet(access: Access) -> None:
    """Bind every new pod to a node and set it Running, over several connections."""
    pods: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work() -> None:
        client = Client(access)
        while True:
            _bind_and_run(client, pods.get())

    for _ in range(CONNECTIONS):
        threading.Thread(target=work, daemon=True).start()
    stream = Client(access).send("GET", f"{PODS}?watch=1")
    for line in iter(stream.readline, b""):
        event = json.loads(line)
        if event["type"] == "ADDED":
            pods.put(event["object"]["metadata"]["name"])


def _bind_and_run(client: Client, name: str) -> None:
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name},
        "target": {"name": "node-1"},
    }
    client.json("POST", f"{PODS}/{name}/binding", binding)
    status = json.dumps(RUNNING).encode()
    patch = "application/merge-patch+json"
    client.send("PATCH", f"{PODS}/{name}/status", status, patch).read()


def _leads(port: int) -> bool:
    return "ddpjob_leader 1.0" in _get(port, "metrics") and _get(port, "readyz") == "ok\n"


def _wait_until(look: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the jobs are not Running after {seconds:g} s")
        time.sleep(0.5)


def _get(port: int, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


# --- the process of the operator


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.profile_operator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--jobs", type=Shape.parse, default=Shape(100, 4), help="JOBSxNODES (default: 100x4)"
    )
    parser.add_argument(
        "--plain", action="store_true", help="run without the profiler, which doubles the CPU time"
    )
    parser.add_argument("--lines", type=int, default=45, help="functions to print (default: 45)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile to this file")
    return parser.parse_args()


def start_api_server(server: ApiServer) -> Access:
    """Start an API server with the CRD and the namespace of the benchmark."""
    server.start()
    server.kubectl("apply", "--server-side", "-f", str(CRD))
    crd = "crd/ddpjobs.ddpjob.dev"
    server.kubectl("wait", "--for=condition=Established", "--timeout=30s", crd)
    server.kubectl("create", "namespace", NAMESPACE)
    host, port = server.url.removeprefix("https://").split(":")
    return Access(host, int(port), server.certificate.read_text(), token=ADMIN_TOKEN)


def main() -> int:
    chosen = arguments()
    binaries = find_binaries()
    missing = [name for name in NEEDED if name not in binaries]
    if missing:
        print(MISSING.format(", ".join(missing)), file=sys.stderr)
        return 1
    set_up_logging("plain", "warning")
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as after:
        server = ApiServer(Path(folder), binaries)
        after.callback(server.stop)
        access = start_api_server(server)
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
    elif chosen.out:
        print("--out: has no effect with --plain", file=sys.stderr)
    return driver.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
