"""`ddpjob validate`: the sentences of the API server and of the operator, without a cluster."""

from collections.abc import Sequence

import typer
from rich.text import Text

from ddpjob.cli.extras import require_extra
from ddpjob.cli.first_attempt import problem_of_pods
from ddpjob.cli.manifests import file_documents
from ddpjob.cli.options import Files, Settings
from ddpjob.cli.session import Output
from ddpjob.jobs.documents import Document, is_job
from ddpjob.jobs.user_job import DDPJob


def command(files: Files, settings: Settings = None) -> None:
    """Check manifests without a cluster, by the schema and the rules of the API server.

    The sentences are those with which the API server would refuse to create the jobs.

    Exit codes:
    0: the API server would accept the jobs
    1: it would refuse one
    """
    with require_extra("validate"):
        code = validate(file_documents(files, settings or []))
    raise typer.Exit(code)


def validate(documents: Sequence[Document]) -> int:
    """Print what is wrong with each job. Return 1 if something is, else 0."""
    from ddpjob.client.validation import validate as find_problems

    console = Output()
    code = 0
    for document in documents:
        if not is_job(document):
            continue
        name = (document.get("metadata") or {}).get("name") or "a job without a name"
        problems = find_problems(document)
        if not problems and (problem := problem_of_pods(document)):
            problems = [problem]
        if not problems:
            recovery = DDPJob.from_manifest(document).recovery
            what = Text.assemble((f"{name}: ", "bold"), ("ok", "green"), f", recovery: {recovery}")
            console.print(what)
        for problem in problems:
            code = 1
            console.print(Text.assemble((f"{name}: ", "bold"), problem))
    return code
