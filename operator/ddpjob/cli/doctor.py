"""`ddpjob doctor`: print what the checks of a cluster found."""

from contextlib import aclosing

from rich.text import Text

from ddpjob.cli.session import Output
from ddpjob.client import AsyncClient
from ddpjob.client.doctor import Finding, examine

SUBJECT_WIDTH = 14


async def doctor(client: AsyncClient) -> int:
    """Print a line for each finding. Return 1 if there is something to do, else 0."""
    console = Output()
    code = 0
    async with aclosing(examine(client)) as findings:
        async for finding in findings:
            console.print(_line(finding))
            if finding.advice:
                code = 1
    return code


def _line(finding: Finding) -> Text:
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
