"""Parts of a status: how they are read, written and described, as their fields declare it.

A part is a frozen dataclass with fields made by `entry` of core/api/entries.py. The form of a class
is computed once, since the operator reads thousands of statuses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ddpjob.core.api.entries import DECLARED, NOT_AHEAD, REQUIRED, Entry
from ddpjob.core.api.readers import Dict, mapping_or_empty
from ddpjob.core.api.times import format_time, later, parse_time

# The object of the manifest with the internal fields, and its description.
OPERATOR = "operator"
OPERATOR_DESCRIPTION = "What only the operator needs to know again. It may change in any version."

INT32 = 2**31 - 1
INT64 = 2**63 - 1

NOTHING: Dict = {}

P = TypeVar("P")


class Part:
    """The base of a part. Copies of jobs are kept pickled, so it is restored in one call."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        return cls, form_of(cls).values(self)


def read(cls: type[P], data: Any) -> P:
    """Return the part in an object of a manifest. Never raises.

    What cannot be read counts as absent. Numbers and lists beyond their bounds are cut.
    """
    own = mapping_or_empty(data)
    internal = mapping_or_empty(own.get(OPERATOR))
    part: P | None = form_of(cls).read(own, internal)
    # Of a status no field is required.
    return cls() if part is None else part


def write(part: Any) -> dict[str, Any]:
    """Return a part as an object of a manifest. Fields with their default are left out."""
    own, internal = form_of(type(part)).write(part)
    if internal:
        own[OPERATOR] = internal
    return own


def schema(cls: type[Any]) -> dict[str, Any]:
    """Return the structural OpenAPI schema of a part."""
    own, internal = form_of(cls).properties()
    if internal:
        own[OPERATOR] = {
            "description": OPERATOR_DESCRIPTION,
            "type": "object",
            "properties": internal,
        }
    return {"type": "object", "properties": own}


def differs(old: Any, new: Any) -> bool:
    """Return True if a field of two parts differs, and the change is more than progress."""
    return form_of(type(old)).differs(old, new)


def catch_up(part: P, now: datetime) -> P:
    """Return a part without clocks ahead of `now`, as after a clock was set back."""
    caught_up: P = form_of(type(part)).catch_up(part, now)
    return caught_up


# Values


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type are read, written and described.

    `read` returns None for an unreadable value. `write` is None if a value is written as it is.
    `form` is the form of the part, or of the parts in the list.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None
    schema: Dict
    form: "Form | None" = None
    is_list: bool = False


