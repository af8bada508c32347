"""Recognise the format of a text, and convert it."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ddpjob.convert import pytorchjob, sbatch, trainjob
from ddpjob.convert.draft import Conversion, Remark
from ddpjob.convert.marks import unmark
from ddpjob.convert.runtime import RUNTIMES
from ddpjob.convert.table import name_of
from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, SpecError
from ddpjob.jobs.documents import Document, read_documents

# A value that a program such as envsubst replaces in a template before `kubectl apply`.
PLACEHOLDER = re.compile(r"\$\{?\w")
FILL = "; the manifest is a template: fill it first, for example by envsubst < FILE"


# Kinds of other trainings, and what is said of them and of other objects beside a training.
TRAININGS = ("MPIJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob", "JobSet", "RayJob")
UNREAD = (
    "it is a training of a kind that ddpjob convert does not read",
    "move it by hand; the page migrate.md of the documentation has tables for some kinds",
)
NO_TRAINING = ("it is no training and stays as it is", "apply it from its own file")


class UnknownKind(SpecError):
    """Documents without a convertible one. The page has a section for each other kind."""

    # Below docs/. Its address is in the metadata of the package, which is not read here.
    page = "users/migrate.md"


def convert_text(text: str, runtime: str, image: str, name: str) -> list[Conversion]:
    """Return the DDPJobs of a text: manifests, or a script for sbatch. Raises SpecError.

    `runtime` is the text with the runtimes of TrainJobs. `image` is another image for the pods, or
    empty. `name` is the name of a script.
    """
    if text.startswith("#!") or "#SBATCH" in text:
        return [_convert_script(text, image, name)]
    return convert_documents(read_documents(text), read_documents(runtime), image)


def convert_documents(
    documents: Sequence[Document], runtimes: Sequence[Document] = (), image: str = ""
) -> list[Conversion]:
    """Return the DDPJobs of manifests. Raises SpecError if there are none."""
    jobs = [one for one in documents if _format(one)]
    known = [one for one in (*documents, *runtimes) if _is_runtime(one)]
    others = [one for one in documents if not _format(one) and not _is_runtime(one)]
    if not jobs:
        raise _no_training(documents)
    first, *rest = [_convert(one, known, image) for one in jobs]
    return [_with_others(first, others), *rest]


def _format(document: Dict) -> str:
    """Return the kind of a convertible document, or an empty string."""
    kind = (document.get("apiVersion"), document.get("kind"))
    known = (
        (pytorchjob.API_VERSION, pytorchjob.KIND),
        (trainjob.API_VERSION, trainjob.KIND),
    )
    return str(kind[1]) if kind in known else ""


def _is_runtime(document: Dict) -> bool:
    is_of_trainer = document.get("apiVersion") == trainjob.API_VERSION
    return is_of_trainer and document.get("kind") in RUNTIMES


def _convert_script(text: str, image: str, name: str) -> Conversion:
    try:
        return sbatch.convert(text, image, name)
    except SpecError as error:
        raise SpecError(unmark(str(error))) from error


def _convert(document: Dict, runtimes: Sequence[Dict], image: str) -> Conversion:
    try:
        if _format(document) == pytorchjob.KIND:
            return pytorchjob.convert(document, image)
        return trainjob.convert(document, runtimes, image)
    except SpecError as error:
        advice = FILL if PLACEHOLDER.search(str(error)) else ""
        raise SpecError(f"{name_of(document)}: {unmark(str(error))}{advice}") from error


def _with_others(conversion: Conversion, others: Sequence[Document]) -> Conversion:
    """Add a remark for each document without a training."""
    remarks = [
        Remark(name_of(one), *(UNREAD if one.get("kind") in TRAININGS else NO_TRAINING))
        for one in others
    ]
    return replace(conversion, remarks=(*conversion.remarks, *remarks))


def _no_training(documents: Sequence[Dict]) -> SpecError:
    found = [f"{one['kind']} ({one.get('apiVersion')})" for one in documents]
    kinds = ", ".join(dict.fromkeys(found)) or "nothing"
    problem = (
        f"expected a PyTorchJob ({pytorchjob.API_VERSION}), a TrainJob ({trainjob.API_VERSION}) or "
        f"a script for sbatch, got {kinds}"
    )
    if any(one.get("kind") == names.KIND for one in documents):
        return SpecError(f"{problem}; a DDPJob needs no conversion")
    return UnknownKind(problem)
