"""What gloo needs: an interface, its words for a timeout, and time for its threads at the end."""

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Messages of gloo after a timeout. A lost connection may "time out" too, but is another error.
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms for (?:send|recv)|Application timeout caused pair closure"
)

# The threads of this process, see proc(5), and the name of those that run gloo's collectives.
THREADS = Path("/proc/self/task")
RUN_LOOP = "pt_gloo_runloop"

# Seconds between two looks at the threads, and until they are given up.
LOOK_INTERVAL = 0.005
THREADS_TIMEOUT = 10.0


def use_loopback_for_local_peers() -> None:
    """Let gloo use the loopback interface if the rendezvous uses it.

    By default gloo takes the address of the machine's own name. On many laptops this name resolves
    to nothing, or to an interface behind a firewall or a VPN.
    """
    if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        loopback = "lo0" if platform.system() == "Darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def wait_for_threads() -> None:
    """Wait until gloo's threads are idle, after the last collective.

    A thread drops the tensors of a collective a moment after its end, and takes Python's lock for
    it. If Python has ended by then, C++ aborts the process: exit code -6, "terminate called without
    an active exception". On a busy machine this happened to completed runs.

    A destroyed group has no threads. But whatever refers to the group keeps it and them alive: a
    global model in DDP or FSDP2, or the caches of DTensor.
    """
    deadline = time.monotonic() + THREADS_TIMEOUT
    idle_looks = 0
    # A thread waiting for Python's lock looks idle too. It gets the lock between two looks.
    while idle_looks < 2 and time.monotonic() < deadline:
        states = list(_states_of_threads())
        if not states:
            return
        is_idle = all(state == "S" for state in states)
        idle_looks = idle_looks + 1 if is_idle else 0
        time.sleep(LOOK_INTERVAL)


def _states_of_threads() -> Iterator[str]:
    """Yield the state of each thread of gloo: S if it sleeps. Nothing without /proc."""
    for path in THREADS.glob("*/stat"):
        # A thread may have ended since.
        with suppress(OSError):
            name, _, rest = path.read_text().partition(" (")[2].rpartition(") ")
            if name == RUN_LOOP:
                yield rest[0]
