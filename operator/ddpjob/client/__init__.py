"""The client of a cluster, for Python programs and for the command line.

May import `core`, `jobs`, `kube`, `show` and `local`.
"""

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
