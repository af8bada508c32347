"""Names of jobs and namespaces for the completion of a shell. Without a cluster there are none."""

import asyncio

from ddpjob.client import AsyncClient, ClientError
from ddpjob.kube.errors import CallFailed
from ddpjob.kube.kinds import NAMESPACES
from ddpjob.kube.watch import list_objects

# Seconds that a person waits for a completion.
LONGEST_WAIT = 2.0


def jobs(incomplete: str) -> list[str]:
    """Return the jobs of the current namespace that begin so."""
    return [name for name in asyncio.run(_jobs()) if name.startswith(incomplete)]


def namespaces(incomplete: str) -> list[str]:
    """Return the namespaces that begin so."""
    return [name for name in asyncio.run(_namespaces()) if name.startswith(incomplete)]


async def _jobs() -> list[str]:
    try:
        async with asyncio.timeout(LONGEST_WAIT), await AsyncClient.connect() as client:
            return [job.name for job in await client.list()]
    except (ClientError, TimeoutError):
        return []


async def _namespaces() -> list[str]:
    try:
        async with asyncio.timeout(LONGEST_WAIT), await AsyncClient.connect() as client:
            found, _ = await list_objects(client.api, NAMESPACES, None, {})
            return [str(one["metadata"]["name"]) for one in found]
    except (ClientError, CallFailed, TimeoutError):
        return []
