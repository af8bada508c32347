"""`ddpjob ui`: serve the pages on this machine until Ctrl-C."""

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.extras import require_extra
from ddpjob.cli.options import AllNamespaces, Context, Kubeconfig, Namespace
from ddpjob.cli.session import run_until_interrupted

if TYPE_CHECKING:
    from uvicorn import Server

    from ddpjob.ui.sources import Source

HOST = "127.0.0.1"


def command(
    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of local runs, such as ddpjob-runs, in place of a cluster.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    all_namespaces: AllNamespaces = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. 0: any free one.")
    ] = 8090,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show jobs in a browser: a list, and for each job its state, attempts, curves and logs.

    The pages are on this machine only, change nothing, and have the rights of your kubeconfig. Open
    the address that the command prints.
    """
    with require_extra("ui"):
        from ddpjob.ui.app import server
        from ddpjob.ui.sources import ClusterSource, LocalSource

    if runs:
        from ddpjob.client.local import LocalClient

        raise typer.Exit(run_until_interrupted(serve(LocalSource(LocalClient(runs)), port, server)))
    Connection(namespace, context, kubeconfig).run(
        lambda client: serve(ClusterSource(client, all_namespaces=all_namespaces), port, server)
    )


async def serve(source: "Source", port: int, server: "Callable[[Source, str], Server]") -> int:
    """Print the address of the pages, and serve them until Ctrl-C. Port 0 means any free one."""
    listening = listen(port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    typer.echo(f"Jobs of {source.title}: http://{HOST}:{port}/?token={token}")
    if "SSH_CONNECTION" in os.environ:
        forward = f"ssh -N -L {port}:{HOST}:{port} {socket.gethostname()}"
        typer.echo(f"On your own machine, first run: {forward}")
    typer.echo("Ctrl-C ends this program. The jobs go on.")
    await server(source, token).serve(sockets=[listening])
    return 0


def listen(port: int) -> socket.socket:
    """Return a socket for connections from this machine only. Raises BadParameter."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        message = f"port {port} cannot be used: {error.strerror}; choose another one, or 0 for any"
        raise typer.BadParameter(message, param_hint="--port") from error
