"""`ddpjob completion`: the script for a shell, or the program for kubectl."""

from importlib.resources import files
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from ddpjob.cli.options import require_choice

PROGRAM = "ddpjob"
SHELLS = ("bash", "zsh", "fish", "powershell", "kubectl")


def command(
    shell: Annotated[
        str, typer.Argument(help="bash, zsh, fish, powershell, or kubectl for kubectl ddpjob.")
    ],
) -> None:
    """Print a script with which the Tab key completes commands, options and names of jobs.

    Examples: source <(ddpjob completion bash);
    ddpjob completion kubectl > ~/.local/bin/kubectl_complete-ddpjob, and make that executable
    """
    require_choice("SHELL", shell, SHELLS)
    typer.echo(script(shell))


def script(shell: str) -> str:
    """Return the completion script of a shell, or the program for `kubectl ddpjob`."""
    if shell == "kubectl":
        return files("ddpjob.cli").joinpath("kubectl_complete-ddpjob").read_text().rstrip()
    variable = f"_{PROGRAM.upper()}_COMPLETE"
    return get_completion_script(prog_name=PROGRAM, complete_var=variable, shell=shell)
