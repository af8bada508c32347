"""The options shared by several commands."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.core.api.readers import did_you_mean, quoted

DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


def chosen(context: typer.Context) -> Connection:
    """Return the connection chosen by the options before the cursor."""
    found = context.params
    return Connection(found.get("namespace"), found.get("context"), found.get("kubeconfig"))


# typer passes the context by its type.
def complete_namespaces(context: typer.Context, incomplete: str) -> list[str]:
    from ddpjob.cli.complete import namespaces

    return namespaces(chosen(context), incomplete)


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    from ddpjob.cli.complete import jobs

    return jobs(chosen(context), incomplete)


Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace of the jobs.",
        show_default="that of the kubeconfig's context",
        autocompletion=complete_namespaces,
        rich_help_panel="Cluster",
    ),
]
AllNamespaces = Annotated[
    bool,
    typer.Option("--all-namespaces", "-A", help="All namespaces.", rich_help_panel="Cluster"),
]
Context = Annotated[
    str | None,
    typer.Option(
        help="Context of the kubeconfig.", show_default="current", rich_help_panel="Cluster"
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="Kubeconfig file.",
        show_default="$KUBECONFIG, else ~/.kube/config",
        rich_help_panel="Cluster",
    ),
]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=complete_jobs)
]

Timeout = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        show_default="none",
        help="Longest time to wait, such as 90s, 5m or 2h. Then the exit code is 124, and the job "
        "goes on.",
    ),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a field of the jobs, such as spec.nodes=4. May be repeated.",
    ),
]

Files = Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests, or - for stdin.")]


def require_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raise BadParameter if a value is not one of the choices."""
    known = list(choices)
    if value not in known:
        hint = did_you_mean(value, known)
        message = f"must be one of {', '.join(known)}, got {quoted(value)}{hint}"
        raise typer.BadParameter(message, param_hint=option)


def read_duration(text: str | None, option: str) -> int | None:
    """Return the seconds of a duration such as 90s, 5m or 1h30m. Raises BadParameter."""
    if text is None:
        return None
    parts = DURATION.fullmatch(text)
    if not text or not parts:
        message = f"must be a duration such as 90s, 5m or 1h30m, got {quoted(text)}"
        raise typer.BadParameter(message, param_hint=option)
    hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return 3600 * hours + 60 * minutes + seconds


def read_pairs(options: Iterable[str], hint: str, form: str) -> list[tuple[str, str]]:
    """Return the names and values of options such as --env NAME=VALUE. Raises BadParameter."""
    pairs = []
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"must be {form}, got {quoted(option)}", param_hint=hint)
        pairs.append((name, value))
    return pairs
