"""The client of a cluster, for Python programs and for the command line.

The names are imported when they are used: an AsyncClient takes a second to import, and the commands
know the errors without it.

May import `core`, `jobs`, `kube`, `show` and `local`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpjob.client.async_client import AsyncClient
    from ddpjob.client.errors import ClientError, NotConnected, NotFound, Rejected, WaitTimeout
    from ddpjob.client.logs import LogChoice, LogLine
    from ddpjob.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "LogChoice",
    "LogLine",
    "NotConnected",
    "NotFound",
    "Rejected",
    "WaitTimeout",
]

MODULES = {
    "AsyncClient": "async_client",
    "Client": "sync",
    "LogChoice": "logs",
    "LogLine": "logs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ddpjob.client' has no attribute {name!r}")
    return getattr(import_module(f"ddpjob.client.{MODULES.get(name, 'errors')}"), name)
