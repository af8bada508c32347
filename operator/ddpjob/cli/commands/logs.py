"""`ddpjob logs`: the lines of all nodes, with coloured names of the nodes."""

import re
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace, Timeout, read_duration
from ddpjob.cli.pods import require_node, require_rank
from ddpjob.cli.session import Output, note
from ddpjob.cli.waiting import TimeLimit, place_of
from ddpjob.client.logs import LogChoice, LogLine
from ddpjob.core.api.readers import quoted
from ddpjob.jobs.lost_logs import lost_attempts, previous_attempt, require_attempt, why_lost
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.advice import next_commands
from ddpjob.show.display import NODE_COLOURS
from ddpjob.show.jobs import attempt_lines
from ddpjob.show.text import command_lines

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

NODES = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class LogOptions:
    """The format of lines, and whether the lines of the previous attempt are shown."""

    follow: bool = False
    timestamps: bool = False
    prefix: bool = True
    previous: bool = False
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
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Only the lines of the attempt before.")
    ] = False,
    since: Annotated[
        str | None, typer.Option(help="Only lines that are newer than 90s, 5m or 2h.")
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(min=0, help="Only the last lines of each pod or attempt."),
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

    The log of a pod is gone when the pod is deleted.

    Examples: ddpjob logs digits -f; ddpjob logs digits --no-prefix --rank 0
    """
    if previous and (follow or attempt is not None):
        message = "cannot be combined with --follow or --attempt"
        raise typer.BadParameter(message, param_hint="--previous")
    if (previous or attempt is not None) and since is not None:
        hint = "--previous" if previous else "--attempt"
        raise typer.BadParameter("cannot be combined with --since", param_hint=hint)
    if follow and attempt is not None and tail is not None:
        message = "cannot be combined with --follow and --attempt"
        raise typer.BadParameter(message, param_hint="--tail")
    choice = LogChoice(read_nodes(node or []), rank, attempt, read_duration(since, "--since"), tail)
    seconds = read_duration(timeout, "--timeout")
    if seconds is not None and not follow:
        raise typer.BadParameter("requires --follow", param_hint="--timeout")
    options = LogOptions(follow, timestamps, prefix, previous, seconds)
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
    """Print the chosen lines. Return 0, or 124 when the time is over."""
    job = await client.get(name)
    choice = replace(choice, ranks_per_node=job.processes_per_node)
    if options.previous:
        choice = replace(choice, attempt=previous_attempt(job))
    _require_existing(job, choice)
    if options.follow:
        limit = TimeLimit(options.timeout)
        return await limit.apply(client, job, _follow(client, job, choice, options), lambda _: 0)
    await _print_logs(client, job, choice, options)
    return 0


async def _print_logs(
    client: "AsyncClient", job: DDPJob, choice: LogChoice, options: LogOptions
) -> None:
    """Print the lines written by the pods so far, and name the lost logs."""
    console = Output()
    nodes = choice.nodes if choice.rank is None else {choice.rank // choice.ranks_per_node}
    # The rank may have written nothing while its node has a log, so read the node's whole log.
    wide = replace(choice, rank=None, nodes=frozenset(nodes))
    seen = set()
    printed = False
    async with aclosing(client.logs(job.name, wide)) as lines:
        async for line in lines:
            seen.add((line.attempt, line.index))
            if choice.has_line(line):
                printed = True
                _print(console, line, options)
    lost = ""
    if choice.attempt is not None and choice.tail != 0:
        lost = why_lost(job, choice.attempt, nodes, seen)
    elif not nodes and choice.since is None and choice.tail is None:
        lost = lost_attempts(job, seen)
    if lost:
        note(lost)
    elif not printed:
        note(f"no line matches; job {job.name} is {job.phase}: {job.message}")


async def _follow(
    client: "AsyncClient", job: DDPJob, choice: LogChoice, options: LogOptions
) -> int:
    """Print lines until the job has finished, then its attempts and the next commands. Return 0."""
    console = Output()
    shown = ("", "")
    async with aclosing(client.follow(job.name, choice)) as items:
        async for item in items:
            if isinstance(item, LogLine):
                _print(console, item, options)
                continue
            job = item
            if (job.phase, job.reason) != shown:
                shown = (job.phase, job.reason)
                note(f"{job.name} {job.phase}: {job.message}")
    for text in attempt_lines(job.status):
        note(text.plain)
    for command in command_lines(next_commands(job, place_of(client, job))):
        note(command)
    return 0


def _require_existing(job: DDPJob, choice: LogChoice) -> None:
    """Raise BadParameter or SpecError for a node, rank or attempt outside the job."""
    # An earlier attempt may have had more nodes.
    if choice.attempt is not None:
        require_attempt(job, choice.attempt)
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
