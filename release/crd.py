"""Build the CustomResourceDefinition from the declarations of spec and status.

pydantic's own JSON schema has `$ref` and `anyOf`, but a structural schema must not have them. So
this module walks the declarations itself.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from ddpjob.core.api import names, parts, shapes
from ddpjob.core.api.declare import (
    Change,
    OneOf,
    bounds_of,
    facts_of,
    fields_of,
    is_declared,
    plain,
)
from ddpjob.core.api.job import NAME_CLAUSE
from ddpjob.core.api.pod_fields import POD_TEMPLATE
from ddpjob.core.api.spec import GROUPS
from ddpjob.core.api.spec_rules import RULES, Clause
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import MAX_INT32

Schema = dict[str, Any]

HEADER = """\
# The CustomResourceDefinition of DDPJob, written by `make generate` from the declarations in
# operator/ddpjob/core/api. The chart installs it, and `kubectl apply --server-side -f` on this file
# does without the chart.
"""

# Columns of `kubectl get`: name, type, path, and whether only `-o wide` shows them.
COLUMNS = (
    ("Phase", "string", ".status.phase", False),
    ("Nodes", "string", ".status.nodesReady", False),
    ("Restarts", "integer", ".status.restarts", False),
    ("Reason", "string", ".status.reason", False),
    ("Age", "date", ".metadata.creationTimestamp", False),
    ("Failures", "integer", ".status.budget.failures", True),
    ("Disruptions", "integer", ".status.budget.disruptions", True),
    ("Accelerator", "string", ".spec.accelerator", True),
    ("Attempt", "integer", ".status.attempt.number", True),
    ("Goodput", "string", ".status.account.goodput", True),
    ("Image", "string", ".spec.image", True),
)

# The API server's message for a forbidden change.
REFUSALS = {
    Change.NEVER: "is immutable; delete the job and create it again",
    Change.SUSPENDED: "can be changed only while spec.suspend is true",
}

VALIDATIONS = "x-kubernetes-validations"


def crd_text() -> str:
    """Return the file."""
    return HEADER + yaml.dump(crd(), Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True)


class Dumper(yaml.SafeDumper):
    """Writes a shape in full at each place, and short objects in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd() -> Schema:
    columns = [_column(*column) for column in COLUMNS]
    subresources = {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.nodes",
            "statusReplicasPath": ".status.nodes.active",
            "labelSelectorPath": ".status.selector",
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["ddp"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": job_schema()},
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, wide: bool) -> Schema:
    priority = {"priority": 1} if wide else {}
    return {"name": name, "type": kind, "jsonPath": path, **priority}


def job_schema() -> Schema:
    name = {"description": "RFC 1035, at most 52 characters.", "type": "string"}
    return {
        "description": "A DDPJob runs one PyTorch DistributedDataParallel training as one torchrun "
        "agent in each of its pods.",
        "type": "object",
        "required": ["spec"],
        VALIDATIONS: [_validation(NAME_CLAUSE)],
        "properties": {
            "apiVersion": {"description": f"Always {names.API_VERSION}.", "type": "string"},
            "kind": {"description": f"Always {names.KIND}.", "type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": spec_schema(),
            "status": status_schema(),
        },
    }


def status_schema() -> Schema:
    described = "State of the job, written by the operator."
    return {"description": described, **parts.schema(Status)}


def spec_schema() -> Schema:
    """Return the schema of `spec`, with the rules at their objects."""
    schema: Schema = {
        "description": "The job to run. nodes, failurePolicy, suspend, the deadlines and the "
        "clean-up can be changed later, fields for scheduling while the job is suspended.",
        "type": "object",
        "required": [],
        VALIDATIONS: [],
        "properties": {},
    }
    for group in GROUPS:
        part = _object(group)
        schema["required"] += part.get("required", [])
        schema["properties"] |= part["properties"]
    for name, shape in shapes.shapes().items():
        schema["properties"][name] = _shape(shape)
    for rule in RULES:
        level = _below(schema, rule.at)
        level.setdefault(VALIDATIONS, []).extend(map(_validation, rule.clauses))
    schema[VALIDATIONS] += _changes(schema)
    return schema


def _below(schema: Schema, path: str) -> Schema:
    """Return the schema at a path. The path has no lists."""
    for name in filter(None, path.split(".")):
        schema = schema["properties"][name]
    return schema


def _validation(clause: Clause) -> Schema:
    field = {"fieldPath": f".{clause.field}"} if clause.field else {}
    return {"rule": clause.cel, **field, "message": clause.message}


# Types


def _object(kind: type[Any]) -> Schema:
    fields = fields_of(kind)
    required = [name for name, info in fields.items() if info.is_required()]
    return {
        "description": " ".join((inspect.getdoc(kind) or "").split()),
        "type": "object",
        **({"required": required} if required else {}),
        "properties": {name: _field(info) for name, info in fields.items()},
    }


def _field(info: FieldInfo) -> Schema:
    schema = _type(info.annotation, info.metadata)
    if info.description:
        schema = {**schema, "description": info.description}
    # An empty string or list stands for an absent one.
    if not info.is_required() and info.default not in (None, "", (), {}):
        schema["default"] = _default(info.default)
    return {"description": schema.pop("description"), **schema}


def _default(value: Any) -> Any:
    if is_declared(type(value)):
        return {}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, StrEnum) else _number(value)


def _type(kind: Any, metadata: Sequence[Any]) -> Schema:
    """Return the schema of a type, given the metadata of its field."""
    while get_origin(kind) is Annotated or plain(kind) is not kind:
        if get_origin(kind) is Annotated:
            kind, *own = get_args(kind)
            metadata = [*own, *metadata]
        else:
            (kind,) = (one for one in get_args(kind) if one is not type(None))
    bounds = bounds_of(metadata)
    choices = [item.values() for item in metadata if isinstance(item, OneOf)]
    if choices:
        return {"type": "string", "enum": list(choices[0])}
    if is_declared(kind):
        return _object(kind)
    if kind is bool:
        return {"type": "boolean"}
    if kind in (int, timedelta):
        return {"type": "integer", "format": "int32", **_limits(bounds)}
    if kind is str:
        return {"type": "string", **_sizes(bounds, "Length")}
    if get_origin(kind) is Literal:
        return {"type": "string", "enum": list(get_args(kind))}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [str(value) for value in kind]}
    if get_origin(kind) is tuple:
        items = _type(get_args(kind)[0], ())
        return {"type": "array", **_sizes(bounds, "Items"), "items": items}
    if get_origin(kind) is Mapping:
        values = _type(get_args(kind)[1], ())
        return {"type": "object", **_sizes(bounds, "Properties"), "additionalProperties": values}
    return _int_or_string(get_args(kind))


