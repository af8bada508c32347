"""`ddpjob exec`: run a command in the pod of a rank."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, JobName, Kubeconfig, Namespace
from ddpjob.cli.pods import find_pod, require_kubectl
from ddpjob.cli.session import REFUSED, print_error

# The image has /bin/sh, because the agent starts with it. It may also have bash.
SHELL = ("/bin/sh", "-c", "command -v bash > /dev/null && exec bash; exec sh")


def command(
    job: JobName,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND…", help="Command with its arguments.", show_default="a shell"
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, show_default="0", help="In the pod of this global rank."),
    ] = None,
    node: Annotated[int | None, typer.Option(min=0, help="In the pod of this node.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Run a command, or a shell, in the running pod of a rank. This becomes `kubectl exec`.

    It runs in the container trainer, in the working directory of the job. It is no rank: it does
    not have the variables that torchrun gives to each rank, such as RANK and MASTER_ADDR.

    Examples: ddpjob exec train; ddpjob exec train --rank 3 -- nvidia-smi -L
    """
    if rank is not None and node is not None:
        raise typer.BadParameter("cannot be combined with --rank", param_hint="--node")
    require_kubectl()
    connection = Connection(namespace, context, kubeconfig)
    pod = connection.ask(lambda client: find_pod(client, job, rank=rank or 0, node=node))
    terminal = ("--tty",) if has_terminal() else ()
    become(pod.command(connection, words or SHELL, "--stdin", *terminal))


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def become(words: list[str]) -> NoReturn:
    """Replace this program by another one. Its exit code then counts."""
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print_error(f"cannot run {words[0]}: {error.strerror}")
        raise typer.Exit(REFUSED) from error
