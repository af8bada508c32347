"""Declarations of the fields of a status.

A field is declared once, by its annotation and by `entry`. core/api/parts.py derives from its
declaration how it is read, written and described. It is a str, int, bool, datetime or part, or
None; a tuple of str, int, datetime or parts; or a Mapping from str to str or int.

Internal fields are for the operator alone. They are written into the object `operator` of the
manifest, with the same path below it: `attempt.latched` of a status is `operator.attempt.latched`
in the manifest.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

# The bound of a time that must not be ahead of the clock.
NOT_AHEAD = timedelta(0)

# Times of restarts in a status: as many as a budget can need.
MAX_TIMES = 1000

# The default of a required field: a part cannot be read without it.
REQUIRED: Any = MISSING

# The key of a field's metadata.
DECLARED = "entry"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Entry:
    """What a field declares beside its type and its default.

    - `description`: one or two sentences for `kubectl explain` and the reference.
    - `name`: the name in the manifest; empty for the Python name in camelCase.
    - `progress`: a change may be written later, together with one that matters.
    - `internal`: only the operator reads it.
    - `always`: written also if it has its default. Any other field is then absent.
    - `demanded`: the schema demands the field, although it may be None in Python.
    - `low`, `high`: bounds of an integer. `long`: it has 64 bits.
    - `ahead`: how far a time may be ahead of the clock. None for a record: it stays as it is.
    - `items`: the largest number of items. `key`: the field that tells the items apart. It makes
      the list a map for server-side apply. `choices`: the only values of a string.
    - `after`: the field that a computed one follows; empty if it comes last.
    """

    description: str
    name: str = ""
    progress: bool = False
    internal: bool = False
    always: bool = False
    demanded: bool = False
    low: int | None = None
    high: int | None = None
    long: bool = False
    ahead: timedelta | None = None
    items: int | None = None
    key: str = ""
    choices: tuple[str, ...] = ()
    after: str = ""


def entry(default: Any, description: str, **declared: Any) -> Any:
    """Return the field of a part. A class as `default` makes a new object for each part."""
    metadata = {DECLARED: Entry(description, **declared)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def clock(description: str, *, progress: bool = False) -> Any:
    """Return the field of the time when a state began. Only the operator reads it."""
    return entry(None, description, progress=progress, internal=True, ahead=NOT_AHEAD)


def times(description: str) -> Any:
    """Return the field of the times of restarts. Only the operator reads it."""
    return entry((), description, internal=True, ahead=NOT_AHEAD, items=MAX_TIMES)


def computed(description: str, **declared: Any) -> Callable[[F], F]:
    """Mark a property's getter: the property is written into the manifest, but never read."""

    def mark(getter: F) -> F:
        getter.__dict__[DECLARED] = Entry(description, **declared)
        return getter

    return mark
