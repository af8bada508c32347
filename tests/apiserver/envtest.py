"""A real API server: etcd and kube-apiserver as two processes on this machine, as in envtest.

There is no kubelet and no controller, so objects stay as they were created. A scheduler can be
started beside it. This module depends on nothing of the operator but the version of Kubernetes.
"""

import base64
import http.client
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ddpjob.core.api.kubernetes import NEWEST
from ddpjob.local.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "charts" / "ddpjob-operator" / "files" / "crd.yaml"
NEEDED = ("etcd", "kube-apiserver", "kubectl")
SCHEDULER = "kube-scheduler"
MISSING = (
    f"{{}} not found: run `setup-envtest use {NEWEST}.x -p path`, and set KUBEBUILDER_ASSETS to "
    "the folder that it prints "
    "(or put etcd, kube-apiserver and kubectl into /usr/local/kubebuilder/bin)"
)
ADMIN_TOKEN = "admin-of-the-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"

# The API server takes its first part as the name of the field manager.
USER_AGENT = "the-tests/1"


class Answer(NamedTuple):
    """An answer: HTTP status, the object or Status as a dict, and the Warning headers."""

    code: int
    body: dict[str, Any]
    warnings: list[str]


class Connections:
    """A connection to the API server for each thread.

    A new connection takes longer than most requests.
    """

    def __init__(self, port: int, certificate: Path) -> None:
        self._port = port
        self._trusted = ssl.create_default_context(cafile=str(certificate))
        self._own = threading.local()

    def request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request. Raises OSError if the API server cannot be reached.

        A request without an answer on a kept connection is sent again, so it may take effect twice.
        """
        known = getattr(self._own, "connection", None)
        if known:
            try:
                return self._send(known, method, path, data, headers)
            except (ConnectionError, ssl.SSLError, http.client.HTTPException):
                # The API server has ended since, or it has closed an idle connection.
                known.close()
        new = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=30, context=self._trusted
        )
        self._own.connection = new
        return self._send(new, method, path, data, headers)

    def _send(self, connection: http.client.HTTPSConnection, *request: Any) -> Answer:
        connection.request(*request)
        answer = connection.getresponse()
        return Answer(answer.status, _body_of(answer), answer.headers.get_all("Warning", []))


def _body_of(answer: http.client.HTTPResponse) -> Any:
    """Return the body of an answer. A path that is not served yet has a text."""
    text = answer.read()
    is_json = answer.headers.get_content_type() == "application/json"
    return json.loads(text) if is_json else {"message": text.decode()}


def find_binaries() -> dict[str, str]:
    """Find the programs in NEEDED and the scheduler, and return the paths of those found, by name.

    $KUBEBUILDER_ASSETS comes first, then envtest's usual folder, then PATH.

    Links are not resolved: some distributions ship one program under several names, and it looks at
    the name it is called by.
    """
    folders = [
        os.environ.get("KUBEBUILDER_ASSETS", ""),
        "/usr/local/kubebuilder/bin",
        *os.get_exec_path(),
    ]
    path = os.pathsep.join(folder for folder in folders if folder)
    return {
        name: found for name in (*NEEDED, SCHEDULER) if (found := shutil.which(name, path=path))
    }


class ApiServer:
    """etcd and kube-apiserver with their data in `folder`.

    The API server can be killed and started again.

    `kubeconfig` (a path), `environment` (for kubectl and helm) and `url` stay valid over a restart:
    port, certificate and data stay the same.
    """

    def __init__(self, folder: Path, binaries: dict[str, str], *flags: str) -> None:
        self.folder = folder
        self._flags = flags
        self.kubectl_path = binaries["kubectl"]
        self._binaries = binaries
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = folder / "kubeconfig"
        self.certificate = folder / "certs" / "apiserver.crt"
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(folder / "cache"),
        }
        (folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")

    # -- life

    def start(self) -> None:
        """Start the processes that do not run, and wait until the API server is ready."""
        self._spawn("etcd", self._etcd_flags())
        self._spawn("kube-apiserver", self._apiserver_flags())
        self.wait_for(self._has_certificate)
        self.kubeconfig.write_text(self.kubeconfig_for(ADMIN_TOKEN))
        self.wait_for(self._is_ready)

    def start_scheduler(self, *flags: str) -> None:
        """Start the scheduler of Kubernetes. It binds pods to the existing nodes."""
        kubeconfig = f"--kubeconfig={self.kubeconfig}"
        self._spawn(SCHEDULER, [kubeconfig, "--leader-elect=false", "--secure-port=0", *flags])

    def kill(self) -> None:
        """Kill the API server. etcd and the data stay."""
        self._end("kube-apiserver")

    def restart(self) -> None:
        """Kill the API server and start it again on the same port with the same data."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """End all processes."""
        self._end(SCHEDULER)
        self._end("kube-apiserver")
        self._end("etcd")

    # -- use

    def kubectl(
        self, *args: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator. With `check`, a failure raises AssertionError."""
        command = [self.kubectl_path, *args]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=60, env=self.environment
        )
        assert done.returncode == 0 or not check, done.stderr
        return done

    def install_crd(self) -> None:
        """Install the CRD of DDPJobs, and wait until it is served."""
        self.kubectl("apply", "--server-side", "-f", str(CRD))

        def is_established() -> bool:
            # kubectl fails as long as the CRD has no conditions at all.
            crd = "crd/ddpjobs.ddpjob.dev"
            wait = ("wait", "--for=condition=Established", "--timeout=30s", crd)
            return self.kubectl(*wait, check=False).returncode == 0

        def has_storage() -> bool:
            # In the first moments, requests get 429: storage is (re)initializing.
            return self.request("GET", "/apis/ddpjob.dev/v1alpha1/ddpjobs").code == 200

        self.wait_for(is_established)
        self.wait_for(has_storage)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        credentials: Mapping[str, str] = ADMIN,
    ) -> Answer:
        """Send one request, without strict validation. `credentials` are headers."""
        data = None
        if body is not None:
            data = json.dumps(body).encode()
        headers = {**credentials, "Content-Type": content_type, "User-Agent": USER_AGENT}
        return self._connections.request(method, path, data, headers)

    def add_node(self, name: str, labels: Mapping[str, str], room: Mapping[str, str]) -> None:
        """Create a ready node with this room, without a kubelet."""
        node = {"metadata": {"name": name, "labels": dict(labels)}}
        assert self.request("POST", "/api/v1/nodes", node).code == 201
        # The API server taints a new node, until a controller finds it ready.
        path = f"/api/v1/nodes/{name}"
        assert self.request("PATCH", path, {"spec": {"taints": None}}, MERGE).code == 200
        ready = {"type": "Ready", "status": "True"}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        assert self.request("PATCH", f"{path}/status", {"status": status}, MERGE).code == 200

    def create_namespace(self, prefix: str) -> str:
        """Create a namespace with a new name. Only a controller manager could remove it."""
        name = f"{prefix}-{uuid.uuid4().hex[:10]}"
        answer = self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        assert answer.code == 201, answer.body
        return name

    def delete_jobs(self, namespace: str) -> None:
        """Remove the DDPJobs of a namespace, so no operator of a later test works on them."""
        assert (
            self.request("DELETE", f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs").code
            == 200
        )

    def kubeconfig_for(self, token: str) -> str:
        """Return a kubeconfig for this server with the given bearer token. JSON is YAML too."""
        certificate = base64.b64encode(self.certificate.read_bytes()).decode()
        named: dict[str, Any] = {
            "clusters": [
                {
                    "name": "it",
                    "cluster": {"server": self.url, "certificate-authority-data": certificate},
                }
            ],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "it", **named})

    @cached_property
    def _connections(self) -> Connections:
        return Connections(self._port, self.certificate)

    # -- parts

    def _etcd_flags(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ]

    def _apiserver_flags(self) -> list[str]:
        certificates = self.folder / "certs"
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            # The API server creates apiserver.crt and apiserver.key there.
            f"--cert-dir={certificates}",
            f"--service-account-signing-key-file={certificates / 'apiserver.key'}",
            f"--service-account-key-file={certificates / 'apiserver.key'}",
            f"--service-account-issuer={self.url}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            # No controller creates the default ServiceAccount, and without it pods are refused.
            "--disable-admission-plugins=ServiceAccount",
            *self._flags,
        ]

    def _spawn(self, name: str, flags: list[str]) -> None:
        if name in self._processes:
            return
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [self._binaries[name], *flags], stdout=log, stderr=log
            )

    def _end(self, name: str) -> None:
        """Kill a process. After SIGTERM the API server would wait for open watches."""
        process = self._processes.pop(name, None)
        if process:
            process.kill()
            process.wait()

    def _has_certificate(self) -> bool:
        """Return True once the API server has written its certificate, not only made the file."""
        file = self.certificate
        return file.exists() and "-----END CERTIFICATE-----" in file.read_text()

    def _is_ready(self) -> bool:
        """Return True if all checks pass and the namespace created last can be read."""
        try:
            ready = self.kubectl("get", "--raw=/readyz", check=False).stdout == "ok"
            return ready and self.request("GET", "/api/v1/namespaces/default").code == 200
        except OSError:
            return False

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended: {self._tail(name)}"
            assert time.monotonic() < deadline, self._tail("kube-apiserver")
            time.sleep(0.1)

    def _tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]


# What makes an API server serve PodGroups, and its scheduler know them.
GANG_GATES = "--feature-gates=GenericWorkload=true,TopologyAwareWorkloadScheduling=true"
GANG_FLAGS = (GANG_GATES, "--runtime-config=scheduling.k8s.io/v1beta1=true")


@contextmanager
def temporary_server(*flags: str) -> Iterator[ApiServer]:
    """Run an API server with DDPJobs for the time of the block, for a benchmark.

    Raises SystemExit with a message if a program is missing.
    """
    binaries = find_binaries()
    missing = [name for name in (*NEEDED, SCHEDULER) if name not in binaries]
    if missing:
        raise SystemExit(MISSING.format(", ".join(missing)))
    with tempfile.TemporaryDirectory() as folder:
        server = ApiServer(Path(folder), binaries, *flags)
        try:
            server.start()
            server.install_crd()
            yield server
        finally:
            server.stop()
