"""Read the statements of a shell script, as far as possible without running it.

A statement is a simple command, or several in a pipeline. A loop, a condition, a function or a
here-document is one statement. It is not read further.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpjob.convert.arithmetic import calculate
from ddpjob.convert.expansions import next_quote, parameter_end, substitution_end
from ddpjob.convert.marks import BEFORE_DEFAULT, IN_DEFAULT, MARKS, QUOTED, mark

# Operators between the commands of a statement, in a chain of statements, and of both and others.
# Longer ones come first.
JOINS = ("|&", "|")
CHAINS = ("&&", "||")
OPERATORS = (*CHAINS, *JOINS, ";", "&", "\n")

OPENERS = {"if", "for", "while", "until", "case", "select", "{"}
CLOSERS = {"fi", "done", "esac", "}"}
PREFIXES = {"then", "do", "else", "!"}

FUNCTION = re.compile(r"(\w+\s*\(\)|function\s+\w+(\s*\(\))?)\s*\{")
HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*\\?(['\"]?)(\w+)\1")

# The beginning of a `case`, and the pattern of one of its branches.
CASE = re.compile(r"case\s.+?\sin(?:\s+|$)", re.DOTALL)
BRANCH = re.compile(r"\(?[^\s()]+(?:\s*\|\s*[^\s()]+)*\)\s*")
REDIRECTION = re.compile(r"(\d*|&)(<<<|>>|>&|>\||<>|<&|>|<)(&?\d+|&?-|)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)

# $NAME, ${NAME}, ${NAME:-default} and ${NAME:=default}.
VARIABLE = re.compile(r"(?<![\\$])\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\})")

# ${NAME:-"default"}
QUOTED_DEFAULT = re.compile(rf"({BEFORE_DEFAULT})\"({IN_DEFAULT})\"\}}")

# ${NAME:-'default'}. Within double quotes, the single quotes are a part of the default.
LITERAL_DEFAULT = re.compile(rf"({BEFORE_DEFAULT})'([^'{{}}]*)'\}}")

# The other expansions of a shell: an argument, the number of its process, a part of a value.
ONLY_A_SHELL = re.compile(r"\$\{(?:[^{}\w]|\d|\w+[^{}\w])(?:[^{}]|\{[^{}]*\})*\}|\$[0-9@*#?!$-]")

# An expansion with a space in it, such as `${NAME:+--flag $NAME}`.
WITH_SPACES = re.compile(r"\$\{\w+[^{}\w](?:[^{}]|\{[^{}]*\})*\}")

# `NAME=(…)` and `NAME+=(…)`, and where their elements are used.
ARRAY = re.compile(
    r"(?:(?:declare|typeset|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=\((.*)\)", re.DOTALL
)
ELEMENTS = re.compile(rf"\$\{{([A-Za-z_]\w*)\[([@*{MARKS[ord('*')]}])\]\}}")
QUOTED_OR_ELEMENTS = re.compile(f"(?:{QUOTED.pattern})|{ELEMENTS.pattern}", re.DOTALL)

# Stands for a command substitution while words are split. It is for private use in Unicode.
MARK = "\ue000"

# Stands for the value of a variable that was set, to an unknown value.
NO_VALUE = "\ue001"


@dataclass(frozen=True)
class Statement:
    """A statement: the simple commands of its pipeline, its text, its line and its end operator.

    `span` is its place in the script. `is_readable` is False for a loop, a condition, a function,
    a here-document and a chain. `parts` are the statements of a chain.
    """

    commands: tuple[str, ...]
    text: str
    line: int
    span: tuple[int, int]
    end: str = "\n"
    is_readable: bool = True
    parts: tuple["Statement", ...] = ()

    @property
    def words(self) -> list[str]:
        """Return the words of the first command. It has none if its quotes are not closed."""
        return split_words(self.commands[0])

    @property
    def writes_a_file(self) -> bool:
        """Return True if the output goes to a file."""
        _, redirections = without_redirections(self.words)
        targets = [one.lstrip("0123456789&> ") for one in redirections if ">" in one]
        return any(target not in ("", "/dev/null", "1", "2") for target in targets)


@dataclass(frozen=True)
class Assignment:
    """An assignment: `NAME=value`, or `NAME+=value`, which adds to the value before."""

    name: str
    value: str
    adds: bool


def assignment_of(word: str) -> Assignment | None:
    """Return a word as an assignment, or None."""
    found = ASSIGNMENT.fullmatch(word)
    return Assignment(found[1], found[3], adds=bool(found[2])) if found else None


def has_only_a_shell(text: str) -> bool:
    """Return True for a text with a part known only to a shell, beside plain variables."""
    return has_substitution(text) or ONLY_A_SHELL.search(text) is not None


def is_only_a_shell(text: str) -> bool:
    """Return True for a text that is only one such part."""
    return is_substitution(text) or ONLY_A_SHELL.fullmatch(text) is not None


def has_substitution(text: str) -> bool:
    """Return True for a text with the output of a command in it: `$(…)` or backticks."""
    return "$(" in text or "`" in text


def is_substitution(text: str) -> bool:
    """Return True for a text that is only the output of a command."""
    return bool(text) and substitution_end(text, 0) == len(text)


def read_shell(text: str) -> list[Statement]:
    """Return the statements of a script. Comments and empty lines are left out."""
    scanner = _Scanner(text)
    # The scanner blanks the comments, so its text is complete at the end.
    return list(_without_blocks(list(scanner.statements()), scanner.text))


def split_words(text: str) -> list[str]:
    """Return the words of a command, without quotes.

    A command substitution is one word, and so is an expansion with a space in it. Characters made
    literal by quotes are marked.
    """
    text = mark(text)
    spans: list[str] = []
    marked = ""
    quote = ""
    index = 0
    while index < len(text):
        expansion = WITH_SPACES.match(text, index)
        end = expansion.end() if expansion else substitution_end(text, index)
        if end > index:
            span = text[index:end]
            has_literal = expansion and not quote and '"' not in span
            spans.append(LITERAL_DEFAULT.sub(r"\1\2}", span) if has_literal else span)
            marked += MARK
        else:
            is_escape = text[index] == "\\" and quote != "'"
            end = index + 1 + is_escape
            quote = quote if is_escape else next_quote(quote, text[index])
            marked += text[index:end]
        index = end
    try:
        words = shlex.split(marked)
    except ValueError:
        return []
    rest = iter(spans)
    return [re.sub(MARK, lambda _: next(rest, ""), word) for word in words]


def join_elements(elements: str) -> str:
    """Return the elements of an array as one text, without their quotes."""
    return " ".join(split_words(elements))


def expand_arrays(text: str, elements: Callable[[str], str]) -> str:
    """Return a command with the elements of arrays, given by their names.

    Each element of `[@]` in quotes is a word, and those of `[*]` in quotes are one text. A shell
    splits elements without quotes at their spaces.
    """

    def in_quotes(found: re.Match[str]) -> str:
        words = [_escaped(word) for word in split_words(elements(found[1]))]
        return '" "'.join(words) if found[2] == "@" else " ".join(words)

    def replaced(found: re.Match[str]) -> str:
        whole = found[0]
        if whole[0] == "$":
            return _escaped(join_elements(elements(found[1])), "\"'")
        if whole[0] != '"':
            return whole
        alone = ELEMENTS.fullmatch(whole[1:-1])
        if alone and alone[2] == "@":
            return elements(alone[1])
        return ELEMENTS.sub(in_quotes, whole)

    return QUOTED_OR_ELEMENTS.sub(replaced, text)


def without_inner_quotes(text: str) -> str:
    """Return a text in quotes without the quotes of defaults in it."""
    while (plain := QUOTED_DEFAULT.sub(r"\1\2}", text)) != text:
        text = plain
    return text


def without_redirections(words: list[str]) -> tuple[list[str], list[str]]:
    """Return words without redirections such as `> log` and `2>&1`, and the redirections."""
    kept: list[str] = []
    redirections: list[str] = []
    rest = iter(words)
    for word in rest:
        found = REDIRECTION.match(word)
        if not found:
            kept.append(word)
            continue
        target = "" if found[3] or found.end() < len(word) else next(rest, "")
        redirections.append(f"{word} {target}".strip())
    return kept, redirections


def expand(text: str, values: Mapping[str, str]) -> str:
    """Return a text with variables replaced by their known values or their defaults.

    A calculation `$((…))` with known numbers is replaced by its result.
    """

    def value(found: re.Match[str]) -> str:
        default = found[0] if found[3] is None else found[3]
        name = found[1] or found[2]
        known = values.get(name, default)
        if not known and found[0].startswith(f"${{{name}:"):
            # With a colon, the default counts for an empty value too.
            known = default
        return found[0] if known == NO_VALUE else known

    for _ in range(5):
        expanded = calculate(VARIABLE.sub(value, text), values)
        if expanded == text:
            break
        text = expanded
    return text


def expand_known(text: str, values: Mapping[str, str]) -> str:
    """Return a text for a shell, with only the known variables replaced."""
    known = {name: value for name, value in values.items() if value != NO_VALUE}
    found = VARIABLE.sub(lambda one: known.get(one[1] or one[2], one[0]), text)
    return calculate(found, known)


def expand_command(text: str, values: Mapping[str, str]) -> str:
    """Return a command with variables replaced. The quotes in a value are no quotes for a shell."""
    resolved = {name: expand(value, values) for name, value in values.items()}
    in_quotes = {name: _escaped(value) for name, value in resolved.items()}
    outside = {
        # The quotes in the output of a command are its own.
        name: value if has_substitution(value) else _escaped(value, "\"'")
        for name, value in resolved.items()
    }

    def quoted_text(found: re.Match[str]) -> str:
        if found[0][0] != '"':
            return found[0]
        # Quotes around a default within quotes have no effect.
        return expand(without_inner_quotes(found[0]), in_quotes)

    return expand(QUOTED.sub(quoted_text, mark(text)), outside)


def _escaped(text: str, quotes: str = '"') -> str:
    """Return a text whose quotes mean themselves."""
    return re.sub(rf"([{quotes}\\])", r"\\\1", text)


def _without_blocks(statements: Sequence[Statement], text: str) -> Iterator[Statement]:
    """Yield statements, with those of a loop, a condition or a function as one."""
    block: list[Statement] = []
    depth = 0
    for one in statements:
        opens, closes = _depth(one.text)
        if not block and not opens:
            yield one
            continue
        block.append(one)
        depth += opens - closes
        if depth <= 0:
            yield _block(block, text)
            block, depth = [], 0
    if block:
        yield _block(block, text)


def _depth(text: str) -> tuple[int, int]:
    """Return the numbers of blocks opened and closed by a statement."""
    case = CASE.match(text)
    rest = text[case.end() :] if case else text
    words = BRANCH.sub("", rest, count=1).split() if BRANCH.match(rest) else rest.split()
    while words and words[0] in PREFIXES:
        words = words[1:]
    opens = 1 if case else 0
    if not words:
        return opens, 0
    is_function = FUNCTION.match(text) is not None
    opens += int(words[0] in OPENERS or is_function)
    # A whole function can stand in one line.
    closes = int(words[0] in CLOSERS or (is_function and text.endswith("}")))
    return opens, closes


def _block(statements: Sequence[Statement], text: str) -> Statement:
    span = (statements[0].span[0], statements[-1].span[1])
    inside = text[slice(*span)].strip()
    end = statements[-1].end
    return Statement((inside,), inside, statements[0].line, span, end, is_readable=False)


class _Scanner:
    """Splits a script at its operators, outside of quotes and command substitutions."""

    def __init__(self, text: str) -> None:
        # A continued line is one line. The numbers of the lines stay right.
        self.text = text.replace("\\\r\n", "\\\n").replace("\r\n", "\n")
        # At the end of the script a backslash continues nothing.
        self.text = re.sub(r"\\\n?\Z", "", self.text)
        self.index = 0

    def statements(self) -> Iterator[Statement]:
        """Yield the statements in order, each with the number of its line."""
        commands: list[str] = []
        start = self.index
        while self.index < len(self.text):
            piece_start = self.index
            operator = self._to_operator()
            end = self.index - len(operator)
            commands.append(_unfolded(self.text[piece_start:end]))
            # The text of a here-document begins after the end of the line.
            is_within = HERE_DOCUMENT.search(self.text, start, end) and operator not in ("\n", "")
            if operator in JOINS or is_within:
                continue
            if any(commands):
                yield self._statement(commands, start, end, operator)
            commands, start = [], self.index

    def _statement(self, commands: list[str], start: int, end: int, operator: str) -> Statement:
        raw = self.text[start:end]
        begin = start + len(raw) - len(raw.lstrip())
        line = self.text.count("\n", 0, begin) + 1
        text = _unfolded(raw)
        document = HERE_DOCUMENT.search(text)
        if document and operator == "\n":
            text += f"\n{self._here_document(document[2])}"
            end = self.index
        is_simple = not document and not text.startswith("(")
        is_readable = is_simple and all(split_words(one) for one in commands)
        span = (start, end)
        return Statement(tuple(commands), text, line, span, operator or "\n", is_readable)

    def _here_document(self, delimiter: str) -> str:
        """Read to the end of a here-document, and return it."""
        start = self.index
        for found in re.finditer(r".*\n?", self.text[start:]):
            if found[0].strip() == delimiter or found.end() == len(self.text) - start:
                self.index = start + found.end()
                break
        return self.text[start : self.index].rstrip()

    def _to_operator(self) -> str:
        """Go to the end of the next operator, and return it; an empty one at the end."""
        quote = ""
        while self.index < len(self.text):
            character = self.text[self.index]
            if character == "\\" and quote != "'":
                self.index += 2
            elif quote != "'" and (end := self._expansion_end(in_quotes=bool(quote))) > self.index:
                self.index = end
            elif quote or character in "'\"":
                quote = next_quote(quote, character)
                self.index += 1
            elif character == "#" and self._is_at_word():
                self._drop_comment()
            elif operator := self._operator():
                self.index += len(operator)
                return operator
            else:
                self.index += self._group_length()
        self.index = min(self.index, len(self.text))
        return ""

    def _expansion_end(self, *, in_quotes: bool) -> int:
        """Return the end of the substitution or expansion at this place; this place without one."""
        end = parameter_end(self.text, self.index, in_quotes=in_quotes)
        return end if end > self.index else substitution_end(self.text, self.index)

    def _is_at_word(self) -> bool:
        return self.index == 0 or self.text[self.index - 1] in " \t\n;&|"

    def _drop_comment(self) -> None:
        end = self.text.find("\n", self.index)
        end = len(self.text) if end < 0 else end
        # Spaces in its place leave the numbers of the lines and the indices as they are.
        blank = " " * (end - self.index)
        self.text = self.text[: self.index] + blank + self.text[end:]
        self.index = end

    def _operator(self) -> str:
        for one in OPERATORS:
            if self.text.startswith(one, self.index) and not self._is_redirection(one):
                return one
        return ""

    def _is_redirection(self, operator: str) -> bool:
        """Return True for the & in `2>&1` and in `&> log`, and for the | in `>|`."""
        before = self.text[self.index - 1 : self.index]
        after = self.text[self.index + 1 : self.index + 2]
        return operator in ("&", "|") and (before == ">" or (operator == "&" and after == ">"))

    def _group_length(self) -> int:
        """Return the length of the group at this place: the characters of `(…)`, or one."""
        if self.text[self.index] != "(":
            return 1
        if self.text[self.index - 1 : self.index] == "=":
            self._drop_comments_of_array()
        end = substitution_end(f"${self.text[self.index :]}", 0)
        return max(1, end - 1)

    def _drop_comments_of_array(self) -> None:
        """Blank the comments in an array of several lines: they may have parentheses and quotes."""
        begin = self.index
        self.index += 1
        quote = ""
        while self.index < len(self.text) and (quote or self.text[self.index] != ")"):
            character = self.text[self.index]
            end = substitution_end(self.text, self.index)
            if end > self.index:
                self.index = end
            elif not quote and character == "#" and self._is_at_word():
                self._drop_comment()
            else:
                quote = next_quote(quote, character)
                self.index += 1
        self.index = begin


def _unfolded(text: str) -> str:
    """Return a text with each continued line as one line."""
    return text.replace("\\\n", " ").strip()
