"""Generate the client's types and a table of fields from the declared fields."""

import inspect
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

from ddpjob.core.api import shapes
from ddpjob.core.api.declare import (
    Change,
    OneOf,
    facts_of,
    fields_of,
    is_declared,
    plain,
    type_of,
)
from ddpjob.core.api.pod_fields import POD_TEMPLATE, pod_field_names
from ddpjob.core.api.spec import GROUPS

# The fields decided by a script and its arguments.
OF_SCRIPT = ("args", "code")

HEADER = '''\
"""The fields of a DDPJob's spec as types, written by `make generate` from their declarations."""

from collections.abc import Mapping
from typing import Any, Literal, Required, TypedDict

# Objects in Kubernetes' own shapes.
KubernetesObject = Mapping[str, Any]


class PodTemplate(TypedDict, total=False):
    """Overlay for other fields of the pods."""

    metadata: KubernetesObject
    spec: KubernetesObject
'''


def types_text() -> str:
    """Return the module with the types of the client."""
    parts = [HEADER]
    parts += [_typed_dict(kind) for group in GROUPS for kind in _objects(group)]
    lines = [f"{name}: {kind}" for group in GROUPS for name, kind in _typed_fields(group)]
    lines += [f"{name}: {_shape_type(shapes.shapes()[name])}" for name in pod_field_names()]
    lines.append(f"{POD_TEMPLATE}: PodTemplate")
    of_script = [line for line in lines if line.partition(":")[0] in OF_SCRIPT]
    others = [line for line in lines if line not in of_script]
    summary = "The fields of `spec` that a script of one's own does not decide."
    parts.append(_class("ScriptFields", summary, others))
    summary = "The fields of `spec`, with the names of the CRD."
    parts.append(_class("SpecFields", summary, of_script, base="ScriptFields"))
    return "\n\n".join(parts)


def _objects(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield the types of the objects in a declared one, the inner ones first."""
    for info in fields_of(kind).values():
        if is_declared(type_of(info)):
            yield from _objects(type_of(info))
            yield type_of(info)


def _typed_dict(kind: type[Any]) -> str:
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    return _class(kind.__name__, summary, [f"{name}: {one}" for name, one in _typed_fields(kind)])


def _class(name: str, summary: str, fields: list[str], base: str = "TypedDict") -> str:
    body = "".join(f"    {line}\n" for line in fields)
    return f'class {name}({base}, total=False):\n    """{summary}"""\n\n{body}'


def _typed_fields(kind: type[Any]) -> Iterator[tuple[str, str]]:
    for name, info in fields_of(kind).items():
        choices = [item.values() for item in info.metadata if isinstance(item, OneOf)]
        text = _literal(choices[0]) if choices else _type(info.annotation)
        yield name, f"Required[{text}]" if info.is_required() else text


def _type(kind: Any) -> str:
    """Return the source of a type as a manifest has it."""
    if get_origin(kind) is Annotated:
        return _type(get_args(kind)[0])
    kind = plain(kind)
    if get_origin(kind) is tuple:
        return f"list[{_type(get_args(kind)[0])}]"
    if get_origin(kind) is Mapping:
        return f"Mapping[str, {_type(get_args(kind)[1])}]"
    if get_origin(kind) is Literal:
        return _literal(get_args(kind))
    if get_args(kind):
        return " | ".join(map(_type, get_args(kind)))
    if issubclass(kind, StrEnum):
        return _literal(kind)
    return "int" if kind is timedelta else str(kind.__name__)


def _literal(values: Any) -> str:
    quoted = (f'"{value}"' for value in values)
    return f"Literal[{', '.join(quoted)}]"


def _shape_type(shape: Mapping[str, Any]) -> str:
    if "enum" in shape:
        return _literal(shape["enum"])
    match shape["type"]:
        case "array":
            return "list[KubernetesObject]"
        case "object":
            values = shape.get("additionalProperties", {})
            return "Mapping[str, str]" if values.get("type") == "string" else "KubernetesObject"
        case _:
            return "str"


def table_of_fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of the fields of `spec`, given its schema in the CRD."""
    yield "| field | type | default | may change | meaning |"
    yield "|---|---|---|---|---|"
    for name, (field, change) in _rows(schema).items():
        default = "" if field.get("default", {}) == {} else f"`{_yaml(field['default'])}`"
        meaning = field["description"].replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{name}` | {_kind(field)} | {default} | {change} | {meaning} |"


def _rows(schema: Mapping[str, Any]) -> Mapping[str, tuple[Mapping[str, Any], str]]:
    rows: dict[str, tuple[Mapping[str, Any], str]] = {}
    for group in GROUPS:
        for name, info in fields_of(group).items():
            field, change = schema["properties"][name], str(facts_of(info).change)
            rows[name] = (field, change)
            if is_declared(type_of(info)):
                rows |= {
                    path: (one, change) for path, one in _inner_rows(name, type_of(info), field)
                }
    for name in pod_field_names():
        rows[name] = (schema["properties"][name], str(Change(shapes.shapes()[name][shapes.CHANGE])))
    template = schema["properties"][POD_TEMPLATE]
    rows[POD_TEMPLATE] = (template, "")
    for part, shape in shapes.shapes()[POD_TEMPLATE]["properties"].items():
        change = str(Change(shape[shapes.CHANGE]))
        rows[f"{POD_TEMPLATE}.{part}"] = (template["properties"][part], change)
    return rows


def _inner_rows(
    path: str, kind: type[Any], schema: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields of an object, and of the objects in it, by their paths."""
    for name, info in fields_of(kind).items():
        field = schema["properties"][name]
        yield f"{path}.{name}", field
        if is_declared(type_of(info)):
            yield from _inner_rows(f"{path}.{name}", type_of(info), field)


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if field["type"] == "array":
        return f"list of {field['items'].get('type', 'value')}s"
    return str(field["type"])
