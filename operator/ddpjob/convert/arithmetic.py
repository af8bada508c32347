"""Calculate with the known numbers of a shell script."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

# `$((…))`, with parentheses of one level inside.
CALCULATION = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
NAME = re.compile(r"\$?\b([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\}")

# A calculation of whole numbers. Longer ones are no sizes of a job.
NUMBERS = re.compile(r"[\d\s()+*/%-]{1,200}", re.ASCII)


def calculate(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the calculations of known numbers replaced by their results.

    Other calculations stay as they are. A shell writes their variables with and without `$`.
    """

    def result(found: re.Match[str]) -> str:
        written = NAME.sub(lambda name: values.get(name[1] or name[2], name[0]), found[1])
        if not NUMBERS.fullmatch(written):
            return found[0]
        try:
            return str(_result(ast.parse(written.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return found[0]

    return CALCULATION.sub(result, text)


def _quotient(left: int, right: int) -> int:
    """Divide as a shell does: towards zero."""
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _remainder(left: int, right: int) -> int:
    return left - right * _quotient(left, right)


# What a shell and Python write in the same way, and with the same precedence.
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}


def _result(node: ast.expr) -> int:
    """Return the result of a calculation. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_result(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_result(node.left), _result(node.right))
    raise ValueError("expected a calculation of whole numbers")
