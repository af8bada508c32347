"""Put statements joined by `&&` and `||` together, if they must not be taken apart.

A setup ends at the first failing line, so a test in a line of its own would end it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpjob.convert.shell import CHAINS, Statement
from ddpjob.convert.trainings import is_assignment

# Commands whose failure is an answer.
TEST = re.compile(r"(!|\[\[?|test|command|type|which|hash|[ef]?grep|cmp|diff|false)(\s|$)")

# The end of a script after a failure. A setup ends there anyway.
EXIT = re.compile(
    r"exit(\s+([1-9]\d*|\$\?))?|\{\s.*\bexit(\s+([1-9]\d*|\$\?))?\s*;?\s*\}", re.DOTALL
)


def is_test(statement: Statement) -> bool:
    """Return True for a command that only asks something."""
    return TEST.match(statement.text) is not None


def may_fail(statement: Statement) -> bool:
    """Return False for a chain that only tests and assigns, or that ends with `|| true`."""
    if not statement.parts:
        return True
    *rest, last = statement.parts
    if rest[-1].end == "||" and last.text in ("true", ":"):
        return False
    return not all(
        is_test(one) or (one.is_readable and is_assignment(one.words)) for one in statement.parts
    )


def chooses(statements: Sequence[Statement], apart: Sequence[Statement]) -> bool:
    """Return True if the first statement chooses one of the two after it: `TEST && A || B`."""
    ends = [one.end for one in statements[:2]]
    return ends == ["&&", "||"] and [one in apart for one in statements] == [False, True, True]


def join_chains(statements: Sequence[Statement], apart: Sequence[Statement]) -> list[Statement]:
    """Return statements, with those of a chain as one. Those of `apart` stay by themselves.

    A chain of `&&` without a test stays as it is: a setup has a line for each of its commands.
    """
    found: list[Statement] = []
    for chain in _chains(statements, apart):
        rest = _without_exit(chain)
        found += rest if _is_sequence(rest) else [_joined(rest)]
    return found


def _chains(
    statements: Sequence[Statement], apart: Sequence[Statement]
) -> Iterator[list[Statement]]:
    chain: list[Statement] = []
    for one in statements:
        if one in apart:
            yield chain
            yield [one]
            chain = []
            continue
        chain.append(one)
        if one.end not in CHAINS:
            yield chain
            chain = []
    yield chain


def _is_sequence(chain: Sequence[Statement]) -> bool:
    """Return True for a chain whose commands are needed one after the other."""
    has_tests = any(map(is_test, chain)) or any(one.end == "||" for one in chain[:-1])
    return len(chain) < 2 or not has_tests


def _without_exit(chain: list[Statement]) -> list[Statement]:
    """Return a chain without `|| exit 1` at its end."""
    if len(chain) < 2 or chain[-2].end != "||" or not EXIT.fullmatch(chain[-1].text):
        return chain
    *rest, last = chain
    # The script does not go on after a failure either, as before `&&`.
    end = last.end if last.end == "&" else "&&"
    shorter = [*rest[:-1], replace(rest[-1], end=end)]
    return shorter if _is_sequence(shorter) else chain


def _joined(chain: Sequence[Statement]) -> Statement:
    *rest, last = chain
    text = " ".join([*(f"{one.text} {one.end}" for one in rest), last.text])
    span = (chain[0].span[0], last.span[1])
    return Statement(
        (text,), text, chain[0].line, span, last.end, is_readable=False, parts=tuple(chain)
    )
