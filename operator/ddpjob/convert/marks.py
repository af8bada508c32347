"""Mark the characters of a shell script that quotes or a backslash make literal.

A shell expands `$A` but not `'$A'`. The marked characters are for private use in Unicode. They keep
the difference until the job is complete, after the quotes have gone.
"""

import re
from typing import Any

# An escaped character, or a text in quotes. A default in `"${NAME:-"default"}"` has its own quotes.
BEFORE_DEFAULT = r"\$\{\w+:?[-=]"
IN_DEFAULT = r"(?:[^\"{}]|\$\{[^\"{}]*\})*"
QUOTED = re.compile(
    rf"""\\.|'[^']*'|"(?:\\.|{BEFORE_DEFAULT}"{IN_DEFAULT}"\}}|[^"\\])*\"""", re.DOTALL
)

# A text in bash's quotes, with the escapes of C.
ANSI_C = re.compile(rf"\$'((?:\\.|[^'\\])*)'|{QUOTED.pattern}", re.DOTALL)

# An escape in it, and the characters of those with one letter.
ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|c.|.)", re.DOTALL
)
LAST_CHARACTER = 0x10FFFF
OF_ESCAPES = {
    **dict(zip("abefnrtv", "\a\b\x1b\f\n\r\t\v", strict=True)),
    **{one: one for one in "\\'\"?"},
    "E": "\x1b",
}

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
        quoted = _without_escapes(found[1]).replace("'", "'\"'\"'")
        return f"'{quoted}'".translate(MARKS)
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
    """Return a text with the characters of its escapes, as bash reads them. NUL ends the text."""
    found, _, _ = ESCAPE.sub(_character, text).partition("\0")
    return found.encode(errors="surrogateescape").decode(errors="replace")


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape, or a byte of one. One that bash does not know stays."""
    letter, digits = escape[1][0], escape[1][1:]
    if letter in OF_ESCAPES:
        return OF_ESCAPES[letter]
    if letter in "uU" and digits:
        return chr(min(int(digits, 16), LAST_CHARACTER))
    if letter == "c" and digits:
        return chr(ord(digits) & 0x1F)
    if letter == "x" and digits:
        return _byte(int(digits, 16))
    if letter in "01234567":
        return _byte(int(escape[1], 8) & 0xFF)
    return escape[0]


def _byte(number: int) -> str:
    return bytes([number]).decode(errors="surrogateescape")
