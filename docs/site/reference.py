"""Pages of reference that are generated: from the CRD, from the command line, from the client."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpjob import AsyncClient, Client, LocalClient
from ddpjob.cli.main import COMMANDS, load
from ddpjob.core.api.yaml_text import load_yaml
from ddpjob.jobs.user_job import DDPJob

CRD = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "files" / "crd.yaml"


def schema() -> Mapping[str, Any]:
    """Return the schema of a DDPJob."""
    (version,) = load_yaml(CRD.read_text())["spec"]["versions"]
    found: Mapping[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def crd_page() -> str:
    """Return all fields of a DDPJob, in tables by their objects."""
    lines = [
        "# Fields of a DDPJob",
        "",
        "This page is generated from the CustomResourceDefinition. "
        "[How the fields work together](../docs/users/reference.md).",
    ]
    for part in ("spec", "status"):
        lines += ["", f"## {part}", ""]
        lines += [schema()["properties"][part].get("description", ""), ""]
        lines += _table(schema()["properties"][part], part)
    return "\n".join(lines) + "\n"


def _table(fields: Mapping[str, Any], where: str) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for path, field in _fields(fields, where):
        default = f"`{field['default']}`" if "default" in field else ""
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        yield f"| `{path}` | {_type(field)} | {default} | {meaning} |"


def _fields(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields of an object and of the objects in it, but not Kubernetes' own shapes."""
    for name, field in schema.get("properties", {}).items():
        path = f"{where}.{name}"
        if "description" in field:
            yield path, field
        yield from _fields(field, path)
        if isinstance(field.get("items"), Mapping):
            described = [
                (inner, one)
                for inner, one in _fields(field["items"], f"{path}[]")
                if "description" in one
            ]
            yield from described


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if field.get("type") == "array":
        return f"list of {field.get('items', {}).get('type', 'values')}"
    return str(field.get("type", "any"))


def command_page() -> str:
    """Return each command with its help, arguments and options."""
    names = [name for commands in COMMANDS.values() for name in commands]
    lines = [
        "# Commands",
        "",
        "This page is generated from `ddpjob --help`. [A guide](../docs/users/command-line.md).",
    ]
    for name in names:
        command = load(name)
        lines += ["", f"## ddpjob {name}", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["| option | meaning |", "|---|---|"]
        for parameter in command.params:
            words = ", ".join(f"`{word}`" for word in parameter.opts)
            if parameter.param_type_name == "argument":
                words = f"`{parameter.metavar or parameter.name}`"
            meaning = " ".join(str(parameter.help or "").split()).replace("|", "\\|")
            lines.append(f"| {words} | {meaning} |")
    return "\n".join(lines) + "\n"


def client_page() -> str:
    """Return the public classes of the client with their methods and docstrings."""
    lines = [
        "# Classes of the Python client",
        "",
        "This page is generated from the code. [A guide](../docs/users/python.md).",
    ]
    for kind in (DDPJob, Client, AsyncClient, LocalClient):
        lines += ["", f"## {kind.__name__}", "", *_docstring(kind)]
        for name, member in vars(kind).items():
            if name.startswith("_") or not (callable(member) or hasattr(member, "__func__")):
                continue
            function = getattr(member, "__func__", member)
            lines += ["", f"### {kind.__name__}.{name}", "", "```python"]
            lines += [f"{name}{inspect.signature(function)}", "```", "", *_docstring(function)]
    return "\n".join(lines) + "\n"


def _docstring(documented: Any) -> list[str]:
    return [inspect.cleandoc(documented.__doc__ or "")]
