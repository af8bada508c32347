"""Answer GET /ready, GET /started, and the agent's other paths."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

# Connections at a time, and seconds to wait for the request of one. A kubelet on a busy node sends
# it late.
CLIENTS = 128
REQUEST_SECONDS = 1.0

OK = "200 OK"
UNAVAILABLE = "503 Service Unavailable"
NOT_FOUND = "404 Not Found"

# Seconds before the next try after an error.
PAUSE = 0.05


class Port:
    """A server in a thread of its own.

    - `is_ready`: whether the attempt is ready. `has_started`: whether the setup has ended.
    - `bodies`: a function for the body of each other path.
    """

    def __init__(
        self,
        is_ready: Callable[[], bool],
        has_started: Callable[[], bool],
        bodies: dict[str, Callable[[], str]],
    ) -> None:
        self.is_ready = is_ready
        self.has_started = has_started
        self.bodies = bodies
        self.clients = threading.BoundedSemaphore(CLIENTS)
        # True once a probe has failed in this attempt: the operator must see each become ready.
        self.has_refused = False

    def serve(self, number: int) -> None:
        """Listen on a port of all addresses. Raises OSError if it is in use."""
        has_ipv6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
        server = socket.create_server(("", number), family=family, dualstack_ipv6=has_ipv6)
        threading.Thread(target=self.answer_all, args=(server,), daemon=True).start()

    def answer_all(self, server: socket.socket) -> None:
        while True:
            self.clients.acquire()
            try:
                connection = server.accept()[0]
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):
                self.clients.release()
                time.sleep(PAUSE)

    def answer(self, connection: socket.socket) -> None:
        # A client may go, or an answer may change meanwhile.
        with suppress(Exception), connection:
            connection.settimeout(REQUEST_SECONDS)
            words = connection.recv(4096).decode(errors="replace").split(" ")
            path = words[1] if len(words) > 1 else ""
            status, body = NOT_FOUND, ""
            if path == "/ready":
                is_ready = self.is_ready() and self.has_refused
                status = OK if is_ready else UNAVAILABLE
                self.has_refused |= not is_ready
            if path == "/started":
                status = OK if self.has_started() else UNAVAILABLE
            if path in self.bodies:
                status = OK
                body = self.bodies[path]()
            head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall((head + body).encode())
        self.clients.release()
