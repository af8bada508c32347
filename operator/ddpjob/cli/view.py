"""The options of `ddpjob list` and `status`, and a view of jobs updated after each change."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
import yaml
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ddpjob.cli.options import require_choice
from ddpjob.cli.session import Output
from ddpjob.client.errors import ClientError
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.user_job import DDPJob

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

# Forms of output for people and for programs.
TABLES = ("table", "wide")
DATA = ("json", "yaml", "name")

Form = Annotated[str, typer.Option("--output", "-o", help="table, wide, json, yaml or name.")]
Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Show it again after each change, until Ctrl-C.")
]

Changes = AsyncGenerator[list[DDPJob], None]
Lines = Callable[[Sequence[DDPJob]], Awaitable[list[Text]]]

# Seconds between two looks at the logs while a command watches.
REFRESH_SECONDS = 5.0


def check_form(form: str, watch: bool) -> None:
    """Raise BadParameter for an unknown form, and for data together with --watch."""
    require_choice("--output", form, (*TABLES, *DATA))
    if watch and form in DATA:
        raise typer.BadParameter(f"cannot be combined with -o {form}", param_hint="--watch")


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


async def watch_jobs(changes: Changes, lines: Lines, *, until_finished: bool) -> None:
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


async def read_progress(client: "AsyncClient", job: DDPJob, lines: int) -> Progress:
    """Return the progress of a job. Without the right to read logs, nothing is known."""
    try:
        return await client.progress(job, tail=lines)
    except ClientError:
        return Progress()


def print_data(found: Any, form: str) -> None:
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
    """Return several objects as a List, as kubectl does."""
    if isinstance(found, list):
        return {"apiVersion": "v1", "kind": "List", "items": found}
    return found
