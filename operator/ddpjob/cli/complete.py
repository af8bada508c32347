"""Find names of jobs and namespaces for shell completion. Without a cluster there are none."""

import asyncio
from collections.abc import Awaitable, Callable

from ddpjob.cli.connection import Connection
from ddpjob.client import AsyncClient, ClientError
from ddpjob.kube.errors import CallFailed
from ddpjob.kube.kinds import NAMESPACES
from ddpjob.kube.watch import list_objects

# Seconds before a completion gives up: a person is waiting.
LONGEST_WAIT = 2.0


def jobs(connection: Connection, incomplete: str) -> list[str]:
    """Return the names of the namespace's jobs with this prefix."""

    async def names(client: AsyncClient) -> list[str]:
        return [job.name for job in await client.list()]

    return asyncio.run(_beginning(incomplete, connection, names))


def namespaces(connection: Connection, incomplete: str) -> list[str]:
    """Return the names of the namespaces with this prefix."""

    async def names(client: AsyncClient) -> list[str]:
        found, _ = await list_objects(client.api, NAMESPACES, None, {})
        return [str(one["metadata"]["name"]) for one in found]

    return asyncio.run(_beginning(incomplete, connection, names))


async def _beginning(
    incomplete: str,
    connection: Connection,
    names: Callable[[AsyncClient], Awaitable[list[str]]],
) -> list[str]:
    try:
        async with asyncio.timeout(LONGEST_WAIT), await connection.connect() as client:
            return [name for name in await names(client) if name.startswith(incomplete)]
    except (ClientError, CallFailed, TimeoutError):
        return []
