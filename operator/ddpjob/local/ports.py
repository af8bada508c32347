"""Free ports of this machine."""

import errno
import random
import socket
from collections import deque

# Below the ports that a system gives to outgoing connections (from 32768 on Linux): one of these
# could take the port before a server listens on it. Also below the ports of Kubernetes and
# torchrun.
PORTS = range(11_000, 28_000)

# A port is chosen some seconds before its server listens. Meanwhile this process holds the UDP port
# of the same number, so neither this function nor another run chooses it again. The oldest are let
# go: their servers have started long ago.
_reserved: deque[socket.socket] = deque(maxlen=128)


def free_port() -> int:
    """Reserve and return a TCP port of PORTS with no listening process. Raises OSError."""
    # Not the generator of the caller: it may be seeded.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reservation.bind(("", port))
            _check_that_none_listens(port)
        except OSError:
            reservation.close()
            continue
        _reserved.append(reservation)
        return port
    raise OSError(errno.EADDRINUSE, f"all ports from {PORTS.start} to {PORTS.stop - 1} are in use")


def _check_that_none_listens(port: int) -> None:
    """Raise OSError if a process listens on the TCP port."""
    with socket.socket() as probe:
        # A closed connection may still hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
