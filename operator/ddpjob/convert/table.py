"""Tables of fields: a row for each field of an object says what becomes of it.

A row is a function of the draft, the value and its path. Each field without a row leaves a remark,
so nothing is lost in silence.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ddpjob.convert.draft import Draft, require_integer
from ddpjob.core.api.readers import Dict, did_you_mean, mapping_or_empty, quoted, require_object

Row = Callable[[Draft, Any, str], None]
Table = Mapping[str, Row]


def read_fields(table: Table, draft: Draft, fields: Any, path: str) -> None:
    """Apply the rows of a table to the fields of an object, in the order of the table."""
    # A null counts as absent, as it does for the API server.
    given = {key: value for key, value in require_object(fields, path).items() if value is not None}
    for key, row in table.items():
        if key in given:
            row(draft, given[key], f"{path}.{key}" if path else key)
    for key, value in given.items():
        if key not in table:
            drop_unknown(draft, value, f"{path}.{key}" if path else str(key), table)


def drop_unknown(draft: Draft, value: Any, path: str, known: Mapping[str, Any]) -> None:
    """Remark on an unknown field."""
    key = path.rpartition(".")[2]
    draft.drop(path, value, f"it is an unknown field{did_you_mean(key, known)}")


def keep(to: str) -> Row:
    """Return the row of a field that the spec of a DDPJob has too."""
    return lambda draft, value, path: draft.set(to, value, path)


def keep_integer(to: str) -> Row:
    """Return the row of an integer that the spec of a DDPJob has too."""
    return lambda draft, value, path: draft.set(to, require_integer(value, path), path)


def default(row: Row, to: str) -> Row:
    """Return a row for a default: it counts only if the spec has no value yet.

    Remark on a default that is another value than that of the spec.
    """

    def read(draft: Draft, value: Any, path: str) -> None:
        given = draft.get(to)
        if given is None:
            row(draft, value, path)
        elif str(given) != str(value):
            draft.drop(path, value, f"{draft.sources[to]} is {quoted(given)}, and overrides it")

    return read


def drop(why: str, instead: str = "", *, unless: tuple[Any, ...] = ()) -> Row:
    """Return the row of a field without a place in a DDPJob.

    The values of `unless` change nothing, so they leave no remark.
    """

    def row(draft: Draft, value: Any, path: str) -> None:
        if value not in unless:
            draft.drop(path, value, why, instead)

    return row


def into(table: Table) -> Row:
    """Return the row of an object with a table for its fields."""
    return lambda draft, value, path: read_fields(table, draft, value, path)


def used(_draft: Draft, _value: Any, _path: str) -> None:
    """Do nothing: something else reads the field."""


def without_foreign(draft: Draft, labels: Dict, path: str) -> dict[str, Any]:
    """Return labels or annotations without those that only another program reads or writes."""
    kept = dict(labels)
    for key in [key for key in kept if str(key).startswith(OF_OTHERS)]:
        why, instead = FOREIGN.get(key, ("only a JobSet has it", ""))
        draft.drop(f"{path}[{key}]", kept.pop(key), why, instead)
    return kept


def labels_of_job(kind: str) -> Row:
    """Return the row of the labels or annotations of the job."""

    def row(draft: Draft, value: Any, path: str) -> None:
        kept = without_foreign(draft, require_object(value, path), path)
        if kept:
            draft.metadata[kind] = {**mapping_or_empty(draft.metadata.get(kind)), **kept}

    return row


def _name(key: str) -> Row:
    def row(draft: Draft, value: Any, _path: str) -> None:
        draft.metadata[key] = value

    return row


# The beginnings of labels and annotations that have no meaning for a DDPJob, with some of them.
OF_OTHERS = ("kubectl.kubernetes.io/last-applied-configuration", "alpha.jobset.sigs.k8s.io/")
FOREIGN = {
    OF_OTHERS[0]: ("kubectl writes it itself", ""),
    f"{OF_OTHERS[1]}exclusive-topology": (
        "JobSet gave each of its Jobs a part of the cluster for itself",
        "scheduling.topology for nodes near each other, without the exclusion of other jobs",
    ),
}
OF_THE_SERVER = "the API server sets it"

METADATA: Table = {
    "name": _name("name"),
    "generateName": _name("generateName"),
    "namespace": _name("namespace"),
    "labels": labels_of_job("labels"),
    "annotations": labels_of_job("annotations"),
    "uid": drop(OF_THE_SERVER),
    "resourceVersion": drop(OF_THE_SERVER),
    "generation": drop(OF_THE_SERVER),
    "creationTimestamp": drop(OF_THE_SERVER),
    "managedFields": drop(OF_THE_SERVER),
    "selfLink": drop(OF_THE_SERVER),
    "finalizers": drop("they belong to the controller of the old job"),
    "ownerReferences": drop("the owner made the old job", "let the owner create the DDPJob"),
}

STATUS = drop("it is what the controller of the old job wrote")


def document_table(spec: Row) -> Table:
    """Return the table of a document with a row for its spec."""
    return {
        "apiVersion": used,
        "kind": used,
        "metadata": into(METADATA),
        "spec": spec,
        "status": STATUS,
    }


def name_of(document: Dict) -> str:
    """Return the kind and the name of a document."""
    metadata = mapping_or_empty(document.get("metadata"))
    name = metadata.get("name") or metadata.get("generateName") or "without a name"
    return f"{document.get('kind')} {name}"
