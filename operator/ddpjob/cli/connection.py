"""The cluster and the namespace chosen by the options of a command.

The client is imported late to keep `--help` quick.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """The user's cluster and namespace. None means the kubeconfig's choice."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    async def connect(self) -> "AsyncClient":
        """Return a client of the cluster. Raises NotConnected."""
        from ddpjob.client import AsyncClient

        return await AsyncClient.connect(
            kubeconfig=self.kubeconfig, context=self.context, namespace=self.namespace
        )

    def run(self, work: "Callable[[AsyncClient], Awaitable[int]]") -> NoReturn:
        """Run a command with a client of the cluster, and end the program with its exit code."""
        from ddpjob.cli.session import run_with_client

        raise typer.Exit(run_with_client(self.connect, work))

    def ask(self, question: "Callable[[AsyncClient], Awaitable[T]]") -> T:
        """Return the answer of a client of the cluster. A failure ends the program."""
        from ddpjob.cli.session import run_with_client

        answers: list[T] = []

        async def work(client: "AsyncClient") -> int:
            answers.append(await question(client))
            return 0

        code = run_with_client(self.connect, work)
        if code:
            raise typer.Exit(code)
        return answers[0]
