"""Read the assignment of a pod: one attempt of its job."""

from __future__ import annotations

from typing import Any

from .files import read_file, read_json

Assignment = dict[str, Any]

# The fields of an assignment. `grace` and `wait` are in seconds: for the processes of the last
# attempt to end, and for the next assignment if there is nothing to do. Without `start`, the last
# attempt is ended, and the next one has to wait for pods outside of it.
NUMBER = (int, float)
FIELDS: dict[str, Any] = {
    "attempt": int,
    "start": bool,
    "flags": list,
    "env": dict,
    "ranks": int,
    "grace": NUMBER,
    "wait": NUMBER,
}


def read_assignment(path: str, last_attempt: int) -> Assignment | None:
    """Return the assignment if it is complete, and newer than the last attempt."""
    found = read_json(read_file(path))
    for name, kind in FIELDS.items():
        if not isinstance(found.get(name), kind):
            return None
    is_newer = found["attempt"] > last_attempt
    return found if is_newer else None


def must_dump(path: str, attempt: int) -> bool:
    """Return True if the processes of an attempt are to write their stacks, and to end."""
    found = read_json(read_file(path))
    return found.get("attempt") == attempt and found.get("dump") is True
