"""`ddpjob wait`: wait for the end of a job."""

from typing import TYPE_CHECKING, Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace, read_duration
from ddpjob.cli.session import Output, print_error
from ddpjob.client.errors import WaitTimeout

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

# The exit code of the command `timeout`.
TIMED_OUT = 124


def command(
    job: JobName,
    timeout: Annotated[
        str | None,
        typer.Option(show_default="none", help="Longest time to wait, such as 90s, 5m or 2h."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait for the end of a job. Made for CI.

    Exit codes:
    0: the job is Complete
    1: the job Failed
    2: there is no such job, it was deleted, or the cluster does not answer
    124: the time is over
    """
    seconds = read_duration(timeout, "--timeout")
    Connection(namespace, context, kubeconfig).run(lambda client: wait(client, job, seconds))


async def wait(client: "AsyncClient", name: str, timeout: float | None) -> int:
    """Return 0 once a job is Complete, 1 if it Failed, or 124 after the time-out."""
    try:
        job = await client.wait(name, timeout=timeout)
    except WaitTimeout as error:
        print_error(str(error))
        return TIMED_OUT
    Output().print(f"{name} {job.phase}: {job.message}")
    return job.status.exit_code
