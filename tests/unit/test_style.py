"""Rules of style that ruff does not check: docstrings, lengths, and numbers of arguments.

Each test lists every offence with its file and line.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("operator", "trainer")
CODE = (*PRODUCT, "bench")
ALL = (*CODE, "tests")

# A docstring of a function begins with a verb in the imperative, so not with one of these.
FORBIDDEN_FIRST_WORDS = {"the", "what", "whether", "which", "where", "how"}

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500

# The modules of commands.
COMMANDS = "operator/ddpjob/cli/commands/"

# Every pod has the agent, in a ConfigMap.
AGENT = "operator/ddpjob/agent/"
MAX_AGENT_LINES = 350
MAX_ARGUMENTS = 5

# On average of the lines with code.
MAX_TOKENS_A_LINE = 8
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

# Functions allowed to have more lines, as (file, name): (lines, reason).
LONG_FUNCTIONS = {
    ("trainer/ddp_trainer/workloads/toy.py", "train"): (
        80,
        "the training loop of the introduction, read from top to bottom",
    ),
}

# Functions allowed to have more arguments, as (file, name): (arguments, reason).
MANY_ARGUMENTS = {
    ("trainer/ddp_trainer/checkpoint/checkpoints.py", "__init__"): (
        6,
        "settings of the user's script, most with a default and given by their names",
    ),
    ("trainer/ddp_trainer/run/evaluation.py", "evaluate"): (
        6,
        "a script gives either its Runtime or its Progress",
    ),
    ("trainer/ddp_trainer/ranks/group.py", "process_group"): (
        6,
        "settings of the user's script, each with a default and given by its name",
    ),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file: its path relative to the root, its lines and the nodes of its syntax tree."""

    path: str
    lines: int
    nodes: tuple[ast.AST, ...]

    def functions(self) -> Iterator[Function]:
        for node in self.nodes:
            if isinstance(node, Function):
                yield node

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{node.lineno}: {what}"


@cache
def sources(folder: str) -> tuple[Source, ...]:
    """Return the Python files of a folder. Hidden folders, such as .venv, are left out."""
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        path = file.relative_to(ROOT)
        if not any(part.startswith(".") for part in path.parts):
            text = file.read_text()
            # All checks share one walk through the tree.
            nodes = tuple(ast.walk(ast.parse(text)))
            found.append(Source(str(path), len(text.splitlines()), nodes))
    return tuple(found)


def first_word(text: str) -> str:
    words = text.split()
    return words[0].strip("*`'\".,:;").lower() if words else ""


def docstrings_without_a_verb(source: Source) -> Iterator[str]:
    for function in source.functions():
        word = first_word(ast.get_docstring(function) or "")
        if word in FORBIDDEN_FIRST_WORDS:
            yield source.at(function, f"the docstring of {function.name} begins with {word!r}")


def docstrings_that_only_refer(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, Function | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if first_word(docstring) == "see" and len(docstring.splitlines()) == 1:
                yield source.at(node, f"the docstring of {node.name} only refers to another place")


def docstrings_of_constants(source: Source) -> Iterator[str]:
    for node in source.nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement, following in pairwise(body):
            if isinstance(statement, ast.Assign | ast.AnnAssign) and is_string(following):
                yield source.at(following, "a string below a constant; write a comment above it")


def is_string(statement: ast.stmt) -> bool:
    """Return True if a statement is only a string."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def long_functions(source: Source) -> Iterator[str]:
    for function in source.functions():
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        key = (source.path, function.name)
        limit = LONG_FUNCTIONS[key][0] if key in LONG_FUNCTIONS else MAX_FUNCTION_LINES
        if lines > limit and not is_command(source, function):
            yield source.at(function, f"{function.name} has {lines} lines, at most {limit}")


def long_files(source: Source) -> Iterator[str]:
    limit = MAX_AGENT_LINES if source.path.startswith(AGENT) else MAX_FILE_LINES
    if source.lines > limit:
        yield f"{source.path}:1: the file has {source.lines} lines, at most {limit}"


def functions_with_many_arguments(source: Source) -> Iterator[str]:
    for function in source.functions():
        arguments = argument_names(function)
        key = (source.path, function.name)
        limit = MANY_ARGUMENTS[key][0] if key in MANY_ARGUMENTS else MAX_ARGUMENTS
        if len(arguments) > limit and not is_command(source, function):
            what = f"{function.name} has {len(arguments)} arguments, at most {limit}"
            yield source.at(function, what)


def argument_names(function: Function) -> list[str]:
    """Return the arguments of a function without self, cls, *args and **kwargs."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if positional and positional[0] in ("self", "cls"):
        positional = positional[1:]
    return positional + [argument.arg for argument in arguments.kwonlyargs]


def is_command(source: Source, function: Function) -> bool:
    """Return True for a command of the CLI: its arguments are the options of the command."""
    return source.path.startswith(COMMANDS) and function.name == "command"


CHECKS = {
    "docstrings of functions begin with a verb": (docstrings_without_a_verb, ALL),
    "docstrings say more than where to look": (docstrings_that_only_refer, ALL),
    "constants have comments, not docstrings": (docstrings_of_constants, PRODUCT),
    "functions are short": (long_functions, ALL),
    "files are short": (long_files, CODE),
    "functions have few arguments": (functions_with_many_arguments, ALL),
}


@pytest.mark.parametrize(("check", "folders"), CHECKS.values(), ids=CHECKS)
def test_all_files_keep_the_rule(check, folders):
    offences = []
    for folder in folders:
        for source in sources(folder):
            offences += check(source)
    assert not offences, "\n" + "\n".join(offences)


def tokens_of_lines(text: str) -> list[int]:
    """Return the number of tokens in each line of code. Comments and strings alone are no code."""
    counted: Counter[int] = Counter()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            is_code = any(one.type != tokenize.STRING for one in statement)
            counted.update(one.start[0] for one in statement if is_code)
            statement = []
        elif token.type not in NO_CODE:
            statement.append(token)
    return list(counted.values())


@pytest.mark.parametrize("room", ["core", "agent", "client"])
def test_lines_have_one_idea(room):
    files = (ROOT / "operator" / "ddpjob" / room).rglob("*.py")
    counts = [count for file in files for count in tokens_of_lines(file.read_text())]
    assert sum(counts) / len(counts) <= MAX_TOKENS_A_LINE


def test_every_exception_is_still_needed():
    by_path = {source.path: source for folder in CODE for source in sources(folder)}
    for path, name in (*LONG_FUNCTIONS, *MANY_ARGUMENTS):
        functions = by_path[path].functions() if path in by_path else ()
        names = [function.name for function in functions]
        assert name in names, f"{path} has no function {name}: remove the exception"
