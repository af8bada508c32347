"""Write what follows from other files: `make generate`, or `python release/generate.py [FILE…]`.

A part of a file stands between two comments. The first one names the part, which is one of PARTS.
The examples are whole files. `tests/unit/test_generated.py` compares the files with this.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ddpjob.cli.commands.init import manifest, workloads
from ddpjob.cli.sizes import resolve_nodes
from ddpjob.core.api import parts, profiles
from ddpjob.core.api.profiles import Profile
from ddpjob.core.api.readers import either
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status

ROOT = Path(__file__).parents[1]
CRD = "charts/ddpjob-operator/files/crd.yaml"
WIDTH = 100

PART = re.compile(
    r"^(?P<begin>(?P<indent> *)\S+ make generate: (?P<name>[^\n]*?)(?: -->)?\n)"
    r".*?^(?P<end> *\S+ end of make generate)",
    re.DOTALL | re.MULTILINE,
)


def enum_of_accelerators() -> Iterator[str]:
    yield "enum:"
    for name in profiles.catalog():
        yield f"- {name}"


def type_of_accelerators() -> Iterator[str]:
    yield "Accelerator = Literal["
    for name in profiles.catalog():
        yield f'    "{name}",'
    yield "]"


def size_rules() -> Iterator[str]:
    """Yield the CRD's rules for the sizes that accelerators support, as `check_size` has them."""
    for profile in profiles.catalog().values():
        others = f"self.accelerator != '{profile.name}'"
        if profile.one_node:
            message = f"must be 1 with accelerator {profile.name}, which {profile.one_node}"
            alternatives = _with_several_nodes(profile)
            if alternatives:
                message += f"; for several nodes use {either(alternatives)}"
            yield from _rule("nodes", f"{others} || self.nodes == 1", message)
        if profile.process_counts:
            allowed = f"{list(profile.process_counts)}"
            choice = either((*profile.process_counts, "auto"))
            message = f"must be {choice} with accelerator {profile.name}"
            if not profile.one_node:
                allowed = f"(self.nodes == 1 ? {allowed} : [{profile.processes}])"
                message += f" on one node, {profile.processes} or auto on each of several nodes"
            rule = f"{others} || type(self.nprocPerNode) != int || self.nprocPerNode in {allowed}"
            yield from _rule("nprocPerNode", rule, message)


def _with_several_nodes(profile: Profile) -> list[str]:
    """Return the names of profiles with the same devices that support several nodes."""
    names = {name for device in profile.all_devices for name in profiles.profiles_with(device)}
    return [name for name, one in profiles.catalog().items() if name in names and not one.one_node]


def _rule(field: str, rule: str, message: str) -> Iterator[str]:
    yield "- rule: >-"
    yield from _folded(rule)
    yield f"  fieldPath: .{field}"
    yield "  message: >-"
    yield from _folded(message)


def _folded(text: str) -> Iterable[str]:
    # The rules are 12 columns from the left.
    lines = textwrap.wrap(text, WIDTH - 16, break_long_words=False, break_on_hyphens=False)
    return [f"    {line}" for line in lines]


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


def schema_of_status() -> Iterable[str]:
    """Return the schema of the status, as its fields declare it."""
    described = {
        "description": "State of the job, written by the operator.",
        **parts.schema(Status),
    }
    text = yaml.safe_dump({"status": described}, sort_keys=False, width=sys.maxsize)
    return chain.from_iterable(map(_short_lines, text.splitlines()))


def _short_lines(line: str) -> Iterable[str]:
    """Return a line of a schema, as several if it is too long."""
    key, colon, value = line.partition(": ")
    # The schema is 10 columns from the left.
    width = WIDTH - 10
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    text = textwrap.wrap(yaml.safe_load(value), width - len(indent), break_on_hyphens=False)
    return [f"{key}{colon}>-", *textwrap.indent("\n".join(text), indent).splitlines()]


def table_of_status() -> Iterator[str]:
    yield "| field | content |"
    yield "|---|---|"
    fields = parts.schema(Status)["properties"]
    for path, description in _described(fields):
        yield _row(f"`{path}`", description)


def _described(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the description of each field, without those that Kubernetes declares."""
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
        yield _row(reason, reason.meaning, reason.advice)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


# The parts of each file, by the names in its comments.
PARTS: Mapping[str, Mapping[str, Callable[[], Iterable[str]]]] = {
    CRD: {
        "sizes of the accelerators": size_rules,
        "names of the accelerators": enum_of_accelerators,
        "status": schema_of_status,
    },
    "operator/ddpjob/jobs/user_job.py": {"names of the accelerators": type_of_accelerators},
    "docs/users/reference.md": {"accelerators": table_of_accelerators, "status": table_of_status},
    "docs/users/operations.md": {"reasons": table_of_reasons},
}


def _with_parts(path: str) -> str:
    """Return the text of a file with its parts as they should be."""
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
    """Return the manifest that `ddpjob init` prints for a workload."""
    name = profiles.DEFAULT
    gpus = workloads()[workload]["gpusPerProcess"]
    return manifest(workload, nodes=resolve_nodes(name, None), accelerator=name, gpus=gpus)


# The text of each file, by its path.
FILES: Mapping[str, Callable[[], str]] = {
    **{path: partial(_with_parts, path) for path in PARTS},
    **{f"examples/{name}.yaml": partial(_example, name) for name in workloads()},
}


def main(paths: Iterable[str]) -> None:
    for path in paths:
        (ROOT / path).write_text(FILES[path]())


if __name__ == "__main__":
    main(sys.argv[1:] or FILES)
