"""A plain client of the API server. It uses as little CPU time as possible."""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

# The API server closes idle connections. One unused for longer than this is opened again.
REOPEN_AFTER_SECONDS = 30


@dataclass(frozen=True)
class Access:
    """The address of the API server, its certificate authority and the client's identity.

    `authority` is PEM text. The identity is a certificate with its key (a PEM file) or a token.
    """

    host: str
    port: int
    authority: str
    certificate: Path | None = None
    token: str = ""

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority)
        if self.certificate:
            context.load_cert_chain(self.certificate)
        return context


class Client:
    """One persistent HTTP connection.

    A refused request raises RuntimeError with the answer. So does one without an answer: an
    overloaded API server closes the connection.
    """

    def __init__(self, access: Access) -> None:
        self._http = http.client.HTTPSConnection(
            access.host, access.port, context=access.tls(), timeout=300
        )
        self._http.connect()
        self._used = time.monotonic()
        self._headers = {"Accept": "application/json"}
        if access.token:
            self._headers["Authorization"] = f"Bearer {access.token}"

    def send(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> http.client.HTTPResponse:
        """Send a request with a body of the media type `kind`, and return the open response.

        The caller must read the response before the next call.
        """
        if time.monotonic() - self._used > REOPEN_AFTER_SECONDS:
            self._http.close()
        self._used = time.monotonic()
        try:
            self._http.request(method, path, body, {**self._headers, "Content-Type": kind})
            response = self._http.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise RuntimeError(f"{method} {path}: {error}") from error
        if response.status >= 400:
            text = response.read()[:500].decode()
            raise RuntimeError(f"{method} {path}: {response.status} {text}")
        return response

    def text(self, method: str, path: str, body: bytes | None = None) -> str:
        return self.send(method, path, body).read().decode()

    def json(self, method: str, path: str, body: Object | None = None) -> Object:
        encoded = None if body is None else json.dumps(body).encode()
        answer: Object = json.loads(self.text(method, path, encoded))
        return answer


@dataclass(frozen=True)
class Write:
    """A request to create or change an object."""

    method: str
    path: str
    body: bytes
    kind: str = "application/json"


def create_all(access: Access, path: str, bodies: Sequence[bytes], connections: int) -> float:
    """POST `bodies` to `path` in their order. Return time.monotonic() of the first request."""
    return send_all(access, [Write("POST", path, body) for body in bodies], connections)


def send_all(access: Access, writes: Sequence[Write], connections: int) -> float:
    """Send requests in their order, over connections opened beforehand.

    Returns time.monotonic() of the first request. Call it in a separate process. Otherwise it
    would share an interpreter with the measurement.
    """
    clients = [Client(access) for _ in range(min(connections, len(writes)))]
    remaining = iter(writes)
    lock = threading.Lock()

    def work(client: Client) -> None:
        while True:
            with lock:
                write = next(remaining, None)
            if write is None:
                return
            client.send(write.method, write.path, write.body, write.kind).read()

    with ThreadPoolExecutor(len(clients)) as pool:
        started = time.monotonic()
        for done in [pool.submit(work, client) for client in clients]:
            done.result()
    return started
