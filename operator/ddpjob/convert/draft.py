"""The draft of a converted DDPJob, with remarks about everything without a place in it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpjob.convert.marks import unmark, unmark_all
from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, SpecError, quoted
from ddpjob.core.api.spec import known_fields
from ddpjob.core.api.torchrun_flags import advice_on_variable

# A dropped object is quoted as a whole to keep each of its fields. Longer objects are no
# configuration, but a status or a copy of the manifest.
MAX_VALUE = 1000


@dataclass(frozen=True)
class Remark:
    """A remark for the user: a value was dropped, or needs a look.

    - `path`: the place of the value. `value`: the printed value; empty for a note.
    - `why`: the reason. `instead`: what to do; empty if nothing is needed.
    - `is_first`: it stands before the others, because the whole job depends on it.
    """

    path: str
    why: str
    instead: str = ""
    value: str = ""
    is_dropped: bool = True
    is_first: bool = False

    def __str__(self) -> str:
        parts = [self.path, self.value] if self.value else [self.path]
        if self.is_dropped:
            text = f"dropped: {': '.join(parts)}: because {self.why}"
        else:
            text = f"note: {': '.join(parts)}: {self.why}"
        return f"{text}; instead: {self.instead}" if self.instead else text


@dataclass(frozen=True)
class Conversion:
    """A converted DDPJob. `source` names its origin, such as `PyTorchJob mnist`."""

    source: str
    document: dict[str, Any]
    remarks: tuple[Remark, ...]

    @property
    def dropped(self) -> int:
        return sum(remark.is_dropped for remark in self.remarks)

    def comments(self) -> str:
        """Return the comments at the head of the document."""
        remarks = sorted(self.remarks, key=lambda remark: not remark.is_first)
        lines = [f"Converted from {self.source}.", *map(str, remarks)]
        return "".join(f"# {_one_line(line)}\n" for line in lines)


def _one_line(text: str) -> str:
    """Return a user's text in one line of printable characters, as needed in a YAML comment."""
    words = " ".join(unmark(text).split())
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in words)


@dataclass
class Draft:
    """The parts of a DDPJob found so far.

    - `pod` and `trainer`: the fields of `podTemplate.spec` and of its container `trainer`.
    - `sources`: the path of the original value, for each field of the spec.
    - `defaults`: fields of the spec with a value that a later one replaces.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    pod_metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)

    @classmethod
    def with_image(cls, image: str) -> "Draft":
        """Return a draft with this image, or without an image if it is empty."""
        draft = cls()
        if image:
            draft.set("image", image, "--image")
        return draft

    def set(self, to: str, value: Any, path: str) -> None:
        """Set a field of the spec, such as `torchrun.command`. The first value stays."""
        if to in self.defaults:
            source, before = self.sources[to], self.remove(to)
            if before != value:
                self.drop(source, before, f"{path} is {quoted(value)}, and overrides it")
        *parents, key = to.split(".")
        place = self.spec
        for parent in parents:
            place = place.setdefault(parent, {})
        if key not in place:
            place[key] = value
            self.sources[to] = path
        elif place[key] != value:
            self.drop(path, value, f"spec.{to} is {quoted(place[key])}, from {self.sources[to]}")

    def set_default(self, to: str, value: Any, path: str) -> None:
        """Set a field of the spec to a value that a later one replaces. The first default stays."""
        is_default = to in self.defaults or self.get(to) is None
        self.defaults.discard(to)
        self.set(to, value, path)
        if is_default:
            self.defaults.add(to)

    def remove(self, to: str) -> Any:
        """Remove a field of the spec, and return its value."""
        *parents, key = to.split(".")
        place = self.spec
        for parent in parents:
            place = place[parent]
        self.defaults.discard(to)
        return place.pop(key)

    def get(self, to: str) -> Any:
        """Return a field of the spec, or None."""
        place: Any = self.spec
        for key in to.split("."):
            place = place.get(key, {}) if isinstance(place, dict) else {}
        return None if place == {} else place

    def add_variable(self, name: str, value: str, path: str) -> None:
        """Set a variable of the pods, or drop one set by torchrun for each process."""
        reason = reason_against_variable(name)
        if reason:
            self.drop(f"{path} {name}", value, reason, advice_on_variable(name))
            return
        env = self.spec.setdefault("env", [])
        env[:] = [item for item in env if item.get("name") != name]
        env.append({"name": name, "value": value})

    def remove_variable(self, name: str) -> str | None:
        """Remove a variable of the pods, and return its value; None if they do not have it."""
        env = self.spec.get("env", [])
        found = [item for item in env if item.get("name") == name]
        env[:] = [item for item in env if item.get("name") != name]
        return str(found[0].get("value", "")) if found else None

    def drop(self, path: str, value: Any, why: str, instead: str = "") -> Remark:
        """Remark on a value without a place in a DDPJob, and return the remark."""
        remark = Remark(path, why, instead, printed(value))
        self._add(remark)
        return remark

    def keep(self, dropped: Remark, where: str) -> None:
        """Change the remark on a dropped value to a note: it is kept in one place."""
        why = f"{where}: {dropped.why}"
        note = replace(dropped, why=why, is_dropped=False)
        self.remarks = [note if one == dropped else one for one in self.remarks]

    def note(self, path: str, text: str, instead: str = "", *, is_first: bool = False) -> None:
        """Add a note on a value to be checked by the user."""
        self._add(Remark(path, text, instead, is_dropped=False, is_first=is_first))

    def _add(self, remark: Remark) -> None:
        if remark not in self.remarks:
            self.remarks.append(remark)

    def document(self) -> dict[str, Any]:
        """Return the DDPJob."""
        spec = dict(self.spec)
        template = {"metadata": self.pod_metadata, "spec": self._pod_spec()}
        spec["podTemplate"] = {key: part for key, part in template.items() if part}
        given = {key: value for key, value in spec.items() if value not in ({}, [], None)}
        order = known_fields()["spec"]
        ordered = sorted(given, key=lambda key: order.index(key) if key in order else len(order))
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": self.metadata,
            "spec": unmark_all({key: given[key] for key in ordered}),
        }

    def _pod_spec(self) -> dict[str, Any]:
        pod = dict(self.pod)
        containers: Sequence[Any] = pod.pop("containers", [])
        if self.trainer:
            containers = [{"name": names.TRAINER, **self.trainer}, *containers]
        return {**pod, "containers": containers} if containers else pod


def reason_against_variable(name: str) -> str:
    """Return why a pod must not have a variable, or an empty string."""
    if name in names.RESERVED_VARIABLES:
        return "torchrun sets it for each process"
    if name.startswith(names.RESERVED_PREFIX):
        return "torchrun takes it for a flag, and the operator gives the flags"
    return ""


def printed(value: Any) -> str:
    """Return a value as JSON, for a remark. A text of several lines has one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def require_integer(value: Any, path: str) -> int:
    """Return an integer, also one in quotes. Raises SpecError."""
    if isinstance(value, bool) or not str(value).strip().isdecimal():
        raise SpecError(f"{path}: must be an integer, got {quoted(value)}")
    return int(value)


def names_of(items: Iterable[Dict]) -> list[str]:
    return [str(item.get("name", "")) for item in items]
