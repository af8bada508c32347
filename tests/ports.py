"""Free ports for servers of tests.

A port that the system chooses for a server lies in the range from which it also takes those of
outgoing connections. Another test may get it before the server has started. So the ports of tests
lie below that range, which begins at 32768 on Linux, and below those of Kubernetes and torchrun.
"""

import random
import socket

PORTS = range(15_000, 28_000)


def free_port() -> int:
    """Return a port that was free a moment ago, and that no outgoing connection gets."""
    # Not the generator of the test, which may be seeded.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port of {PORTS} is free")
