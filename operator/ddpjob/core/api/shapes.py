"""Kubernetes' own shapes within a spec: their fragments, and the check of values against them.

The API server checks the same fragments in the CRD. It checks the rest of a pod's fields when a pod
is created.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.kinds import fields_of
from ddpjob.core.api.kubernetes import UNKNOWN_TO_CRD, UNKNOWN_TO_NEWEST
from ddpjob.core.api.readers import Dict, SpecError, did_you_mean, either, refuse
from ddpjob.core.api.times import MAX_INT32
from ddpjob.core.api.yaml_text import load_yaml

FILE = "pod_shapes.yaml"

# Keys of the fragments for this project alone.
OWN = "x-ddpjob-"
CHANGE = f"{OWN}change"
RULE = f"{OWN}rule"
WANTED = f"{OWN}wanted"

INT_OR_STRING = "x-kubernetes-int-or-string"

MAX_INT64 = 2**63 - 1

# What to do with a number or a date that must be a string.
QUOTES = "put it in quotes"


@dataclass(frozen=True)
class ShapeRule:
    """A rule for a value of a shape: the API server's sentence and expression, and our check.

    `check` gets the value and its path, and raises SpecError.
    """

    message: str
    cel: str
    check: Callable[[str, str], None]


def _check_volume_name(name: str, where: str) -> None:
    if names.is_own_volume(name):
        raise SpecError(
            f"{where}: the volume name {name} is reserved: names that begin with "
            f"{names.VOLUME_PREFIX} belong to the operator; choose another name"
        )


def _check_mount_path(path: str, where: str) -> None:
    if names.is_own_path(path):
        raise SpecError(
            f"{where}: the path {path} is reserved: paths below {names.FOLDER} belong to the "
            "operator; choose another path"
        )


RULES: Mapping[str, ShapeRule] = {
    "name of a volume": ShapeRule(
        f'names that begin with "{names.VOLUME_PREFIX}" are reserved for the operator; choose '
        "another name",
        f"!self.startsWith('{names.VOLUME_PREFIX}')",
        _check_volume_name,
    ),
    "mount path": ShapeRule(
        f"paths below {names.FOLDER} are reserved for the operator; choose another path",
        f"self != '{names.FOLDER}' && !self.startsWith('{names.FOLDER}/')",
        _check_mount_path,
    ),
}


@cache
def shapes() -> Mapping[str, Dict]:
    """Return the shapes of the fields of `spec`, by name."""
    text = resources.files(__package__).joinpath(FILE).read_text()
    found: Mapping[str, Dict] = load_yaml(text)
    return found


def check(value: Any, shape: Dict, where: str) -> None:
    """Raise SpecError for the first problem of a value, in order of the shape.

    `where` is the path of the value. Fields that the shape does not have are ignored.
    """
    if shape.get(INT_OR_STRING):
        _check_int_or_string(value, shape, where)
    elif "type" in shape:
        CHECKS[shape["type"]](value, shape, where)
    if RULE in shape:
        RULES[shape[RULE]].check(value, where)


def known_fields(shape: Dict, kind: str) -> Mapping[str, tuple[Dict, str]]:
    """Return the shape and the kind of each field of an object.

    Where a shape declares no fields, those of Kubernetes' kind count. There are none if the object
    may have any keys, and if the value is no object.
    """
    if shape.get("type", "object") != "object":
        return {}
    of_kind = fields_of(kind)
    declared: Mapping[str, Dict] | None = shape.get("properties")
    if declared is not None:
        return {name: (inner, of_kind.get(name, "")) for name, inner in declared.items()}
    return {name: ({}, inner) for name, inner in of_kind.items()}


def unknown_fields(value: Any, shape: Dict, kind: str, where: str) -> Iterator[str]:
    """Yield a sentence for each field known neither to the shape nor to Kubernetes' kind.

    A value of another type has no fields here: `check` refuses it.
    """
    if isinstance(value, list) and shape.get("type", "array") == "array":
        for index, item in enumerate(value):
            # No list of Kubernetes has lists, and YAML can write one that contains itself.
            if not isinstance(item, list):
                yield from unknown_fields(item, shape.get("items", {}), kind, f"{where}[{index}]")
    known = known_fields(shape, kind)
    if not known or not isinstance(value, Mapping):
        return
    for key, item in value.items():
        path = f"{where}.{key}"
        if key in known:
            yield from unknown_fields(item, *known[key], path)
        else:
            is_declared = "properties" in shape
            unknown = UNKNOWN_TO_CRD if is_declared else UNKNOWN_TO_NEWEST
            hint = did_you_mean(str(key), known) or unknown
            yield f"{path}: unknown field{hint}"


def _check_object(value: Any, shape: Dict, where: str) -> None:
    if not isinstance(value, Mapping):
        raise refuse(where, "an object", value)
    _check_length(value, shape.get("maxProperties"), where)
    # A null counts as absent, as it does for the API server.
    present = {key: item for key, item in value.items() if item is not None}
    properties = shape.get("properties", {})
    for key in shape.get("required", ()):
        if key not in present:
            raise refuse(f"{where}.{key}", _wanted(properties[key]), None)
    for key, inner in properties.items():
        if key in present:
            check(present[key], inner, f"{where}.{key}")
    if "additionalProperties" in shape:
        for key, item in present.items():
            check(item, shape["additionalProperties"], f"{where}.{key}")


def _check_array(value: Any, shape: Dict, where: str) -> None:
    items = shape["items"]
    is_list = isinstance(value, list)
    if not is_list or (items.get("type") == "object" and not all(map(_is_object, value))):
        raise refuse(where, _wanted(shape), value)
    _check_length(value, shape.get("maxItems"), where)
    for index, item in enumerate(value):
        check(item, items, f"{where}[{index}]")
    for key in shape.get("x-kubernetes-list-map-keys", ()):
        _refuse_duplicates(value, key, where)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _refuse_duplicates(items: Sequence[Dict], key: str, where: str) -> None:
    seen = set()
    for item in items:
        if item[key] in seen:
            raise SpecError(f"{where}: several items have the {key} {item[key]}; keep one")
        seen.add(item[key])


def _check_string(value: Any, shape: Dict, where: str) -> None:
    if not isinstance(value, str) or len(value) < shape.get("minLength", 0):
        error = refuse(where, _wanted(shape), value)
        is_unquoted = not isinstance(value, str | list | Mapping) and "enum" not in shape
        raise SpecError(f"{error}; {QUOTES}") if is_unquoted else error
    if "enum" in shape and value not in shape["enum"]:
        raise refuse(where, _wanted(shape), value)
    _check_length(value, shape.get("maxLength"), where)


def _check_integer(value: Any, shape: Dict, where: str) -> None:
    lowest, highest = shape.get("minimum"), MAX_INT64
    if shape.get("format") == "int32":
        highest = MAX_INT32
    if not _is_integer(value, lowest, highest):
        raise refuse(where, _wanted(shape), value)


def _is_integer(value: Any, lowest: int | None = None, highest: int = MAX_INT64) -> bool:
    # In Python, True is an integer too.
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (-highest - 1 if lowest is None else lowest) <= value <= highest


def _check_boolean(value: Any, shape: Dict, where: str) -> None:
    if not isinstance(value, bool):
        raise refuse(where, _wanted(shape), value)


def _check_int_or_string(value: Any, shape: Dict, where: str) -> None:
    if isinstance(value, float):
        raise SpecError(f"{refuse(where, _wanted(shape), value)}; {QUOTES}")
    if isinstance(value, str):
        _check_length(value, shape.get("maxLength"), where)
        is_right = re.fullmatch(shape["pattern"], value) is not None
    else:
        is_right = _is_integer(value)
    if not is_right:
        raise refuse(where, _wanted(shape), value)


def _check_length(value: Any, longest: int | None, where: str) -> None:
    if longest is not None and len(value) > longest:
        unit = "characters" if isinstance(value, str) else "items"
        raise refuse(where, f"at most {longest} {unit} long", value)


def _wanted(shape: Dict) -> str:
    """Return what a value must be, for a message."""
    if WANTED in shape:
        return str(shape[WANTED])
    if "enum" in shape:
        return either(shape["enum"])
    match shape.get("type"):
        case "object":
            return "an object"
        case "array":
            item = shape["items"].get("type")
            return f"a list of {item}s" if item else "a list"
        case "integer" if "minimum" in shape:
            return f"an integer from {shape['minimum']} on"
        case "integer":
            return "a 32-bit integer" if shape.get("format") == "int32" else "an integer"
        case "boolean":
            return "true or false"
        case _:
            return "a string that is not empty" if shape.get("minLength") else "a string"


CHECKS: Mapping[str, Callable[[Any, Dict, str], None]] = {
    "object": _check_object,
    "array": _check_array,
    "string": _check_string,
    "integer": _check_integer,
    "boolean": _check_boolean,
}
