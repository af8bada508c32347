"""`ddpjob validate`: the sentences of the API server and of the operator, without a cluster."""

from collections.abc import Sequence

from rich.text import Text

from ddpjob.cli.render import problem_of_pods
from ddpjob.cli.session import Output
from ddpjob.client.validation import validate as find_problems
from ddpjob.jobs.documents import Document, is_job
from ddpjob.jobs.user_job import DDPJob


def validate(documents: Sequence[Document]) -> int:
    """Print what is wrong with each job. Return 1 if something is, else 0."""
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
