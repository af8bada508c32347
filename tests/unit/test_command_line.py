"""Words of a command line: options for a cluster may stand before the command."""

import asyncio

import pytest
from typer.testing import CliRunner

from ddpjob.cli.main import LONG_OPTIONS, SHORT_OPTION, app, load, with_options_after_command
from ddpjob.cli.waiting import TimeLimit
from ddpjob.jobs.user_job import DDPJob


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("list", "list"),
        ("", ""),
        ("-n ml list", "list -n ml"),
        ("-nml list -A", "list -nml -A"),
        ("--namespace=ml --context it logs train -f", "logs --namespace=ml --context it train -f"),
        ("--kubeconfig file exec train -- ls -n", "exec --kubeconfig file train -- ls -n"),
        # The last one counts, as with kubectl.
        ("-n ml list -n other", "list -n ml -n other"),
        ("--version", "--version"),
        ("--namespaces ml list", "--namespaces ml list"),
        ("-n ml --help", "--help"),
        # The command is missing.
        ("-n ml", ""),
        ("-n", ""),
    ],
)
def test_options_for_a_cluster_may_stand_before_the_command(written, read):
    assert " ".join(with_options_after_command(written.split())) == read


def test_the_options_before_the_command_are_those_of_the_commands():
    of_a_cluster = ("namespace", "context", "kubeconfig")
    declared = [one.opts for one in load("wait").params if one.name in of_a_cluster]
    assert {name for names in declared for name in names} == {*LONG_OPTIONS, SHORT_OPTION}


def test_a_command_without_these_options_refuses_them():
    refused = CliRunner().invoke(app, ["-n", "ml", "completion", "bash"])
    assert (refused.exit_code, "No such option: -n" in refused.stderr) == (2, True)


class Client:
    """A client of a namespace other than the job's."""

    namespace = "other"


async def test_after_an_interruption_the_command_that_goes_on_is_named(capsys):
    job = DDPJob("train", {}, namespace="ml")
    work = asyncio.create_task(TimeLimit(None).apply(Client(), job, asyncio.sleep(60)))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    printed = capsys.readouterr().err
    assert printed == "the job goes on; ddpjob logs train -n ml -f follows it again\n"
