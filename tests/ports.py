"""Free ports for servers of tests.

The system chooses ports for servers and for outgoing connections from the same range. Another test
may get such a port before the server has started. So the ports of tests lie below this range (it
begins at 32768 on Linux), and below the ports of Kubernetes and torchrun.
"""

import random
import socket

PORTS = range(15_000, 28_000)


def free_port() -> int:
    """Return a port that was free a moment ago. No outgoing connection gets it."""
    # Not the generator of the test: it may be seeded.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port of {PORTS} is free")
