"""`ddpjob status`: what a job does, why, and how far it is."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace
from ddpjob.cli.session import Output
from ddpjob.cli.view import DATA, Form, Watch, check_form, print_data, read_progress, watch_jobs
from ddpjob.client.errors import ClientError, NotFound
from ddpjob.client.positions import Positions
from ddpjob.core.api.readers import Dict
from ddpjob.core.observe.pods import read_pod
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.jobs import MESSAGE_WIDTH, job_lines

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

# Lines of a log read for a status. The last checkpoint may be some way back.
STATUS_LINES = 2000


def command(
    job: JobName,
    form: Form = "table",
    watch: Watch = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what a job does, why, how far it is, what ended its attempts, and what comes next."""
    check_form(form, watch)
    Connection(namespace, context, kubeconfig).run(
        lambda client: show_status(client, job, form, watch)
    )


async def show_status(client: "AsyncClient", name: str, form: str, watch: bool) -> int:
    """Print all facts about a job. Return 0."""
    job = await client.get(name)
    if form in DATA:
        print_data(job.body(), form)
        return 0
    positions = Positions(client.api)
    if not watch:
        Output().print(*await _job_lines(client, positions, job), sep="\n")
        return 0

    async def lines(jobs: Sequence[DDPJob]) -> list[Text]:
        if not jobs:
            raise NotFound(f"job {name} was deleted")
        return await _job_lines(client, positions, jobs[0])

    await watch_jobs(client.watch(name), lines, until_finished=True)
    return 0


async def _job_lines(client: "AsyncClient", positions: Positions, job: DDPJob) -> list[Text]:
    (job,) = await positions.add_to([job])
    progress = await read_progress(client, job, STATUS_LINES)
    bodies: Sequence[Dict] = ()
    # Without the right to list pods, the status of the job says enough.
    with suppress(ClientError):
        bodies = await client.pods(job)
    pods = [pod for pod in map(read_pod, bodies) if pod is not None]
    # Another program, or a file, gets the whole messages.
    width = MESSAGE_WIDTH if Output().is_terminal else None
    return list(job_lines(job, progress, pods, datetime.now(UTC), message_width=width))
