"""`ddpjob doctor`: print what the checks of a cluster found."""

from contextlib import aclosing
from typing import TYPE_CHECKING

from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, Kubeconfig, Namespace
from ddpjob.cli.session import Output

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient
    from ddpjob.client.doctor import Finding

SUBJECT_WIDTH = 14


def command(
    namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Check the operator, your rights, and what jobs need in a namespace.

    Each line is ok, or says what to do. Exit code 1 tells that there is something to do.
    """
    Connection(namespace, context, kubeconfig).run(doctor)


async def doctor(client: "AsyncClient") -> int:
    """Print a line for each finding. Return 1 if there is something to do, else 0."""
    from ddpjob.client.doctor import examine

    console = Output()
    code = 0
    async with aclosing(examine(client)) as findings:
        async for finding in findings:
            console.print(_line(finding))
            if finding.advice:
                code = 1
    return code


def _line(finding: "Finding") -> Text:
    mark, style = ("ok", "green")
    if finding.advice:
        mark, style = ("!!", "bold red")
    elif finding.is_hidden:
        mark, style = ("?", "yellow")
    text = Text.assemble(
        (f"{mark:<4}", style), f"{finding.subject:<{SUBJECT_WIDTH}}", finding.found
    )
    if finding.advice:
        text.append(f"\n{'':<{SUBJECT_WIDTH + 4}}→ {finding.advice}")
    return text
