"""`ddpjob resume`: continue a suspended job."""

from typing import TYPE_CHECKING

from ddpjob.cli.checkpoints import beginning
from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace
from ddpjob.cli.session import Output
from ddpjob.core.api.names import Phase
from ddpjob.jobs.user_job import DDPJob

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Continue a suspended job from its last checkpoint."""
    Connection(namespace, context, kubeconfig).run(lambda client: resume(client, job))


async def resume(client: "AsyncClient", name: str) -> int:
    before = await client.get(name)
    if not before.spec.get("suspend"):
        Output().print(_why_not_resumed(before))
        return 0
    job = await client.resume(name)
    Output().print(f"{name} resumed from {beginning(job)}")
    return 0


def _why_not_resumed(job: DDPJob) -> str:
    """Return the sentence about a job without spec.suspend."""
    if job.phase == Phase.SUSPENDED:
        return f"{job.name} is being resumed already"
    text = f"{job.name} is not suspended, but {job.phase}: nothing to resume"
    if job.phase == Phase.FAILED:
        text += f"; ddpjob retry {job.name} takes it up again"
    elif job.phase == Phase.COMPLETE:
        text += f"; ddpjob restart {job.name} runs it again"
    return text
