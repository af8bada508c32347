"""`ddpjob retry`: take a Failed job up again."""

from typing import TYPE_CHECKING

from ddpjob.cli.checkpoints import beginning
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
    """Take a Failed job up again from its last checkpoint.

    The job keeps its counters and its history. Its budgets and its active time begin anew. To run a
    job again from its manifest, use ddpjob restart.
    """
    Connection(namespace, context, kubeconfig).run(lambda client: retry(client, job))


async def retry(client: "AsyncClient", name: str) -> int:
    job = await client.retry(name)
    Output().print(f"{name} taken up again from {beginning(job)}")
    return 0
