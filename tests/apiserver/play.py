"""The operator as a process, a gate in front of the API server, and a simulated kubelet."""

import http.client
import json
import multiprocessing
import os
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from envtest import ADMIN_TOKEN, MERGE, Answer, ApiServer
from torchrun_summary import SUMMARY

from ddpjob.cli import main
from ddpjob.local.ports import free_port

# Operators are forks of a process with the imports already done: a new Python takes a second.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ddpjob.cli.commands.operator", "ddpjob.controller.main", "play"])


def succeeded_nodes(status: dict[str, Any]) -> list[int]:
    found: list[int] = status.get("operator", {}).get("attempt", {}).get("succeededNodes", [])
    return found


class Operator:
    """`ddpjob operator` as a process. Its log is a file in `folder`."""

    context: BaseContext = FORKS

    def __init__(self, folder: Path, kubeconfig: Path, *options: str) -> None:
        self.port = free_port()
        self._log = folder / f"operator-{self.port}.log"
        arguments = [f"--kubeconfig={kubeconfig}", *options, f"--http-port={self.port}"]
        self.process = self._start(["operator", *arguments, "--log-format=plain"])

    def _start(self, arguments: list[str]) -> BaseProcess:
        self._log.touch()
        process: BaseProcess = self.context.Process(  # type: ignore[attr-defined]
            target=run_command, args=(arguments, self._log)
        )
        process.start()
        return process

    @property
    def is_over(self) -> bool:
        return not self.process.is_alive()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> int | None:
        """Send SIGTERM and return the exit code, or None if the process goes on."""
        self.process.terminate()
        self.process.join(timeout=60)
        return self.process.exitcode


