"""`ddpjob wait`: wait for the end of a job."""

from typing import TYPE_CHECKING

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace, Timeout, read_duration
from ddpjob.cli.waiting import TimeLimit, wait_for_end

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    job: JobName,
    timeout: Timeout = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait for the end of a job. Made for CI.

    Exit codes:
    0: the job is Complete
    1: the job Failed
    2: there is no such job, it was deleted, or the cluster does not answer
    124: the time is over, and the job goes on
    """
    limit = TimeLimit(read_duration(timeout, "--timeout"))
    Connection(namespace, context, kubeconfig).run(lambda client: wait(client, job, limit))


async def wait(client: "AsyncClient", name: str, limit: TimeLimit) -> int:
    """Return 0 once a job is Complete, 1 if it Failed, or 124 when the time is over."""
    job = await client.get(name)
    return await limit.apply(client, job, wait_for_end(client, job))
