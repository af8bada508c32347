"""`ddpjob ui`: serve the pages on this machine until Ctrl-C."""

import os
import secrets
import socket

import typer
import uvicorn

from ddpjob.ui.app import create_app
from ddpjob.ui.sources import Source

HOST = "127.0.0.1"

# Seconds for the answers that are being made when the program is to end.
END_SECONDS = 1


async def serve(source: Source, port: int) -> int:
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
    """Return a socket that only this machine can reach. Raises BadParameter."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        message = f"port {port} cannot be used: {error.strerror}; choose another one, or 0 for any"
        raise typer.BadParameter(message, param_hint="--port") from error


def server(source: Source, token: str) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(source, token),
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=END_SECONDS,
    )
    return uvicorn.Server(config)
