"""`ddpjob ui`: serve the pages on this machine until Ctrl-C."""

import secrets
import socket

import typer
import uvicorn

from ddpjob.ui.app import create_app
from ddpjob.ui.sources import Source

HOST = "127.0.0.1"


async def serve(source: Source, port: int) -> int:
    """Print the address of the pages, and serve them. Port 0 means any free one. Return 0."""
    listening = listen(port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    typer.echo(f"Jobs of {source.title}: http://{HOST}:{port}/?token={token}")
    typer.echo("Ctrl-C ends this program. The jobs go on.")
    config = uvicorn.Config(create_app(source, token, port), log_level="warning", access_log=False)
    await uvicorn.Server(config).serve(sockets=[listening])
    return 0


def listen(port: int) -> socket.socket:
    """Return a socket that only this machine can reach. Raises BadParameter."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        message = f"port {port} cannot be used: {error.strerror}; choose another one, or 0 for any"
        raise typer.BadParameter(message, param_hint="--port") from error