def _codec(hint: Any, declared: Entry) -> Codec:
    """Return the codec of a type. Raises TypeError for a type that no field can have."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is tuple:
        item = _codec(arguments[0], declared)
        return _list_codec(item, declared)
    if origin is Mapping:
        value = _codec(arguments[1], declared)
        return _mapping_codec(value)
    if not arguments:
        return _plain_codec(hint, declared)
    # An optional value: it is absent if it is None.
    chosen = [one for one in arguments if one is not type(None)]
    if len(chosen) > 1:
        raise TypeError(f"{hint} is not a type that a field of a part can have")
    return _plain_codec(chosen[0], declared)


def _plain_codec(hint: Any, declared: Entry) -> Codec:
    if hint is bool:
        return Codec(_boolean, None, {"type": "boolean"})
    if hint is int:
        return _integer_codec(declared)
    if hint is datetime:
        return Codec(parse_time, format_time, {"type": "string", "format": "date-time"})
    if hint is str:
        return _string_codec(declared.choices)
    return _part_codec(form_of(hint))


def _part_codec(form: "Form") -> Codec:
    own, _ = form.properties()
    described = {"type": "object", **form.required(), "properties": own}

    def read_part(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return None
        return form.read(value, NOTHING)

    return Codec(read_part, write, described, form)


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _string_codec(choices: Sequence[str]) -> Codec:
    # A member of an enumeration is written as a plain string.
    if not choices:
        return Codec(_string, str, {"type": "string"})

    def read_choice(value: Any) -> str | None:
        text = _string(value)
        return text if text in choices else None

    described = {"type": "string", "enum": list(choices)}
    return Codec(read_choice, str, described)


def _integer_codec(declared: Entry) -> Codec:
    largest = INT64 if declared.long else INT32
    low = -largest - 1
    high = largest
    described: dict[str, Any] = {
        "type": "integer",
        "format": "int64" if declared.long else "int32",
    }
    if declared.low is not None:
        low = declared.low
        described["minimum"] = low
    if declared.high is not None:
        high = declared.high
        described["maximum"] = high

    def read_integer(value: Any) -> int | None:
        # In Python, True is an integer too.
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value if low <= value <= high else min(max(value, low), high)

    return Codec(read_integer, None, described)


def _list_codec(one: Codec, declared: Entry) -> Codec:
    def read_list(value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        kept = value[: declared.items]
        found = map(one.read, kept)
        return tuple(item for item in found if item is not None)

    described: dict[str, Any] = {"type": "array"}
    if declared.items is not None:
        described["maxItems"] = declared.items
    if declared.key:
        described["x-kubernetes-list-type"] = "map"
        described["x-kubernetes-list-map-keys"] = [declared.key]
    described["items"] = one.schema
    write_one = one.write

    def write_list(items: Sequence[Any]) -> list[Any]:
        return [*map(write_one, items)] if write_one else [*items]

    return Codec(read_list, write_list, described, one.form, is_list=True)


def _mapping_codec(one: Codec) -> Codec:
    def read_mapping(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        found = {}
        for key, raw in value.items():
            item = one.read(raw) if isinstance(key, str) else None
            if item is not None:
                found[key] = item
        return found

    def write_mapping(value: Dict) -> dict[str, Any]:
        return {str(key): item for key, item in value.items()}

    described = {"type": "object", "additionalProperties": one.schema}
    return Codec(read_mapping, write_mapping, described)


# The form of a class


@dataclass(frozen=True, slots=True)
class Slot:
    """A field, or a property if it is computed, with its type resolved."""

    name: str
    key: str
    entry: Entry
    default: Any
    codec: Codec
    # The form of a part, if the field has one alone and not a list of them.
    form: "Form | None"
    # From the entry, since they are looked at for each value.
    always: bool
    internal: bool

    def described(self) -> dict[str, Any]:
        return {"description": self.entry.description, **self.codec.schema}


def _new_slot(name: str, declared: Entry, default: Any, codec: Codec) -> Slot:
    return Slot(
        name=name,
        key=declared.name or camel_case(name),
        entry=declared,
        default=default,
        codec=codec,
        form=None if codec.is_list else codec.form,
        always=declared.always,
        internal=declared.internal,
    )


# A field as it is read: its name in Python and in the manifest, and the reader of its value.
Row = tuple[str, str, Callable[[Any], Any]]


def _row(slot: Slot) -> Row:
    return slot.name, slot.key, slot.codec.read


def _read_fields(values: dict[str, Any], data: Dict, rows: Iterable[Row]) -> None:
    """Add what can be read of an object to the values, by the names of the fields."""
    # A status has a hundred fields, so each step counts.
    get = data.get
    for name, key, read_value in rows:
        raw = get(key)
        if raw is not None:
            value = read_value(raw)
            if value is not None:
                values[name] = value


def _write_part(slot: Slot, part: Any, own: dict[str, Any], internal: dict[str, Any]) -> None:
    if part is None or slot.form is None:
        return
    inner, hidden = slot.form.write(part)
    target = internal if slot.internal else own
    if inner:
        target[slot.key] = inner
    if hidden:
        internal[slot.key] = hidden


def _getter(slots: Sequence[Slot]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of these fields of a part."""
    names = [slot.name for slot in slots]
    get = attrgetter(*names)
    if len(names) > 1:
        return get
    # With one name, an attrgetter returns no tuple.
    return lambda part: (get(part),)


