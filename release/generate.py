"""Write the generated files: `make generate`, or `python release/generate.py [FILE…]`.

A generated part of a file is between two comments. The first comment has the name of the part, as
in PARTS. Other files are written as a whole. `tests/unit/test_generated.py` compares the files with
the results of this module.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddpjob.cli.commands.init import manifest, workloads
from ddpjob.cli.main import COMMANDS
from ddpjob.cli.sizes import resolve_nodes
from ddpjob.controller.families import Family, families, families_of_jobs
from ddpjob.core.api import parts, profiles
from ddpjob.core.api.profiles import Profile
from ddpjob.core.api.readers import either
from ddpjob.core.api.reasons import PAGE, Reason
from ddpjob.core.api.status import Status

# The modules beside this one. Tests run it by its path.
sys.path.insert(0, str(Path(__file__).parent))
from crd import crd_text, spec_schema
from kinds import kinds_text
from spec_fields import table_of_fields, types_text

ROOT = Path(__file__).parents[1]
CRD = "charts/ddpjob-operator/files/crd.yaml"

PART = re.compile(
    r"^(?P<begin>(?P<indent> *)\S+ make generate: (?P<name>[^\n]*?)(?: -->)?\n)"
    r".*?^(?P<end> *\S+ end of make generate)",
    re.DOTALL | re.MULTILINE,
)


def table_of_accelerators() -> Iterator[str]:
    yield "| profile | nodes | a pod requests | processes | variables |"
    yield "|---|---|---|---|---|"
    for one in profiles.catalog().values():
        variables = ", ".join(f"`{name}={value}`" for name, value in one.env.items())
        cells = (f"`{one.name}`", one.description, _requests(one), _processes(one), variables)
        yield _row(*cells)


def _requests(profile: Profile) -> str:
    if profile.process_per:
        return f"`{profile.process_per}`: your own limit, or `nprocPerNode`, or 1"
    devices = [f"{count} `{device}`" for device, count in profile.devices.items()]
    return ", ".join(devices) or "your own resources"


def _processes(profile: Profile) -> str:
    if profile.process_per:
        return "one per device"
    text = f"{profile.processes}"
    fewer = [count for count in profile.process_counts if count != profile.processes]
    if fewer:
        text += f"; on one node also {either(fewer)}"
    if profile.one_node:
        text += f". A job has only one node, because this type {profile.one_node}"
    return text


def table_of_status() -> Iterator[str]:
    yield "| field | content |"
    yield "|---|---|"
    fields = parts.schema(Status)["properties"]
    for path, description in _described(fields):
        yield _row(f"`{path}`", description)


def _described(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the description of each field, except those declared by Kubernetes."""
    for name, field in fields.items():
        yield prefix + name, field["description"]
        if name in (parts.OPERATOR, "conditions"):
            continue
        of_items = field.get("items", {}).get("properties", {})
        yield from _described(field.get("properties", {}), f"{prefix}{name}.")
        yield from _described(of_items, f"{prefix}{name}[].")


def table_of_reasons() -> Iterator[str]:
    yield "| reason | meaning | what to do |"
    yield "|---|---|---|"
    for reason in Reason:
        named = f'<a id="{reason.anchor}"></a>{reason}'
        yield _row(named, reason.meaning, reason.advice)


def table_of_commands() -> Iterator[str]:
    yield "| command | what it does |"
    yield "|---|---|"
    for section, commands in COMMANDS.items():
        yield _row(f"*{section}*", "")
        for name, short_help in commands.items():
            yield _row(f"`ddpjob {name}`", short_help.removesuffix("."))


def table_of_metrics(rows: Mapping[str, Family]) -> Iterator[str]:
    yield "| metric | meaning |"
    yield "|---|---|"
    for name, family in rows.items():
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        yield _row(f"`{name}{labels}`", family.text)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


# The parts of each file, by the names in its comments.
PARTS: Mapping[str, Mapping[str, Callable[[], Iterable[str]]]] = {
    "docs/users/reference.md": {
        "accelerators": table_of_accelerators,
        "fields of spec": lambda: table_of_fields(spec_schema()),
        "status": table_of_status,
    },
    "docs/users/command-line.md": {"commands": table_of_commands},
    f"docs/{PAGE}": {"reasons": table_of_reasons},
    "docs/users/operations.md": {
        "metrics": lambda: table_of_metrics(families()),
        "metrics of each job": lambda: table_of_metrics(families_of_jobs()),
    },
}


def _with_parts(path: str) -> str:
    """Return the text of a file with its generated parts up to date."""
    parts = dict(PARTS[path])

    def written(found: re.Match[str]) -> str:
        text = "".join(f"{line}\n" for line in parts.pop(found["name"])())
        # Markdown has an empty line between a comment and a table.
        if path.endswith(".md"):
            text = f"\n{text}\n"
        return found["begin"] + textwrap.indent(text, found["indent"]) + found["end"]

    text = PART.sub(written, (ROOT / path).read_text())
    assert not parts, f"{path}: expected comments with the names {', '.join(parts)}"
    return text


def _example(workload: str) -> str:
    """Return the manifest printed by `ddpjob init` for a workload."""
    name = profiles.DEFAULT
    gpus = workloads()[workload]["gpusPerProcess"]
    return manifest(workload, nodes=resolve_nodes(name, None), accelerator=name, gpus=gpus)


# The text of each file, by its path.
FILES: Mapping[str, Callable[[], str]] = {
    CRD: crd_text,
    "operator/ddpjob/core/api/pod_kinds.yaml": kinds_text,
    "operator/ddpjob/jobs/spec_fields.py": types_text,
    **{path: partial(_with_parts, path) for path in PARTS},
    **{f"examples/{name}.yaml": partial(_example, name) for name in workloads()},
}


def main(paths: Iterable[str]) -> None:
    for path in paths:
        (ROOT / path).write_text(FILES[path]())


if __name__ == "__main__":
    main(sys.argv[1:] or FILES)
