"""Split output into lines as a terminal shows them, and find the JSON objects in them."""

import re
from typing import Any

from .files import read_json

# Characters that do not occur in text.
BINARY = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")

# The most bytes of a line with a JSON object, and the places in it at which it may begin.
OBJECT_LINE = 4096
OBJECTS = 4


def displayed_lines(text: bytes) -> list[bytes]:
    """Return the lines of a text as a terminal shows them. The last one may have no end."""
    if b"\r" not in text:
        return text.splitlines(keepends=True)
    *lines, rest = text.split(b"\n")
    found = []
    for line in lines:
        found += [part + b"\n" for part in apart(line)]
    if rest:
        found.append(rest)
    return found


def is_overwritten(line: bytes) -> bool:
    """Return True if a terminal would write over a part of a line. Binary output stays as it is."""
    return b"\r" in line and not BINARY.search(line)


def as_displayed(line: bytes) -> bytes:
    """Return what a terminal shows of a line: a carriage return goes back to its beginning.

    The text after it overwrites as many characters as it has.
    """
    shown = ""
    pieces = line.decode(errors="surrogateescape").split("\r")
    for piece in reversed(pieces):
        shown += piece[len(shown) :]
    return shown.encode(errors="surrogateescape")


def apart(line: bytes) -> list[bytes]:
    """Return a line as displayed. A JSON object after a progress bar becomes a separate line."""
    if not is_overwritten(line):
        return [line]
    line = line.rstrip(b"\r")
    earlier, found, last = line.rpartition(b"\r")
    before, entries = object_at_end(last)
    if not found or not entries:
        return [as_displayed(line)]
    json_line = last[len(before) :]
    bar = as_displayed(earlier + b"\r" + before)
    return [bar, json_line] if bar.strip() else [json_line]


def object_at_end(line: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the text before a JSON object at the end of a line, and the object, or nothing."""
    text = line.rstrip()
    if not text.endswith(b"}") or len(text) >= OBJECT_LINE:
        return text, {}
    start = -1
    for _ in range(OBJECTS):
        start = text.find(b"{", start + 1)
        if start < 0:
            break
        found = read_json(text[start:])
        if found:
            return text[:start], found
    return text, {}
