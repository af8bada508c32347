"""`ddpjob list` and `ddpjob status`: what runs, why not, and how far it is."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any, Self

import yaml
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ddpjob.cli.session import Output, note
from ddpjob.client import AsyncClient, ClientError, NotFound
from ddpjob.core.api.names import Phase
from ddpjob.core.api.readers import Dict
from ddpjob.core.observe.pods import read_pod
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.jobs import MESSAGE_WIDTH, job_lines, job_table

FORMATS = ("table", "wide", "json", "yaml", "name")

Changes = AsyncGenerator[list[DDPJob], None]
Lines = Callable[[Sequence[DDPJob]], Awaitable[list[Text]]]

# Running jobs whose logs are read for a list, and how many lines of each.
MAX_PROGRESS = 40
LIST_LINES = 20

# Lines of a log that are read for a status. The last checkpoint may be some way back.
STATUS_LINES = 2000

# Seconds between two looks at the logs while a command watches.
REFRESH_SECONDS = 5.0


async def list_jobs(client: AsyncClient, *, all_namespaces: bool, form: str, watch: bool) -> int:
    """Print the jobs of a namespace, and again after each change if it watches."""
    if not watch:
        jobs = await client.list(all_namespaces=all_namespaces)
        if form in ("json", "yaml", "name"):
            _dump([job.body() for job in jobs], form)
        elif jobs:
            lines = await _table(client, jobs, form == "wide", all_namespaces)
            Output().print(*lines, sep="\n")
        else:
            place = "the cluster" if all_namespaces else f"namespace {client.namespace}"
            note(f"no jobs in {place}; ddpjob init prints a manifest to submit")
        return 0

    await _watch(
        client.watch(all_namespaces=all_namespaces),
        lambda jobs: _table(client, jobs, form == "wide", all_namespaces),
        until_finished=False,
    )
    return 0


async def show_status(client: AsyncClient, name: str, form: str, watch: bool) -> int:
    """Print all that concerns a job. Return 0."""
    job = await client.get(name)
    if form in ("json", "yaml", "name"):
        _dump(job.body(), form)
        return 0
    if not watch:
        Output().print(*await _job_lines(client, job), sep="\n")
        return 0

    async def lines(jobs: Sequence[DDPJob]) -> list[Text]:
        if not jobs:
            raise NotFound(f"job {name} was deleted")
        return await _job_lines(client, jobs[0])

    await _watch(client.watch(name), lines, until_finished=True)
    return 0


class Screen:
    """Shows lines in place on a terminal. Elsewhere it prints them when they have changed."""

    def __init__(self) -> None:
        self._console = Output()
        self._live = Live(console=self._console, auto_refresh=False)
        self._printed: list[str] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, lines: Sequence[Text]) -> None:
        if self._console.is_terminal:
            self._live.update(Group(*lines), refresh=True)
            return
        texts = [line.plain for line in lines]
        if texts != self._printed:
            self._console.print(*lines, sep="\n")
        self._printed = texts


async def _watch(changes: Changes, lines: Lines, *, until_finished: bool) -> None:
    """Show the lines of jobs after each change, and of running jobs every few seconds."""
    async with aclosing(changes):
        jobs = await anext(changes)
        change = asyncio.ensure_future(anext(changes))
        try:
            with Screen() as screen:
                while True:
                    screen.show(await lines(jobs))
                    if until_finished and jobs[0].finished:
                        return
                    await asyncio.wait([change], timeout=REFRESH_SECONDS)
                    if change.done():
                        jobs = change.result()
                        change = asyncio.ensure_future(anext(changes))
        finally:
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)


async def _table(
    client: AsyncClient, jobs: Sequence[DDPJob], wide: bool, namespaces: bool
) -> list[Text]:
    running = [job for job in jobs if job.phase == Phase.RUNNING][:MAX_PROGRESS]
    found = await asyncio.gather(*(read_progress(client, job, LIST_LINES) for job in running))
    progress = {job.uid: one for job, one in zip(running, found, strict=True)}
    return job_table(jobs, progress, datetime.now(UTC), wide=wide, namespaces=namespaces)


async def _job_lines(client: AsyncClient, job: DDPJob) -> list[Text]:
    progress = await read_progress(client, job, STATUS_LINES)
    bodies: Sequence[Dict] = ()
    # Without the right to list pods, the status of the job says enough.
    with suppress(ClientError):
        bodies = await client.pods(job)
    pods = [pod for pod in map(read_pod, bodies) if pod is not None]
    # Another program, or a file, gets the whole messages.
    width = MESSAGE_WIDTH if Output().is_terminal else None
    return list(job_lines(job, progress, pods, datetime.now(UTC), message_width=width))


async def read_progress(client: AsyncClient, job: DDPJob, lines: int) -> Progress:
    """Return how far a job is. Without the right to read logs, nothing is known."""
    try:
        return await client.progress(job, tail=lines)
    except ClientError:
        return Progress()


def _dump(found: Any, form: str) -> None:
    """Print objects as JSON, as YAML, or their names."""
    if form == "json":
        text = json.dumps(_as_list(found), indent=2)
    elif form == "yaml":
        text = yaml.safe_dump(_as_list(found), sort_keys=False).rstrip()
    else:
        bodies = found if isinstance(found, list) else [found]
        text = "\n".join(f"ddpjob/{body['metadata']['name']}" for body in bodies)
    print(text)


def _as_list(found: Any) -> Any:
    """Return several objects as kubectl does."""
    if isinstance(found, list):
        return {"apiVersion": "v1", "kind": "List", "items": found}
    return found
