"""`ddpjob list`: what runs, why not, and how far it is."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import AllNamespaces, Context, Kubeconfig, Namespace
from ddpjob.cli.session import Output, note
from ddpjob.cli.view import DATA, Form, Watch, check_form, print_data, read_progress, watch_jobs
from ddpjob.client.positions import Positions
from ddpjob.core.api.names import Phase
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.jobs import job_table

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

# Limits of a list: the running jobs with a look at their logs, and the lines read of each log.
MAX_PROGRESS = 40
LIST_LINES = 20


def command(
    all_namespaces: AllNamespaces = False,
    form: Form = "table",
    watch: Watch = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List jobs: what runs, why not, and how far it is."""
    check_form(form, watch)
    Connection(namespace, context, kubeconfig).run(
        lambda client: list_jobs(client, all_namespaces=all_namespaces, form=form, watch=watch)
    )


async def list_jobs(client: "AsyncClient", *, all_namespaces: bool, form: str, watch: bool) -> int:
    """Print the jobs of a namespace. With `watch`, print them again after each change."""
    positions = Positions(client.api)
    if not watch:
        jobs = await client.list(all_namespaces=all_namespaces)
        if form in DATA:
            print_data([job.body() for job in jobs], form)
        elif jobs:
            lines = await _table(client, positions, jobs, form == "wide", all_namespaces)
            Output().print(*lines, sep="\n")
        else:
            place = "the cluster" if all_namespaces else f"namespace {client.namespace}"
            note(f"no jobs in {place}; ddpjob init prints a manifest to submit")
        return 0

    await watch_jobs(
        client.watch(all_namespaces=all_namespaces),
        lambda jobs: _table(client, positions, jobs, form == "wide", all_namespaces),
        until_finished=False,
    )
    return 0


async def _table(
    client: "AsyncClient",
    positions: Positions,
    jobs: Sequence[DDPJob],
    wide: bool,
    namespaces: bool,
) -> list[Text]:
    placed, progress = await asyncio.gather(positions.add_to(jobs), _read_progress(client, jobs))
    return job_table(placed, progress, datetime.now(UTC), wide=wide, namespaces=namespaces)


async def _read_progress(client: "AsyncClient", jobs: Sequence[DDPJob]) -> Mapping[str, Progress]:
    """Return the progress of running jobs, by their UIDs."""
    running = [job for job in jobs if job.phase == Phase.RUNNING][:MAX_PROGRESS]
    found = await asyncio.gather(*(read_progress(client, job, LIST_LINES) for job in running))
    return {job.uid: one for job, one in zip(running, found, strict=True)}
