"""`ddpjob scale`: change the number of nodes of a job."""

from typing import TYPE_CHECKING, Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace
from ddpjob.cli.session import Output
from ddpjob.core.plan import counted

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    job: JobName,
    nodes: Annotated[int, typer.Argument(metavar="NODES", min=1, help="New number of nodes.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of nodes. A running job begins a new attempt of that size."""
    Connection(namespace, context, kubeconfig).run(lambda client: scale(client, job, nodes))


async def scale(client: "AsyncClient", name: str, nodes: int) -> int:
    before = (await client.get(name)).spec.get("nodes", 1)
    if before == nodes:
        Output().print(f"{name} has {counted(nodes, 'node')} already: nothing to scale")
        return 0
    await client.scale(name, nodes)
    Output().print(f"{name} scaled from {before} to {counted(nodes, 'node')}")
    return 0
