"""The application: its name, its help, and the sections of it."""

from collections.abc import Iterable
from typing import Annotated

import typer

from ddpjob import __version__
from ddpjob.core.api.readers import did_you_mean, quoted

# Sections of `ddpjob --help`.
CLUSTER = "Jobs in a cluster"
MANIFESTS = "Manifests"
HERE = "On this machine"
OPERATOR = "Operator"

app = typer.Typer(
    name="ddpjob",
    help="Run PyTorch DistributedDataParallel jobs on Kubernetes or on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def require_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raise BadParameter if a value is not one of the choices."""
    known = list(choices)
    if value not in known:
        hint = did_you_mean(value, known)
        message = f"must be one of {', '.join(known)}, got {quoted(value)}{hint}"
        raise typer.BadParameter(message, param_hint=option)
