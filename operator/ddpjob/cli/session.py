"""Run a command with a client of the cluster, and print its errors as one sentence."""

import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

from ddpjob.client.errors import ClientError
from ddpjob.core.api.readers import SpecError

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

# Exit codes: the request failed or was refused; Ctrl-C; the reader of a pipe has ended.
REFUSED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def run_with_client(
    connect: "Callable[[], Awaitable[AsyncClient]]",
    work: "Callable[[AsyncClient], Awaitable[int]]",
) -> int:
    """Connect, run a command, and return its exit code."""

    async def connected() -> int:
        async with await connect() as client:
            return await work(client)

    return run_until_interrupted(connected())


def run_until_interrupted(work: Coroutine[Any, Any, int]) -> int:
    """Run a command, and return its exit code."""
    # Imported late to keep `--help` quick.
    import asyncio

    try:
        return asyncio.run(work)
    except (ClientError, SpecError) as error:
        print_error(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        end_with_the_pipe()


def end_with_the_pipe() -> NoReturn:
    """End the command, since the reader of its output has ended."""
    # Otherwise Python reports an error when it flushes its output at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(PIPE_CLOSED)


def print_error(message: str) -> None:
    text = Text.assemble(("error: ", "bold red"), message)
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


class Output(Console):
    """Standard output. Text is printed as it is, and lines are not wrapped."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        end_with_the_pipe()


def note(message: str) -> None:
    """Print what the command does, apart from its output."""
    Console(stderr=True, highlight=False).print(Text(message, style="dim"), soft_wrap=True)
