"""The documentation names all that a user meets."""

import asyncio
import re
from pathlib import Path

import pytest

from ddpjob.cli.main import COMMANDS, load
from ddpjob.controller.cache import Cache
from ddpjob.controller.families import families_of_jobs
from ddpjob.controller.metrics import Metrics
from ddpjob.core.api.reasons import PAGE, Reason

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/users/operations.md").read_text()
REASONS = (ROOT / "docs" / PAGE).read_text()
COMMAND_LINE = (ROOT / "docs/users/command-line.md").read_text()

NAMES = [name for commands in COMMANDS.values() for name in commands]


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_a_row_of_a_table(reason):
    assert f'| <a id="{reason.anchor}"></a>{reason} | {reason.meaning} |' in REASONS
    assert reason.meaning
    assert "|" not in reason.meaning + reason.advice


def test_a_reason_is_found_by_its_word():
    assert Reason("QuotaExceeded") is Reason.QUOTA
    assert f"{Reason.QUOTA}" == Reason.QUOTA.value == "QuotaExceeded"


@pytest.mark.parametrize("name", NAMES)
def test_each_command_is_described(name):
    assert f"`ddpjob {name}" in COMMAND_LINE


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_help(name):
    command = load(name)
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{name}: {parameter.name}"


def test_each_metric_is_described():
    # The comments of the exposition format name the families.
    lines = asyncio.run(Metrics(Cache(), ()).text()).decode().splitlines()
    families = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    names = {name for name in families if not name.endswith("_created")}
    names |= set(families_of_jobs())
    described = set(re.findall(r"`(ddpjob_\w+)[`{]", OPERATIONS))
    assert names <= described, f"{names - described} are missing"
