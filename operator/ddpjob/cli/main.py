"""The program `ddpjob`: the table of its commands. Each command is a module of `commands`."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddpjob import __version__
from ddpjob.cli.usage import Command, without_types

# The sections of `ddpjob --help`, with the short help of each command. The command NAME is the
# module `commands/NAME.py`.
COMMANDS = {
    "Jobs in a cluster": {
        "submit": "Submit the jobs of manifests.",
        "list": "List jobs.",
        "status": "Show all that concerns a job.",
        "logs": "Print the output of a job's nodes.",
        "exec": "Run a command in the pod of a rank.",
        "cp": "Copy files out of the pod of a rank.",
        "plot": "Draw the curves of jobs as a picture.",
        "ui": "Show jobs in a browser.",
        "wait": "Wait for the end of a job.",
        "suspend": "Stop a job and keep it.",
        "resume": "Continue a suspended job.",
        "retry": "Take a Failed job up again.",
        "scale": "Change the number of nodes.",
        "restart": "Run a job again.",
        "delete": "Delete jobs and their pods.",
        "doctor": "Find out why jobs do not run.",
    },
    "Manifests": {
        "init": "Print a manifest.",
        "validate": "Check manifests without a cluster.",
        "render": "Print the pods of a job.",
        "convert": "Turn other manifests into DDPJobs.",
    },
    "On this machine": {
        "run": "Run a job on this machine.",
        "completion": "Print a completion script for a shell.",
    },
    "Operator": {
        "operator": "Run the operator.",
    },
}


# The options for a cluster. Each takes a value, and may also stand before the command, as with
# kubectl. `options.py` declares them, and is not imported for `--help`.
LONG_OPTIONS = ("--namespace", "--context", "--kubeconfig")
SHORT_OPTION = "-n"


def load(name: str) -> Any:
    """Import the module of a command, and return the command with its options."""
    module = import_module(f"ddpjob.cli.commands.{name}")
    one = typer.Typer(add_completion=False)
    one.command(name, cls=Command)(module.command)
    return typer.main.get_command(one)


def with_options_after_command(words: list[str]) -> list[str]:
    """Return the words of a command line with the options for a cluster after the command."""
    rest, options = words, list[str]()
    while rest and (count := _words_of_option(rest[0])):
        options += rest[:count]
        rest = rest[count:]
    # Without a command there is the help, or only an option such as --help.
    has_command = rest and not rest[0].startswith("-")
    return [rest[0], *options, *rest[1:]] if has_command else rest


def _words_of_option(word: str) -> int:
    """Return the number of words of an option for a cluster, or 0 for another word."""
    if word in (*LONG_OPTIONS, SHORT_OPTION):
        return 2
    has_value = word.startswith((*(f"{name}=" for name in LONG_OPTIONS), SHORT_OPTION))
    return 1 if has_value else 0


class Commands(TyperGroup):
    """Imports the module of a command only when the command is used, to keep `--help` quick."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_options_after_command(args))

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else command, rest


app = typer.Typer(
    name="ddpjob",
    cls=Commands,
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


def _not_loaded() -> None:
    """Stand for a command in the help until its module is imported."""


for section, commands in COMMANDS.items():
    for command_name, short_help in commands.items():
        app.command(command_name, short_help=short_help, rich_help_panel=section)(_not_loaded)


if __name__ == "__main__":
    app()
