"""The documentation names all that a user meets."""

import re
from pathlib import Path

import pytest
import typer

from ddpjob.cli.main import app
from ddpjob.core.api.names import Reason

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/users/operations.md").read_text()
COMMAND_LINE = (ROOT / "docs/users/command-line.md").read_text()

COMMANDS = typer.main.get_command(app).commands


def first_cells(text):
    """Return the first cells of the rows of all tables."""
    return "\n".join(re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE))


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_a_row_that_says_what_to_do(reason):
    assert re.search(rf"\b{reason}\b", first_cells(OPERATIONS))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_described(name):
    assert f"`ddpjob {name}" in COMMAND_LINE


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_a_short_help(name):
    command = COMMANDS[name]
    assert command.help
    assert command.short_help
    for parameter in command.params:
        assert parameter.help, f"{name}: {parameter.name}"
