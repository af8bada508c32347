"""Run PyTorch DistributedDataParallel jobs on Kubernetes, and the same manifest on a laptop.

    from ddpjob import Client, DDPJob

The names of a client are imported when they are used, so that the operator and the commands that
need no cluster start quickly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient, Client, ClientError, LogChoice
    from ddpjob.client.local import LocalClient
    from ddpjob.jobs.user_job import DDPJob

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "ClientError", "DDPJob", "LocalClient", "LogChoice"]

MODULES = {"DDPJob": "ddpjob.jobs.user_job", "LocalClient": "ddpjob.client.local"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ddpjob' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(MODULES.get(name, "ddpjob.client")), name)
