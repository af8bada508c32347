"""`ddpjob validate`: what is wrong with jobs, before anything is created."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ddpjob.cli.connection import Connection
from ddpjob.cli.first_attempt import problem_of
from ddpjob.cli.manifests import file_documents
from ddpjob.cli.options import Context, Files, Kubeconfig, Namespace, Settings
from ddpjob.cli.session import Output
from ddpjob.client.errors import Rejected
from ddpjob.core.api import names
from ddpjob.core.api.readers import child
from ddpjob.jobs.documents import Document, is_job
from ddpjob.jobs.user_job import DDPJob

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient


def command(
    files: Files,
    settings: Settings = None,
    server: Annotated[
        bool, typer.Option("--server", help="Ask the API server too, by a dry run.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check manifests without a cluster, and print the first mistake of each job.

    With --server, the API server tries the jobs without a mistake in a dry run. This includes its
    admission webhooks, and the rules for changes of a job that exists.

    Exit codes:
    0: the jobs can be created
    1: one of them cannot
    2: a file cannot be read, or the cluster cannot be reached
    """
    documents = [one for one in file_documents(files, settings or []) if is_job(one)]
    good = [document for document in documents if print_verdict(document, problem_of(document))]
    code = 0 if len(good) == len(documents) else 1
    if not server:
        raise typer.Exit(code)
    Connection(namespace, context, kubeconfig).run(lambda client: ask(client, good, code))


def print_verdict(document: Document, problem: str) -> bool:
    """Print a job's problem, or "ok" with advice. Return True if there is no problem."""
    if problem:
        print_line(document, Text(problem))
        return False
    job = DDPJob.from_manifest(document)
    print_line(document, Text.assemble(("ok", "green"), f", recovery: {job.recovery}"))
    for advice in job.advice:
        print_line(document, Text(advice))
    return True


def print_line(document: Document, verdict: Text) -> None:
    """Print a verdict after the name of its job."""
    metadata = child(document, "metadata")
    name = metadata.get("name") or metadata.get("generateName") or "a job without a name"
    Output().print(Text.assemble((f"{name}: ", "bold"), verdict))


async def ask(client: "AsyncClient", documents: Sequence[Document], code: int) -> int:
    """Print the API server's answers. Return 1 if it would refuse a job, else `code`."""
    for document in documents:
        try:
            await client.apply([document], dry_run=True)
        except Rejected as error:
            print_line(document, Text(f"refused by the API server: {reason_of(error, document)}"))
            code = 1
        else:
            print_line(document, Text("accepted by the API server"))
    return code


def reason_of(error: Rejected, document: Document) -> str:
    """Return the reason for a refusal, without the job's name at the beginning."""
    name = child(document, "metadata").get("name") or ""
    return str(error).removeprefix(f"{names.KIND} {name}".strip()).removeprefix(": ")