def _int_or_string(kinds: Sequence[Any]) -> Schema:
    """Return the schema of an integer or a string. A rule checks the integer."""
    (text,) = (kind for kind in kinds if plain(kind) is not int)
    longest = _type(text, ()).get("maxLength", MAX_WORD)
    return {"x-kubernetes-int-or-string": True, "maxLength": longest}


# Longest string in place of a number, such as `auto`. The cost of the rules follows from it.
MAX_WORD = 16


def _limits(bounds: Mapping[str, Any]) -> Schema:
    low, high = (bounds.get(key) for key in ("ge", "le"))
    limits = {"minimum": _number(low), "maximum": _number(high)}
    # The format is the limit of larger numbers.
    return {key: value for key, value in limits.items() if value not in (None, MAX_INT32)}


def _number(value: Any) -> Any:
    return int(value.total_seconds()) if isinstance(value, timedelta) else value


def _sizes(bounds: Mapping[str, Any], unit: str) -> Schema:
    sizes = {f"min{unit}": bounds.get("min_length"), f"max{unit}": bounds.get("max_length")}
    return {key: value for key, value in sizes.items() if value}


def _shape(shape: Any) -> Any:
    """Return a fragment in the form of the CRD: with its rules, and without our own keys."""
    if isinstance(shape, list):
        return [_shape(item) for item in shape]
    if not isinstance(shape, Mapping):
        return shape
    kept = {key: _shape(item) for key, item in shape.items() if not key.startswith(shapes.OWN)}
    if shapes.RULE in shape:
        rule = shapes.RULES[shape[shapes.RULE]]
        kept[VALIDATIONS] = [{"rule": rule.cel, "message": rule.message}]
    return kept


# Changes. They cover adding and removing a field too. Optionals (`self.?env == oldSelf.?env`) would
# be shorter, but exceed the cost limit of the API server.


def _changes(schema: Schema) -> Iterator[Schema]:
    """Yield the rules against changes of fields, in the order of the fields."""
    for group in GROUPS:
        for name, info in fields_of(group).items():
            change = facts_of(info).change
            is_set = name in schema["required"] or "default" in schema["properties"][name]
            yield from _change(change, name, name, is_always_set=is_set)
    for name, shape in shapes.shapes().items():
        if name == POD_TEMPLATE:
            for part, inner in shape["properties"].items():
                yield from _change(Change(inner[shapes.CHANGE]), f"{name}.{part}", name)
        else:
            yield from _change(Change(shape[shapes.CHANGE]), name, name)


def _change(
    change: Change, path: str, field: str, *, is_always_set: bool = False
) -> Iterator[Schema]:
    if change is Change.ALWAYS:
        return
    new, old = f"self.{path}", f"oldSelf.{path}"
    rule = f"{new} == {old}"
    if not is_always_set:
        rule = f"{_has(new)} ? {_has(old)} && {rule} : {_has_not(old)}"
    if change is Change.SUSPENDED:
        rule = f"self.suspend || oldSelf.suspend || ({rule})"
    yield _validation(Clause(REFUSALS[change], rule, field))


def _has(path: str) -> str:
    """Return an expression: true if a field and all objects above it are set."""
    root, *parts = path.split(".")
    paths = [".".join([root, *parts[: length + 1]]) for length in range(len(parts))]
    return " && ".join(f"has({one})" for one in paths)


def _has_not(path: str) -> str:
    return _has(path).replace("has(", "!has(").replace(" && ", " || ")
