"""`ddpjob suspend`: stop a job and keep it."""

from typing import TYPE_CHECKING

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace
from ddpjob.cli.session import Output

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job and keep it. Its pods get SIGTERM and time to write a checkpoint."""
    Connection(namespace, context, kubeconfig).run(lambda client: suspend(client, job))


async def suspend(client: "AsyncClient", name: str) -> int:
    job = await client.suspend(name)
    then = "continues it"
    if not job.claims:
        then = "starts it from the beginning, since it has no volume for checkpoints"
    Output().print(f"{name} suspended; ddpjob resume {name} {then}")
    return 0
