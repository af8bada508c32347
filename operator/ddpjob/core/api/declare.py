"""How a field of the spec is declared: once, with its type, bounds, default, meaning and changes.

A declared class is a pydantic dataclass, so reading is strict and an instance is as small as one of
a plain dataclass with slots. `read` turns a manifest into instances. `release/crd.py` writes the
CRD, the client's types and the table of the reference from the same declarations.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from ddpjob.core.api.readers import SpecError, either, mapping_or_empty, refuse
from ddpjob.core.api.times import MAX_INT32, MAX_SECONDS

# The types of fields. Without Strict, pydantic reads "2", true and 2.0 as integers.
Int = Annotated[int, Strict()]
Text = Annotated[str, Strict()]
Bool = Annotated[bool, Strict()]


def _only_a_list(value: Any) -> Any:
    # Otherwise pydantic also reads a set, which JSON does not have.
    if not isinstance(value, list | tuple):
        raise ValueError("no list")
    return value


Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], BeforeValidator(_only_a_list)]

# Names in a manifest are those of the attributes in camel case, unless a field has its own.
CONFIG = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)


class Change(StrEnum):
    """When a field of a job may change."""

    ALWAYS = "always"
    SUSPENDED = "while suspended"
    NEVER = "never"


@dataclass(frozen=True)
class Facts:
    """What a declaration has beyond pydantic's own.

    - `change`: when the field may change.
    - `wanted`: what the value must be, for messages; if empty, it follows from the type.
    """

    change: Change
    wanted: str


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a string, as the metadata of a type. They are read when needed."""

    values: Callable[[], Iterable[str]]


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None}


class Declared:
    """The base of declared classes. A null counts as absent, as it does for the API server.

    A key that is not a string is no name of a field, so it is ignored like an unknown field.
    """

    __slots__ = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        present = _without_nulls(data)
        named = {key: value for key, value in present.items() if isinstance(key, str)}
        return {key: _without_nulls(value) for key, value in named.items()}


T = TypeVar("T", bound=Declared)


def entry(
    description: str = "",
    default: Any = ...,
    *,
    change: Change = Change.NEVER,
    name: str | None = None,
    wanted: str = "",
    **bounds: Any,
) -> Any:
    """Declare a field. Without a default it is required.

    An object has the description of its class, if it has none of its own. `name` is the field's
    name in a manifest. `wanted` is what the value must be, for messages; by default it follows from
    the type. `bounds` are pydantic's: `ge`, `le`, `min_length` and `max_length`. `change` is for
    fields of `spec` itself: an object changes as a whole.
    """
    return Field(
        default=default,
        alias=name,
        description=" ".join(description.split()),
        json_schema_extra={"facts": Facts(change, wanted)},  # type: ignore[dict-item]
        **bounds,
    )


def _whole_seconds(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    # A timedelta cannot hold a larger number.
    if type(value) is not int or abs(value) > MAX_SECONDS:
        raise ValueError("no number of seconds")
    return timedelta(seconds=value)


Seconds = Annotated[timedelta, BeforeValidator(_whole_seconds)]


def seconds(description: str, *, name: str, change: Change = Change.NEVER, low: int = 1) -> Any:
    """Declare a field of the type `Seconds | None`, an integer in a manifest."""
    return entry(description, None, name=name, change=change, ge=timedelta(seconds=low))


def facts_of(info: FieldInfo) -> Facts:
    extra: Any = info.json_schema_extra
    return extra["facts"]  # type: ignore[no-any-return]


def fields_of(kind: type[Any]) -> Mapping[str, FieldInfo]:
    """Return the fields of a declared class by their names in a manifest."""
    return {str(info.alias): info for info in kind.__pydantic_fields__.values()}


def type_of(info: FieldInfo) -> Any:
    """Return the type of a field without `| None` and without annotations."""
    return plain(info.annotation)


def plain(kind: Any) -> Any:
    """Return a type without `| None` and without annotations."""
    if get_origin(kind) is Annotated:
        return plain(get_args(kind)[0])
    if type(None) in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return plain(kind)
    return kind


def is_declared(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Declared)


def bounds_of(metadata: Any) -> dict[str, Any]:
    """Return the bounds in the metadata of a field or of an annotated type, by pydantic's names."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= bounds_of(item.metadata)
        for key in ("ge", "le", "min_length", "max_length"):
            if hasattr(item, key):
                found[key] = getattr(item, key)
    return found


def read(kind: type[T], data: Any, where: str) -> T:
    """Return an instance of a declared class. Raises SpecError for the first wrong field.

    `where` is the path of the object, such as `spec`. Undeclared fields are ignored.
    """
    adapter: TypeAdapter[T] = _adapter(cast(Any, kind))
    try:
        # The names of the attributes are for Python only.
        return adapter.validate_python({} if data is None else data, by_alias=True, by_name=False)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    except RecursionError as error:
        raise SpecError(f"{where}: has too many lists or objects within each other") from error
    raise _refusal(kind, problem, data, where)


@cache
def _adapter(kind: type[Declared]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _refusal(kind: Any, problem: Mapping[str, Any], data: Any, where: str) -> SpecError:
    """Return the error for a problem that pydantic found in `data`."""
    own = problem.get("ctx", {}).get("error")
    if isinstance(own, SpecError):
        return own
    wanted = "an object"
    value = data
    for step in problem["loc"]:
        if is_declared(kind):
            info = fields_of(kind)[step]
            kind = type_of(info)
            wanted = "an object" if get_origin(kind) is Mapping else what_is_wanted(info)
        # The whole of a list is quoted, and a list of alternatives has no value of its own.
        elif get_origin(kind) is Mapping:
            kind, wanted = None, what_is_wanted(info)
        else:
            break
        where = f"{where}.{step}"
        value = mapping_or_empty(value).get(step)
    longest = problem.get("ctx", {}).get("max_length")
    if longest is not None:
        value = problem["input"]
        unit = "characters" if isinstance(value, str) else "items"
        wanted = f"at most {longest} {unit} long"
        where += "".join(f"[{step}]" for step in problem["loc"] if isinstance(step, int))
    return refuse(where, wanted, value)


def what_is_wanted(info: FieldInfo) -> str:
    """Return what the value of a field must be, for a message."""
    return facts_of(info).wanted or _wanted(info.annotation, bounds_of(info.metadata))


def _wanted(kind: Any, bounds: Mapping[str, Any]) -> str:
    while get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
        bounds = {**bounds_of(metadata), **bounds}
    kind = plain(kind)
    if kind is bool:
        return "true or false"
    if kind in (int, timedelta):
        return f"an integer from {_number(bounds['ge'])} to {_number(bounds.get('le', MAX_INT32))}"
    if kind is str:
        return "a string that is not empty" if bounds.get("min_length") else "a string"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if plain(item) is str:
            least = "at least one string" if bounds.get("min_length") else "strings"
            return f"a list of {least} (put numbers in quotes)"
        return f"a list of {_wanted(item, {}).removeprefix('an ').replace('integer', 'integers')}"
    if get_origin(kind) is Literal:
        return either(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return either(kind)
    return "an object"


def _number(value: int | timedelta) -> int:
    return int(value.total_seconds()) if isinstance(value, timedelta) else value
