"""`ddpjob render`: print the objects of a job's first attempt."""

from collections.abc import Sequence
from typing import Annotated

import typer
import yaml

from ddpjob.cli.first_attempt import objects_of
from ddpjob.cli.manifests import file_documents
from ddpjob.cli.options import Files, Settings, require_choice
from ddpjob.cli.session import REFUSED, print_error
from ddpjob.core.api.readers import SpecError
from ddpjob.core.render.pod_context import Settings as PodSettings
from ddpjob.jobs.documents import Document, is_job


def command(
    files: Files,
    settings: Settings = None,
    node: Annotated[
        int | None, typer.Option(min=0, show_default="all", help="Only the pod of this node.")
    ] = None,
    pod_security: Annotated[
        str, typer.Option(help="Pod Security level that the operator's chart has: none, restricted")
    ] = "none",
) -> None:
    """Print the Service and the pods that the operator would create for the first attempt."""
    require_choice("--pod-security", pod_security, ("none", "restricted"))
    documents = file_documents(files, settings or [])
    raise typer.Exit(render(documents, node, restricted=pod_security == "restricted"))


def render(documents: Sequence[Document], node: int | None, *, restricted: bool) -> int:
    """Print the objects of each job. Return 2 if there cannot be any, else 0."""
    try:
        found = []
        for document in documents:
            if is_job(document):
                found += list(objects_of(document, node, PodSettings(restricted=restricted)))
    except SpecError as error:
        print_error(str(error))
        return REFUSED
    print(yaml.safe_dump_all(found, sort_keys=False), end="")
    return 0
