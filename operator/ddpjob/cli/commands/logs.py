"""`ddpjob logs`: the lines of all nodes, with coloured names of the nodes."""

import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace, Timeout, read_duration
from ddpjob.cli.pods import require_node, require_rank
from ddpjob.cli.session import Output, note
from ddpjob.cli.waiting import TimeLimit
from ddpjob.client.logs import LogChoice, LogLine
from ddpjob.core.api.readers import quoted
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.display import NODE_COLOURS

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

NODES = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class LogOptions:
    """How lines are shown."""

    follow: bool = False
    timestamps: bool = False
    prefix: bool = True
    timeout: int | None = None


def command(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has finished.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only the lines of this global rank.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="Only these nodes, such as 3 or 0-7. May be repeated."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Only the lines of this attempt; the first is 0.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only lines that are newer than 90s, 5m or 2h.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only the last lines of each pod.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print the time of each line, in UTC.")
    ] = False,
    prefix: Annotated[bool, typer.Option(help="Begin each line with its node, such as n0.")] = True,
    timeout: Timeout = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the output of all nodes of a job and all its attempts, in the order of time.

    With --follow, new pods are followed too, so the output goes on after a restart.

    Examples: ddpjob logs digits -f; ddpjob logs digits --no-prefix --rank 0
    """
    if attempt is not None and not (since is None and tail is None):
        message = "cannot be combined with --since or --tail"
        raise typer.BadParameter(message, param_hint="--attempt")
    choice = LogChoice(read_nodes(node or []), rank, attempt, read_duration(since, "--since"), tail)
    seconds = read_duration(timeout, "--timeout")
    if seconds is not None and not follow:
        raise typer.BadParameter("requires --follow", param_hint="--timeout")
    options = LogOptions(follow, timestamps, prefix, seconds)
    Connection(namespace, context, kubeconfig).run(
        lambda client: logs(client, job, choice, options)
    )


def read_nodes(texts: list[str]) -> frozenset[int]:
    """Return the indices of nodes, given as 3 or 0-7. Raises BadParameter."""
    found: set[int] = set()
    for text in texts:
        for part in text.split(","):
            match = NODES.fullmatch(part)
            if not match:
                message = f"must be an index of a node such as 3, or 0-7, got {quoted(part)}"
                raise typer.BadParameter(message, param_hint="--node")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                message = f"the first index must not be the larger one, got {quoted(part)}"
                raise typer.BadParameter(message, param_hint="--node")
            found |= set(range(first, last + 1))
    return frozenset(found)


async def logs(client: "AsyncClient", name: str, choice: LogChoice, options: LogOptions) -> int:
    """Print the lines that a user chose. Return 0, or 124 when the time is over."""
    job = await client.get(name)
    _require_existing(job, choice)
    if options.follow:
        limit = TimeLimit(options.timeout)
        return await limit.apply(client, job, _follow(client, job, choice, options), lambda _: 0)
    console = Output()
    printed = False
    async with aclosing(client.logs(name, choice)) as lines:
        async for line in lines:
            printed = True
            _print(console, line, options)
    if not printed:
        note(f"no line matches; job {name} is {job.phase}: {job.message}")
    return 0


async def _follow(
    client: "AsyncClient", job: DDPJob, choice: LogChoice, options: LogOptions
) -> int:
    """Print lines until the job has finished. Return 0."""
    console = Output()
    shown = ("", "")
    async with aclosing(client.follow(job.name, choice)) as items:
        async for item in items:
            if isinstance(item, LogLine):
                _print(console, item, options)
            elif (item.phase, item.reason) != shown:
                shown = (item.phase, item.reason)
                note(f"{job.name} {item.phase}: {item.message}")
    return 0


def _require_existing(job: DDPJob, choice: LogChoice) -> None:
    """Raise BadParameter for a node or rank that the job does not have."""
    # An earlier attempt may have had more nodes.
    if choice.attempt is not None:
        return
    if choice.nodes:
        require_node(job, max(choice.nodes))
    if choice.rank is not None:
        require_rank(job, choice.rank)


def _print(console: Console, line: LogLine, options: LogOptions) -> None:
    text = Text()
    if options.prefix:
        text.append(f"[n{line.index}] ", style=NODE_COLOURS[line.index % len(NODE_COLOURS)])
    if options.timestamps:
        text.append(f"{line.time} ", style="dim")
    # The script's own colours stay.
    text.append_text(Text.from_ansi(line.text) if "\x1b" in line.text else Text(line.text))
    console.print(text)
