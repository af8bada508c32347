"""`ddpjob completion`: the script of a shell, or the program that kubectl runs."""

from importlib.resources import files

from typer._completion_shared import get_completion_script

PROGRAM = "ddpjob"


def script(shell: str) -> str:
    """Return the completion script of a shell, or the program for `kubectl ddpjob`."""
    if shell == "kubectl":
        return files("ddpjob.cli").joinpath("kubectl_complete-ddpjob").read_text().rstrip()
    variable = f"_{PROGRAM.upper()}_COMPLETE"
    return get_completion_script(prog_name=PROGRAM, complete_var=variable, shell=shell)
