"""Mark the characters of a shell script that quotes or a backslash make literal.

A shell expands `$A` but not `'$A'`. The marked characters are for private use in Unicode. They keep
the difference until the job is complete, after the quotes have gone.
"""

import re
import shlex
from typing import Any

# An escaped character, or a text in quotes. A default in `"${NAME:-"default"}"` has its own quotes.
BEFORE_DEFAULT = r"\$\{\w+:?[-=]"
IN_DEFAULT = r"(?:[^\"{}]|\$\{[^\"{}]*\})*"
QUOTED = re.compile(
    rf"""\\.|'[^']*'|"(?:\\.|{BEFORE_DEFAULT}"{IN_DEFAULT}"\}}|[^"\\])*\"""", re.DOTALL
)

# A text in bash's quotes, with the escapes of C.
ANSI_C = re.compile(rf"\$'((?:\\.|[^'\\])*)'|{QUOTED.pattern}", re.DOTALL)

# An escape in it, and the letters after the backslash that mean the same in Python.
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
OF_PYTHON = "abfnrtvxuU01234567\\'\""

# Characters with a meaning for a shell outside of quotes.
SPECIAL = "$`~*{<>"
FIRST_MARK = 0xE100
MARKS = {ord(one): chr(FIRST_MARK + ord(one)) for one in SPECIAL}
DOLLAR = MARKS[ord("$")]
CHARACTERS = {FIRST_MARK + ord(one): one for one in SPECIAL}

# What is special in double quotes only after `\`, and what is not special in them.
ESCAPED = re.compile(r"\\([$`])")
NOT_SPECIAL = re.compile(r"(?<!\$)[~*{<>]")


def mark(text: str) -> str:
    """Return the text of a shell with its literal characters marked. The quotes stay.

    A text in `$'…'` gets plain quotes.
    """
    return ANSI_C.sub(_mark_quoted, text)


def unmark(text: str) -> str:
    """Return a text with the characters themselves."""
    return text.translate(CHARACTERS)


def unmark_all(value: Any) -> Any:
    """Return a value of a manifest with the characters themselves in its texts."""
    if isinstance(value, str):
        # Kubernetes reads `$(NAME)`, and `$$` as a dollar sign.
        return unmark(value.replace(f"{DOLLAR}{DOLLAR}", "$$$$").replace(f"{DOLLAR}(", "$$("))
    if isinstance(value, dict):
        return {key: unmark_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unmark_all(item) for item in value]
    return value


def _mark_quoted(found: re.Match[str]) -> str:
    text = found[0]
    if found[1] is not None:
        return shlex.quote(_without_escapes(found[1])).translate(MARKS)
    if text[0] == "'":
        return text.translate(MARKS)
    if text[0] == "\\":
        return text[1].translate(MARKS) if text[1] in SPECIAL else text
    escaped = ESCAPED.sub(lambda one: MARKS[ord(one[1])], text)
    # A command or a calculation in quotes has a syntax of its own.
    if "$(" in escaped or "`" in escaped:
        return escaped
    return NOT_SPECIAL.sub(lambda one: MARKS[ord(one[0])], escaped)


def _without_escapes(text: str) -> str:
    """Return a text with the characters of its escapes."""
    escaped = ESCAPE.sub(_as_in_python, text)
    try:
        return escaped.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        return text


def _as_in_python(escape: re.Match[str]) -> str:
    """Return an escape for Python. One that bash does not know is a backslash and a letter."""
    letter = escape[1]
    if letter in OF_PYTHON:
        return escape[0]
    return r"\x1b" if letter in "eE" else rf"\\{letter}"
