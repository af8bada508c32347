"""Find the expansions in the text of a shell: their ends, and their defaults."""

import re
from collections.abc import Callable, Mapping

# The beginning of `${NAME:-default}`, `${NAME-default}`, and both with `=`.
WITH_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=]")

# `$(NAME)` of Kubernetes, and `$$(NAME)` for this text itself.
OF_KUBERNETES = re.compile(r"\$(\$?)(\(([A-Za-z_][\w.-]*)\))")


def substitution_end(text: str, start: int) -> int:
    """Return the end of a command or process substitution at `start`, or `start` without one."""
    if text.startswith("`", start):
        end = text.find("`", start + 1)
        return end + 1 if end > 0 else start
    if not text.startswith(("$(", "<(", ">("), start):
        return start
    # An apostrophe in a here-document or in a comment opens no quote.
    return _closing(text, start, has_quotes=True) or _closing(text, start) or start


def _closing(text: str, start: int, *, has_quotes: bool = False) -> int:
    """Return the end of the parentheses that open after `start`, or 0 without one."""
    depth = 0
    quote = ""
    index = start + 1
    while index < len(text):
        character = text[index]
        if character == "\\" and quote != "'":
            index += 1
        elif has_quotes and (quote or character in "'\""):
            quote = next_quote(quote, character)
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
        index += 1
        if depth == 0:
            return index
    return 0


def parameter_end(text: str, start: int, *, in_quotes: bool) -> int:
    """Return the end of an expansion `${…}` at `start`, or `start` without one.

    Quotes and expansions in it are its own. Within double quotes, a single quote is no quote.
    """
    if not text.startswith("${", start):
        return start
    # Of each open expansion: the open quote in it, and whether it is in double quotes itself.
    levels = [("", in_quotes)]
    index = start + 2
    while levels and index < len(text):
        quote, is_within = levels[-1]
        character = text[index]
        end = index + 1
        if quote == "'":
            levels[-1] = (next_quote(quote, character), is_within)
        elif character == "\\":
            end = index + 2
        elif text.startswith("${", index):
            levels.append(("", is_within or bool(quote)))
            end = index + 2
        elif character == "}" and not quote:
            levels.pop()
        elif character == '"' or (character == "'" and not is_within):
            levels[-1] = (next_quote(quote, character), is_within)
        else:
            end = max(end, substitution_end(text, index))
        index = end
    return start if levels else index


def next_quote(quote: str, character: str) -> str:
    """Return the open quote after a character; an empty text outside of quotes."""
    if quote:
        return "" if character == quote else quote
    return character if character in "'\"" else ""


def as_started(text: str, values: Mapping[str, str]) -> str:
    """Return a text of a container's command as its program gets it: the kubelet expands it.

    `values` are the known variables of the pods. The kubelet leaves an unknown name as it is.
    """

    def value(found: re.Match[str]) -> str:
        return f"${found[2]}" if found[1] else values.get(found[3], found[0])

    return OF_KUBERNETES.sub(value, text)


def without_defaults(text: str, is_set: Callable[[str], bool]) -> str:
    """Return a text with `${NAME}` in place of `${NAME:-default}` for variables that are set."""
    kept = ""
    index = 0
    quote = ""
    while index < len(text):
        end = index + 1
        part = ""
        if text[index] == "\\" and quote != "'":
            end = index + 2
        elif quote != "'" and (found := WITH_DEFAULT.match(text, index)):
            end = max(end, parameter_end(text, index, in_quotes=bool(quote)))
            part = f"${{{found[1]}}}" if end > index + 1 and is_set(found[1]) else ""
        else:
            quote = next_quote(quote, text[index])
        kept += part or text[index:end]
        index = end
    return kept
