"""The documentation names all that a user meets."""

from pathlib import Path

import pytest
import typer

from ddpjob.cli.main import app
from ddpjob.core.api.reasons import Reason

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/users/operations.md").read_text()
COMMAND_LINE = (ROOT / "docs/users/command-line.md").read_text()

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_a_row_of_a_table(reason):
    assert f"| {reason} | {reason.meaning} |" in OPERATIONS
    assert reason.meaning
    assert "|" not in reason.meaning + reason.advice


def test_a_reason_is_found_by_its_word():
    assert Reason("QuotaExceeded") is Reason.QUOTA
    assert f"{Reason.QUOTA}" == Reason.QUOTA.value == "QuotaExceeded"


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
