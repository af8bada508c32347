"""Advice on the reason of a job, from the row of the reason."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from urllib.parse import urljoin

from ddpjob.core.api.reasons import PAGE, Reason
from ddpjob.jobs.user_job import DDPJob

# Longest advice in a line of a terminal, in characters. The page has the longer ones.
LONGEST = 100

LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def advice_facts(reason: str) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the advice on a reason, and for the address of its description.

    Yield nothing for a reason without advice. A reason without a row is Kubernetes' own.
    """
    row = next((row for row in Reason if row == reason), None)
    if not reason or (row and not row.advice):
        return
    advice = plain_text(row.advice) if row else ""
    if len(advice) <= LONGEST:
        yield "What to do", advice
    yield "See", address_of(f"{PAGE}#{row.anchor}" if row else PAGE)


def next_commands(job: DDPJob, place: str = "") -> dict[str, str]:
    """Return useful commands after the end of a job, each with a description.

    `place` is the option for the namespace, if it is needed.
    """
    name = f"{job.name}{place}"
    if job.succeeded:
        kept = "; checkpoints stay" if job.checkpoint else ""
        return {
            f"ddpjob logs {name}": "prints its output again",
            f"ddpjob delete {name}": "deletes the job with its pods" + kept,
        }
    failure = job.status.last_failure
    attempt = "" if failure.attempt is None else f" --attempt {failure.attempt}"
    rank = "" if failure.rank is None else f" --rank {failure.rank}"
    return {
        f"ddpjob logs {name}{attempt}{rank}": "prints the output of the failure",
        f"ddpjob retry {name}": "takes the job up again",
    }


def plain_text(markdown: str) -> str:
    """Return a text of one paragraph without the marks of its links and of its code."""
    return LINK.sub(r"\1", markdown).replace("`", "")


def address_of(page: str) -> str:
    """Return the address of a page below docs/, or an empty string if it is not known."""
    root = _documentation()
    return urljoin(root, page) if root else ""


@cache
def _documentation() -> str:
    """Return the address of docs/README.md, as the package's own metadata has it."""
    try:
        urls = metadata("ddpjob").get_all("Project-URL", [])
    except PackageNotFoundError:
        # The folder of the source is on the path, and nothing is installed.
        return ""
    for url in urls:
        label, _, address = str(url).partition(", ")
        if label == "Documentation":
            return address
    return ""
