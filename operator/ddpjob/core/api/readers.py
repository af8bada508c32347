"""Readers for values of unknown shape, as they come out of YAML and JSON.

A `require_…` reader raises SpecError and names the field. An `…_or_empty` reader never raises: what
it cannot read counts as absent. A specification is read by the first kind, a status by the second.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

# An object of a manifest: a read-only JSON object.
Dict = Mapping[str, Any]

# Longest quotation of a user's value in a message, in characters.
MAX_QUOTED = 120


class SpecError(ValueError):
    """A manifest that cannot become a job. The message says what is wrong and what to do."""


def quoted(value: Any) -> str:
    """Return a user's value as JSON, shortened if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    # YAML has values unknown to JSON: dates as keys, and lists that contain themselves.
    except (TypeError, ValueError, RecursionError):
        text = _representation(value)
    if len(text) <= MAX_QUOTED:
        return text
    return f"{text[:MAX_QUOTED]}…"


def _representation(value: Any) -> str:
    try:
        return repr(value)
    # An integer of more than 4,300 digits, or a list within 1,000 others.
    except (ValueError, RecursionError):
        return "a value that is too large to print"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name closest to `name`, or an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def either(words: Iterable[object]) -> str:
    """Return words as a choice: `a, b or c`."""
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last


def refuse(where: str, what: str, value: Any) -> SpecError:
    """Return the error for a field `where` that must be `what` and is `value`."""
    if value is None:
        return SpecError(f"{where}: is required; it must be {what}")
    return SpecError(f"{where}: must be {what}, got {quoted(value)}")


def require_object(value: Any, where: str) -> Dict:
    """Return an object; an absent one is empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(where, "an object", value)
    return value


def require_fields(value: Any, where: str) -> Dict:
    """Return the fields of an object that are not null.

    The API server also treats a null as an absent field, and fills in its default.
    """
    fields = require_object(value, where)
    return {key: setting for key, setting in fields.items() if setting is not None}


def require_objects(value: Any, where: str) -> Sequence[Dict]:
    """Return a list of objects; an absent one is empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse(where, "a list of objects", value)
    for item in value:
        if not isinstance(item, Mapping):
            raise refuse(where, "a list of objects", value)
    return value


def require_string(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise refuse(where, "a string that is not empty", value)
    return value


def normal_path(path: str) -> str:
    """Return an absolute path in its shortest form: `/dev//shm/` becomes `/dev/shm`."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts[-1:] = []
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def mapping_or_empty(value: Any) -> Dict:
    return value if isinstance(value, Mapping) else {}


def mappings_or_empty(value: Any) -> tuple[Dict, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(item for item in value if isinstance(item, Mapping))


def strings_or_empty(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def boolean_or_none(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def integer_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def integer_or_zero(value: Any) -> int:
    return integer_or_none(value) or 0


def integers_or_empty(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(item for item in value if isinstance(item, int))


def child(data: Any, key: str) -> Dict:
    """Return the object at `key` of an object, or an empty one."""
    return mapping_or_empty(mapping_or_empty(data).get(key))


def children(data: Any, key: str) -> tuple[Dict, ...]:
    """Return the objects in the list at `key` of an object."""
    return mappings_or_empty(mapping_or_empty(data).get(key))
