"""The documents of manifests: their text, and changes of single fields."""

import copy
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, SpecError, quoted

Document = dict[str, Any]

# The first bytes of a text in UTF-16, with either order of bytes.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

# A number to the base 60, in YAML 1.1 only.
SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


# Lists and objects within each other. No object of Kubernetes has half as many.
MAX_DEPTH = 100


class Loader(yaml.SafeLoader):
    """Reads YAML as Kubernetes does: 2026-01-01 and 1:30 are strings, not a date and 90."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node. Raises SpecError if it is too deep.

        The limit of the interpreter is no limit, since other modules may raise it.
        """
        if self.depth > MAX_DEPTH:
            raise SpecError("has too many lists or objects within each other")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose an object. Raises MarkedYAMLError for a key that it has twice.

        PyYAML takes the last value of equal keys. YAML 1.2 (section 3.2.1.3) forbids them. A key
        may override one of a merge (`<<`), whose keys are not yet among the nodes.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            place = (key.tag, str(key.value))
            if place in lines:
                problem = f"line {lines[place]} has the key {quoted(key.value)} too; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[place] = key.start_mark.line + 1
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        is_scalar = kind is yaml.ScalarNode and implicit[0]
        if is_scalar and SEXAGESIMAL.fullmatch(value):
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def decode(data: bytes) -> str:
    """Return the text of a file: UTF-8, or UTF-16 with its mark. Raises SpecError.

    The `>` of PowerShell writes UTF-16.
    """
    is_utf16 = data.startswith(UTF16_MARKS)
    try:
        return data.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError("is not text in UTF-8; save it as UTF-8") from error


def refuse_script(file: str) -> None:
    """Raise SpecError for a script in place of a manifest."""
    if file.endswith(".py"):
        raise SpecError(
            f"is a Python script and not a manifest; give it as --script {file} to ddpjob submit, "
            "ddpjob run --local or ddpjob init"
        )


def read_yaml(text: str) -> list[Any]:
    """Return the documents of a text, without empty ones. Raises SpecError."""
    try:
        documents = [found for found in yaml.load_all(text, Loader) if found is not None]
    except yaml.MarkedYAMLError as error:
        raise SpecError(f"is not YAML{_position(error)}: {error.problem}") from error
    # It is a ValueError too.
    except SpecError:
        raise
    # Other values not possible in YAML are plain ValueErrors.
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"is not YAML: {error}") from error
    for number, document in enumerate(documents, 1):
        _require_json(document, f"document {number}")
    return documents


def _require_json(value: Any, where: str) -> None:
    """Refuse values of YAML without a form in JSON, such as sets and recursive lists."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where}: has a value that JSON does not have: {error}") from error


def _position(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def read_documents(text: str) -> list[Document]:
    """Return the objects in a manifest, also those in a `List`. Raises SpecError."""
    found = read_yaml(text)
    for number, document in enumerate(found, 1):
        if not isinstance(document, dict):
            raise SpecError(f"document {number}: must be an object, got {quoted(document)}")
    documents = list(without_lists(found))
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict):
            raise SpecError(f"document {number}: must be an object, got {quoted(document)}")
        for key in ("apiVersion", "kind"):
            if not isinstance(document.get(key), str):
                raise SpecError(f"document {number}: {key} is required")
    return documents


def without_lists(documents: Iterable[Any]) -> Iterator[Any]:
    """Yield the documents, and the items of each `List` in its place."""
    for document in documents:
        is_list = isinstance(document, dict) and document.get("kind") == "List"
        if is_list and isinstance(document.get("items"), list):
            yield from document["items"]
        else:
            yield document


def is_job(document: Dict) -> bool:
    group = str(document.get("apiVersion")).partition("/")[0]
    return group == names.GROUP and document.get("kind") == names.KIND


def require_jobs(documents: Iterable[Dict]) -> None:
    """Raise SpecError if there is no DDPJob among the documents."""
    kinds = []
    for document in documents:
        if is_job(document):
            return
        kinds.append(f"{document['apiVersion']} {document['kind']}")
    found = f"it has {', '.join(kinds)}" if kinds else "it is empty"
    raise SpecError(f"has no DDPJob ({names.API_VERSION}); {found}")


def set_fields(document: Dict, settings: Iterable[str]) -> Document:
    """Return a copy of a document with fields set by `path=value`, such as spec.nodes=4.

    A value is read as YAML. A number in the path is an index of a list, and the number of its
    items appends to it. Raises SpecError.
    """
    changed = copy.deepcopy(dict(document))
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not (path and equals):
            raise SpecError(f"must be PATH=VALUE, such as spec.nodes=4, got {quoted(setting)}")
        try:
            value = yaml.load(text, Loader)
        except (yaml.YAMLError, ValueError) as error:
            raise SpecError(f"{path}: {quoted(text)} is not YAML") from error
        _require_json(value, path)
        _set(changed, path, value)
    return changed


def _set(document: Document, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    first = (*parents, last)[0]
    if first not in names.FIELDS:
        raise SpecError(f"{path}: a job has no field {first}; did you mean spec.{path}?")
    place: Any = document
    for number, key in enumerate(parents, 1):
        where = ".".join(parents[:number])
        place = _enter(place, key, where)
    if isinstance(place, list):
        index = _index(place, last, path)
        place[index : index + 1] = [value]
    else:
        place[last] = value


def _enter(place: Any, key: str, where: str) -> Any:
    """Return the object or list at a key. Make an object if the key is absent."""
    if isinstance(place, list):
        index = _index(place, key, where)
        if index == len(place):
            place.append({})
        found = place[index]
    else:
        found = place.get(key)
        if found is None:
            found = place[key] = {}
    if not isinstance(found, dict | list):
        raise SpecError(f"{where}: is {quoted(found)}, which has no fields")
    return found


def _index(items: list[Any], key: str, where: str) -> int:
    if not key.isdecimal() or int(key) > len(items):
        raise SpecError(f"{where}: must be an index from 0 to {len(items)}, got {quoted(key)}")
    return int(key)
