"""`ddpjob restart`: run a job again."""

import asyncio
from typing import TYPE_CHECKING

from ddpjob.cli.checkpoints import from_checkpoints
from ddpjob.cli.connection import Connection
from ddpjob.cli.manifests import kept_manifest
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace
from ddpjob.cli.session import Output, note
from ddpjob.client.errors import ClientError

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Restart a running job, by suspend and resume, or run a finished one again.

    A finished job is deleted and created again with the same manifest. Checkpoints stay, so
    training continues from the last one.
    """
    Connection(namespace, context, kubeconfig).run(lambda client: restart(client, job))


async def restart(client: "AsyncClient", name: str) -> int:
    job = await client.get(name)
    if job.finished:
        note(f"{name} is {job.phase}: running it again")
        with kept_manifest(job):
            await client.restart(name)
    else:
        note(f"{name} is {job.phase}: suspending it, then resuming it")
        try:
            await client.restart(name)
        except (asyncio.CancelledError, ClientError):
            note(f"the job may be suspended; ddpjob resume {name} continues it")
            raise
    Output().print(f"{name} restarted{from_checkpoints(job)}")
    return 0
