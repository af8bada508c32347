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

    With --server, the API server tries the jobs that have none, in a dry run. It also knows the
    admission webhooks, and the jobs that exist, whose fields may not all change.

    Exit codes:
    0: the jobs can be created
    1: one of them cannot
    2: the cluster cannot be reached
    """
    documents = [one for one in file_documents(files, settings or []) if is_job(one)]
    good = [document for document in documents if print_verdict(document, problem_of(document))]
    code = 0 if len(good) == len(documents) else 1
    if not server:
        raise typer.Exit(code)
    Connection(namespace, context, kubeconfig).run(lambda client: ask(client, good, code))


def print_verdict(document: Document, problem: str) -> bool:
    """Print a job's problem, or that it has none. Return True if it has none."""
    metadata = child(document, "metadata")
    name = metadata.get("name") or metadata.get("generateName") or "a job without a name"
    verdict = Text(problem)
    if not problem:
        recovery = DDPJob.from_manifest(document).recovery
        verdict = Text.assemble(("ok", "green"), f", recovery: {recovery}")
    Output().print(Text.assemble((f"{name}: ", "bold"), verdict))
    return not problem


async def ask(client: "AsyncClient", documents: Sequence[Document], code: int) -> int:
    """Print why the API server would refuse jobs. Return 1 if it would refuse one, else `code`."""
    for document in documents:
        try:
            await client.apply([document], dry_run=True)
        except Rejected as error:
            Output().print(Text(str(error)))
            code = 1
        else:
            Output().print(f"{child(document, 'metadata').get('name', '')}: accepted by the server")
    return code
