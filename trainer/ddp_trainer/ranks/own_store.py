"""A store for the ranks of the caller's process group.

torch has no public call for the store of an existing group. So rank 0 serves a new one.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from ddp_trainer.errors import RetryableError
from ddp_trainer.ranks.runtime import Runtime

LOOPBACK = "127.0.0.1"

# Every machine resolves these names to itself.
LOOPBACK_NAMES = ("localhost", LOOPBACK, "::1")

CONNECT_TIMEOUT = timedelta(seconds=60)

# For later waits of the ranks, such as for the shards of a checkpoint.
ANSWER_TIMEOUT = timedelta(minutes=30)

# Identifiers of the kernel and of the network namespace of this process, on Linux.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def open_store(runtime: Runtime) -> Store:
    """Start a store on rank 0, and return it on every rank. Every rank calls it.

    Raises RetryableError on every rank if one of them cannot connect.
    """
    server = None
    meeting = None
    if runtime.is_main:
        server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        meeting = address(os.environ), server.port, place()
    host, port, place_of_server = runtime.broadcast(meeting)
    if place_of_server == place():
        host = LOOPBACK

    def connect() -> TCPStore:
        try:
            return server or TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT)
        except RuntimeError as error:
            raise RetryableError(
                f"cannot connect to rank 0 at {host}:{port} ({str(error).splitlines()[0]}); set "
                "MASTER_ADDR on all ranks to an address of rank 0's machine, and allow connections "
                "to any port between the ranks"
            ) from error

    store = runtime.run_on_all(connect)
    store.set_timeout(ANSWER_TIMEOUT)
    return store


def address(environment: Mapping[str, str]) -> str:
    """Return a name of this machine that other machines can resolve, on rank 0.

    Launchers such as torchrun set MASTER_ADDR to rank 0's machine.
    """
    given = environment.get("MASTER_ADDR")
    return given if given and given not in LOOPBACK_NAMES else socket.gethostname()


def place() -> str:
    """Return an identifier of this process's loopback interface.

    Containers on one machine have the same kernel, but each has a network of its own.
    """
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {NETWORK.stat().st_ino}"
    return socket.gethostname()
