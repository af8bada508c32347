"""Calculate with the known numbers of a shell script."""

import re
from collections.abc import Mapping

# `$((…))`, with parentheses of one level inside.
CALCULATION = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
NAME = re.compile(r"\$?\b([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\}")

# Longer ones are no sizes of a job.
MAX_LENGTH = 200

# A number, an operator or a parenthesis. Anything else cannot be calculated here.
TOKEN = re.compile(r"\d+|\S")


def calculate(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the calculations of known numbers replaced by their results.

    Other calculations stay as they are. A shell writes their variables with and without `$`.
    """

    def result(found: re.Match[str]) -> str:
        written = NAME.sub(lambda name: values.get(name[1] or name[2], name[0]), found[1])
        if len(written) > MAX_LENGTH:
            return found[0]
        try:
            return str(_result(written))
        except (ValueError, ZeroDivisionError):
            return found[0]

    return CALCULATION.sub(result, text)


def _result(text: str) -> int:
    """Return the result of a calculation. Raises ValueError for anything else."""
    tokens = TOKEN.findall(text)
    result = _sum(tokens)
    if tokens:
        raise ValueError(f"expected the end, got {tokens[0]}")
    return result


# Each of these removes the tokens of its part from the beginning of the list.


def _sum(tokens: list[str]) -> int:
    total = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens.pop(0) == "+" else -1
        total += sign * _product(tokens)
    return total


def _product(tokens: list[str]) -> int:
    total = _factor(tokens)
    while tokens and tokens[0] in "*/%":
        operator = tokens.pop(0)
        factor = _factor(tokens)
        if operator == "*":
            total *= factor
        elif operator == "/":
            total = _quotient(total, factor)
        else:
            total -= factor * _quotient(total, factor)
    return total


def _factor(tokens: list[str]) -> int:
    token = tokens.pop(0) if tokens else ""
    if token == "-":
        return -_factor(tokens)
    if token == "(":
        total = _sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("expected )")
        return total
    # A shell reads a number with a zero at its beginning as octal.
    if not token.isascii() or str(int(token)) != token:
        raise ValueError(f"expected a number, got {token}")
    return int(token)


def _quotient(left: int, right: int) -> int:
    """Divide as a shell does: towards zero."""
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size
