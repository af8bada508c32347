"""`ddpjob delete`: delete jobs and their pods."""

from typing import TYPE_CHECKING, Annotated

import typer

from ddpjob.cli.checkpoints import kept_checkpoints
from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, Kubeconfig, Namespace, complete_jobs
from ddpjob.cli.session import REFUSED, Output, print_error
from ddpjob.client.errors import NotFound

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB…", help="Names of jobs.", autocompletion=complete_jobs),
    ],
    wait: Annotated[bool, typer.Option(help="Wait until the jobs are gone.")] = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete jobs and their pods. Checkpoints stay, and the output says where they are."""
    Connection(namespace, context, kubeconfig).run(lambda client: delete(client, jobs, wait))


async def delete(client: "AsyncClient", names: list[str], wait_until_gone: bool) -> int:
    code = 0
    for name in names:
        try:
            job = await client.delete(name, wait=wait_until_gone)
        except NotFound as error:
            print_error(str(error))
            code = REFUSED
        else:
            Output().print(f"{name} deleted{kept_checkpoints(job)}")
    return code