def run_command(arguments: list[str], log: Path) -> None:
    """Run `ddpjob` in this process, with its output in a file."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    main.app(arguments)


class Gate:
    """A plain HTTP proxy of the API server.

    It counts writes, except those of the Lease. `shut_at(k, passed_on)` shuts it at the k-th write
    from now: it calls `on_shut`, sets `is_shut`, and then passes nothing until `open`. With
    `passed_on`, the API server still gets this write, but its answer is lost.
    """

    def __init__(self, apiserver: ApiServer) -> None:
        self.writes: list[str] = []
        self.on_shut: Callable[[], None] = lambda: None
        self.is_shut = False
        self._closed = False
        self._upstream = urlsplit(apiserver.url)
        self._trusted = ssl.create_default_context(cafile=str(apiserver.certificate))
        self._writing = threading.Lock()
        self._left: int | None = None
        self._passed_on = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        # The tests kill clients. This is not an error here.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.kubeconfig = apiserver.folder / f"kubeconfig-{self._server.server_port}"
        config = json.loads(apiserver.kubeconfig_for(ADMIN_TOKEN))
        config["clusters"][0]["cluster"] = {
            "server": f"http://127.0.0.1:{self._server.server_port}"
        }
        self.kubeconfig.write_text(json.dumps(config))

    def shut_at(self, k: int, passed_on: bool) -> None:
        self._left, self._passed_on = k, passed_on

    def open(self) -> None:
        self._left, self._closed, self.is_shut = None, False, False

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                self.upstream = gate._connection()

            def finish(self) -> None:
                self.upstream.close()
                super().finish()

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                gate._read(self)

            def do_POST(self) -> None:
                gate._write(self)

            do_PUT = do_PATCH = do_DELETE = do_POST

        return Handler

    def _write(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if "/leases" in request.path:
            self._pass_on(request, body)
            return
        with self._writing:
            if self._closed:
                request.close_connection = True
                return
            self.writes.append(f"{request.command} {request.path}")
            self._left = self._left - 1 if self._left is not None else None
            self._closed = self._left == 0
            self._pass_on(
                request, body, silent=self._closed, withheld=self._closed and not self._passed_on
            )
            if self._closed:
                self.on_shut()
                self.is_shut = True

    def _read(self, request: BaseHTTPRequestHandler) -> None:
        if self._closed:
            request.close_connection = True
        else:
            self._pass_on(request, None)

    def _connection(self) -> http.client.HTTPSConnection:
        """Return a connection to the API server for one of the client: a new one takes longer."""
        host, port = self._upstream.hostname, self._upstream.port
        assert host
        return http.client.HTTPSConnection(host, port, context=self._trusted)

    def _pass_on(
        self,
        request: Any,
        body: bytes | None,
        silent: bool = False,
        withheld: bool = False,
    ) -> None:
        """Pass on a request and its answer, piece by piece, because a watch never ends."""
        request.close_connection = silent
        if withheld:
            return
        upstream = request.upstream
        try:
            kept = {
                k: v
                for k, v in request.headers.items()
                if k in ("Authorization", "Content-Type", "Accept")
            }
            upstream.request(request.command, request.path, body, kept)
            answer = upstream.getresponse()
            if silent:
                answer.read()
                return
            request.send_response(answer.status)
            request.send_header(
                "Content-Type", answer.getheader("Content-Type", "application/json")
            )
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            while piece := answer.read1(65536):
                request.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            request.wfile.write(b"0\r\n\r\n")
            # The connection does not see the end of an answer that was read in pieces.
            answer.close()
        except (OSError, http.client.HTTPException):
            upstream.close()
            request.close_connection = True


class Cluster:
    """One namespace of an API server. `step` simulates the scheduler and the kubelets.

    Pods are placed on `nodes` in turn. The kubelets of `silent` nodes do nothing.
    """

    def __init__(self, apiserver: ApiServer, namespace: str) -> None:
        self.apiserver, self.namespace = apiserver, namespace
        self.nodes = ["node"]
        self.silent: set[str] = set()
        # Pods whose workers have met, with the attempt.
        self.met: set[tuple[str, str]] = set()

    def create_job(
        self, name: str, nodes: int = 2, labels: dict[str, str] | None = None, **more: Any
    ) -> None:
        """Create a job. Each attempt has new pods, unless `recovery` is InPlace."""
        fields = {"nodes": nodes, "image": "trainer:1", "args": ["train.py"]}
        spec = {**fields, "recovery": "Recreate", **more}
        manifest = {
            "apiVersion": "ddpjob.dev/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": spec,
        }
        answer = self.apiserver.request("POST", self._path("ddpjobs"), manifest)
        assert answer.code == 201, answer.body

    def status(self, job: str) -> dict[str, Any]:
        body = self.apiserver.request("GET", self._path("ddpjobs", job)).body
        status: dict[str, Any] = body.get("status", {})
        return status

    def managers(self, job: str) -> set[tuple[str, str]]:
        """Return (manager, subresource) of all who have written fields of a job and of its pods."""
        jobs = [self.apiserver.request("GET", self._path("ddpjobs", job)).body]
        found = set()
        for body in (*jobs, *self.pods(job).values()):
            for entry in body["metadata"]["managedFields"]:
                found.add((entry["manager"], entry.get("subresource", "")))
        return found

    def pods(self, job: str) -> dict[str, dict[str, Any]]:
        """Return the pods of a job by name."""
        found = self.apiserver.request(
            "GET", f"{self._path('pods')}?labelSelector=ddpjob.dev/job={job}"
        ).body["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def exists(self, job: str) -> bool:
        return self.apiserver.request("GET", self._path("ddpjobs", job)).code == 200

    def change_job(self, name: str, **spec: Any) -> None:
        answer = self.apiserver.request("PATCH", self._path("ddpjobs", name), {"spec": spec}, MERGE)
        assert answer.code == 200, answer.body

    def wipe_status(self, name: str) -> None:
        """Remove the status of a job, as restoring it from a backup without status does."""
        body = self.apiserver.request("GET", self._path("ddpjobs", name)).body
        path = f"{self._path('ddpjobs', name)}/status"
        answer = self.apiserver.request("PUT", path, {**body, "status": {}})
        assert answer.code in (200, 409), answer.body

    def copy_pod(self, name: str, copy: str, index: int) -> None:
        """Create a copy of a pod by hand, with another index."""
        body = self.pods_by_name(name)
        metadata = body["metadata"]
        labels = {**metadata["labels"], "ddpjob.dev/index": str(index)}
        owners = metadata["ownerReferences"]
        made = {"name": copy, "labels": labels, "ownerReferences": owners}
        pod = {"metadata": made, "spec": {**body["spec"], "hostname": copy}}
        answer = self.apiserver.request("POST", self._path("pods"), pod)
        assert answer.code == 201, answer.body

    def forge_pod(self, victim: "Cluster", name: str, attempt: int = 0) -> None:
        """Create a copy of a pod of another namespace in this one, for an attempt of its job."""
        body = victim.pods_by_name(name)
        metadata = body["metadata"]
        forged = name.replace("-0-", f"-{attempt}-")
        labels = {**metadata["labels"], "ddpjob.dev/attempt": str(attempt)}
        made = {"name": forged, "labels": labels, "ownerReferences": metadata["ownerReferences"]}
        pod = {"metadata": made, "spec": body["spec"]}
        answer = self.apiserver.request("POST", self._path("pods"), pod)
        assert answer.code == 201, answer.body

    def pods_by_name(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = self.apiserver.request("GET", self._path("pods", name)).body
        return body

    def event_reasons(self) -> list[str]:
        """Return the reasons of the namespace's events; a repeated event has one entry."""
        found = self.apiserver.request("GET", self._path("events")).body["items"]
        return [event["reason"] for event in found]

    def report_node(self, name: str, ready: str) -> None:
        """Create a Kubernetes node if it is new, and set its condition Ready."""
        self.apiserver.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        path = f"/api/v1/nodes/{name}/status"
        answer = self.apiserver.request("PATCH", path, {"status": status}, MERGE)
        assert answer.code == 200, answer.body

    def remove_node(self, name: str) -> None:
        self.apiserver.request("DELETE", f"/api/v1/nodes/{name}")

    def ends(self, pod: str, code: int = 0, message: str = "") -> None:
        """End the trainer of a pod. With another code than 0, its log ends with a summary."""
        state = {
            "exitCode": code,
            "message": message or (SUMMARY if code else ""),
            "finishedAt": "2026-11-21T12:01:00Z",
        }
        self._report(pod, "Failed" if code else "Succeeded", {"terminated": state})

    def vanishes(self, pod: str) -> None:
        """Delete a pod at once, without its kubelet."""
        answer = self._delete(pod)
        assert answer.code == 200, answer.body

    def _delete(self, pod: str) -> Answer:
        return self.apiserver.request("DELETE", self._path("pods", pod), {"gracePeriodSeconds": 0})

    def step(self, job: str) -> None:
        """Bind and start every new pod, and remove the pods in deletion."""
        for number, (name, pod) in enumerate(sorted(self.pods(job).items())):
            node = pod["spec"].get("nodeName")
            if node in self.silent:
                continue
            if pod["metadata"].get("deletionTimestamp"):
                # The API server removes a finished pod itself, in two writes: first this timestamp,
                # then the pod.
                answer = self._delete(name)
                assert answer.code in (200, 404), answer.body
            elif not node:
                answering = [node for node in self.nodes if node not in self.silent]
                chosen = {"kind": "Node", "name": answering[number % len(answering)]}
                binding = {"metadata": {"name": name}, "target": chosen}
                self.apiserver.request("POST", f"{self._path('pods', name)}/binding", binding)
            elif pod["status"]["phase"] in ("Pending", "Running"):
                self._meet(name, pod["metadata"]["labels"]["ddpjob.dev/attempt"])

    def _meet(self, name: str, attempt: str) -> None:
        """Let the workers of a pod meet the others, once in each attempt."""
        if (name, attempt) not in self.met:
            # Each pod is ready since another second than before.
            since = datetime.fromtimestamp(len(self.met), UTC).isoformat()
            self.met.add((name, attempt))
            state = {"running": {"startedAt": "2026-11-21T12:00:00Z"}}
            self._report(name, "Running", state, ready_since=since)

    def until(self, job: str, condition: Callable[[], object], seconds: float = 180) -> None:
        """Simulate until the condition is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"never came; the last status: {self.status(job)}"
            self.step(job)
            time.sleep(0.05)

    def wait(self, condition: Callable[[], object], seconds: float = 180) -> None:
        """Wait until the condition is true, while no scheduler and no kubelet works."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition never became true"
            time.sleep(0.05)

    def is_running(self, job: str, attempt: int = 0) -> None:
        """Simulate until the job runs in `attempt`."""
        self.until(
            job,
            lambda: (
                (s := self.status(job)).get("phase") == "Running"
                and s["attempt"]["number"] == attempt
            ),
        )

    def _report(
        self, pod: str, phase: str, state: dict[str, Any], ready_since: str | None = None
    ) -> None:
        container = {
            "name": "trainer",
            "image": "i",
            "imageID": "",
            "ready": bool(ready_since),
            "restartCount": 0,
            "state": state,
        }
        status: dict[str, Any] = {"phase": phase, "containerStatuses": [container]}
        if ready_since:
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": ready_since}
            status |= {"podIP": "10.244.0.7", "podIPs": [{"ip": "10.244.0.7"}]}
            status["conditions"] = [ready]
        status = {"status": status}
        self.apiserver.request("PATCH", f"{self._path('pods', pod)}/status", status, MERGE)

    def _path(self, plural: str, name: str = "") -> str:
        root = {"ddpjobs": "apis/ddpjob.dev/v1alpha1", "leases": "apis/coordination.k8s.io/v1"}.get(
            plural, "api/v1"
        )
        return f"/{root}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def remove_lease(self, name: str) -> None:
        self.apiserver.request("DELETE", self._path("leases", name))

    def holder(self, lease: str = "ddpjob-operator") -> str:
        """Return the holder of a Lease, or an empty string."""
        body = self.apiserver.request("GET", self._path("leases", lease)).body
        return str(body.get("spec", {}).get("holderIdentity", ""))


def end(operator: Operator) -> None:
    """Kill an operator if it still runs at the end of a test."""
    if not operator.is_over:
        operator.kill()