class Form:
    """The fields of a class, and what follows from them.

    - `written`: the fields and the computed ones, in the order of the manifest.
    - `empty`: the part without any value; None if it has a required field.
    - `clocks`: the fields with times that must not be ahead of the clock.
    - `values`: returns the values of a part's fields.

    The operator reads and writes thousands of statuses, so all of this is looked up once.
    """

    def __init__(self, cls: type[Any], slots: Sequence[Slot], written: Sequence[Slot]) -> None:
        self.cls = cls
        self.slots = slots
        self.written = written
        self.needed = [slot.name for slot in slots if slot.default is REQUIRED]
        self.empty = None if self.needed else cls()
        self.values = _getter(slots)
        self.clocks = [slot for slot in slots if _is_clock(slot)]
        self.has_progress = any(map(_has_progress, slots))
        self._get_written = _getter(written)
        self._written = [(slot, slot.default, slot.codec.write) for slot in written]
        # Parts with internal fields are in two objects. All other fields are in one.
        self._parts = [slot for slot in slots if slot.form and not slot.entry.internal]
        alone = [slot for slot in slots if slot not in self._parts]
        self._own = [_row(slot) for slot in alone if not slot.internal]
        self._internal = [_row(slot) for slot in alone if slot.internal]

    def read(self, own: Dict, internal: Dict) -> Any:
        """Return the part in two objects, or None if a required field is missing."""
        values: dict[str, Any] = {}
        _read_fields(values, own, self._own)
        if internal:
            _read_fields(values, internal, self._internal)
        for slot in self._parts:
            inner = own.get(slot.key)
            hidden = internal.get(slot.key)
            if slot.form and (inner or hidden):
                part = slot.form.read(mapping_or_empty(inner), mapping_or_empty(hidden))
                if part is not None:
                    values[slot.name] = part
        if not values or any(name not in values for name in self.needed):
            return self.empty
        return self.cls(**values)

    def write(self, part: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the object of a part, and the object of its internal fields."""
        own: dict[str, Any] = {}
        internal: dict[str, Any] = {}
        values = self._get_written(part)
        for (slot, default, write_value), value in zip(self._written, values, strict=True):
            if slot.form:
                _write_part(slot, value, own, internal)
            elif slot.always or (value is not default and value != default):
                target = internal if slot.internal else own
                target[slot.key] = write_value(value) if write_value else value
        return own, internal

    def properties(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the schemas of the fields, and those of the internal ones, by their names."""
        own: dict[str, Any] = {}
        internal: dict[str, Any] = {}
        for slot in self.written:
            described = slot.described()
            target = internal if slot.internal else own
            target[slot.key] = described
            if slot.form:
                _, hidden = slot.form.properties()
                if hidden:
                    internal[slot.key] = {**described, "properties": hidden}
        return own, internal

    def required(self) -> dict[str, list[str]]:
        needed = []
        for slot in self.slots:
            if slot.default is REQUIRED or slot.entry.demanded:
                needed.append(slot.key)
        return {"required": needed} if needed else {}

    def differs(self, old: Any, new: Any) -> bool:
        for slot in self.slots:
            if slot.entry.progress:
                continue
            before = getattr(old, slot.name)
            after = getattr(new, slot.name)
            if before != after and _matters(slot, before, after):
                return True
        return False

    def catch_up(self, part: Any, now: datetime) -> Any:
        changes = {}
        for slot in self.clocks:
            value = getattr(part, slot.name)
            caught_up = _caught_up(slot, value, now)
            if caught_up != value:
                changes[slot.name] = caught_up
        return replace(part, **changes) if changes else part


def _form(cls: type[Any]) -> Form:
    """Return the form of a class. Raises TypeError for a field without a declaration."""
    hints = get_type_hints(cls)
    slots = [_slot(one, hints[one.name]) for one in fields(cls)]
    computed = list(_computed(cls))
    written = list(_in_order(slots, computed))
    return Form(cls, slots, written)


# Each class is looked at once.
form_of = cast(Callable[[type[Any]], Form], cache(_form))


def _slot(one: "Field[Any]", hint: Any) -> Slot:
    declared = one.metadata.get(DECLARED)
    if not isinstance(declared, Entry):
        raise TypeError(f"the field {one.name} of a part needs an entry")
    default = one.default
    if one.default_factory is not MISSING:
        default = one.default_factory()
    codec = _codec(hint, declared)
    return _new_slot(one.name, declared, default, codec)


def _computed(cls: type[Any]) -> Iterator[Slot]:
    for name, member in vars(cls).items():
        getter = getattr(member, "fget", None)
        declared = getattr(getter, DECLARED, None)
        if isinstance(declared, Entry):
            hint = get_type_hints(getter)["return"]
            codec = _codec(hint, declared)
            yield _new_slot(name, declared, default="", codec=codec)


def _in_order(slots: Iterable[Slot], others: Sequence[Slot]) -> Iterator[Slot]:
    """Yield the fields, each followed by its computed ones. The other computed ones come last."""
    for slot in slots:
        yield slot
        yield from (other for other in others if other.entry.after == slot.name)
    yield from (other for other in others if not other.entry.after)


def camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _is_clock(slot: Slot) -> bool:
    if slot.entry.ahead is not None:
        return True
    form = slot.codec.form
    return bool(form and form.clocks)


def _has_progress(slot: Slot) -> bool:
    if slot.entry.progress:
        return True
    form = slot.codec.form
    return bool(form and form.has_progress)


def _matters(slot: Slot, before: Any, after: Any) -> bool:
    """Return True if the difference of two values of a field is more than progress."""
    form = slot.codec.form
    if form is None or not form.has_progress:
        return True
    if before is None or after is None:
        return True
    if not slot.codec.is_list:
        return form.differs(before, after)
    if len(before) != len(after):
        return True
    pairs = zip(before, after, strict=True)
    return any(form.differs(*pair) for pair in pairs)


def _caught_up(slot: Slot, value: Any, now: datetime) -> Any:
    """Return a value of a field without times ahead of `now`."""
    if value is None:
        return None
    if slot.codec.is_list:
        return tuple(_caught_up_item(slot, item, now) for item in value)
    return _caught_up_item(slot, value, now)


def _caught_up_item(slot: Slot, item: Any, now: datetime) -> Any:
    if slot.codec.form:
        return slot.codec.form.catch_up(item, now)
    ahead = slot.entry.ahead or NOT_AHEAD
    return min(item, later(now, ahead))
