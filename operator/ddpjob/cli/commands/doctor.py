"""`ddpjob doctor`: print what the checks of a cluster found."""

from contextlib import aclosing
from typing import TYPE_CHECKING

from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, Kubeconfig, Namespace
from ddpjob.cli.session import Output

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient
    from ddpjob.client.findings import Finding

SUBJECT_WIDTH = 14
NEXT_LINE = f"\n{'':<{SUBJECT_WIDTH + 4}}"


def command(
    namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Check the operator, your rights, and what jobs need in a namespace.

    A line with !! says what to do, and the exit code is then 1. A line with ? is about what you may
    not look at, or what is not known yet.
    """
    Connection(namespace, context, kubeconfig).run(doctor)


async def doctor(client: "AsyncClient") -> int:
    """Print what was found. Return 1 if there is something to do, else 0."""
    from ddpjob.client.doctor import examine

    console = Output()
    code = 0
    async with aclosing(examine(client)) as findings:
        async for finding in findings:
            console.print(_line(finding))
            if finding.is_problem:
                code = 1
    return code


def _line(finding: "Finding") -> Text:
    mark, style = ("ok", "green")
    if finding.is_problem:
        mark, style = ("!!", "bold red")
    elif finding.is_unknown:
        mark, style = ("?", "yellow")
    text = Text.assemble(
        (f"{mark:<4}", style), f"{finding.subject:<{SUBJECT_WIDTH}}", finding.found
    )
    if finding.advice:
        text.append(f"{NEXT_LINE}→ {finding.advice}")
    if finding.page:
        from ddpjob.show.advice import address_of

        text.append(f"{NEXT_LINE}  {address_of(finding.page) or f'docs/{finding.page}'}")
    return text
