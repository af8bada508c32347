"""`ddpjob resume` and `scale` for a job already in the wanted state."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi
from gang import a_job

from ddpjob.cli.commands.resume import resume
from ddpjob.cli.commands.scale import scale
from ddpjob.cli.commands.suspend import suspend
from ddpjob.client import AsyncClient


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as found:
        yield found


def a_job_in(fake: FakeApi, phase: str, **spec: Any) -> None:
    fake.create("ddpjobs", {**a_job(**spec), "status": {"phase": phase}})


def changes(fake: FakeApi) -> list[str]:
    return [asked.method for asked in fake.log if asked.method == "PATCH"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "ddpjob resume digits starts it from the beginning, since it has no volume"),
        ({"checkpoint": {"claimName": "ckpt"}}, "ddpjob resume digits continues it"),
        (
            {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "own"}}]},
            "ddpjob resume digits continues it",
        ),
    ],
)
async def test_suspend_says_from_where_the_job_goes_on(
    fake: FakeApi, client: AsyncClient, capsys: pytest.CaptureFixture[str], spec: Any, words: str
) -> None:
    fake.create("ddpjobs", a_job("digits", **spec))
    assert await suspend(client, "digits") == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("suspend", [{}, {"suspend": False}])
async def test_a_job_that_is_not_suspended_is_not_resumed(
    fake: FakeApi, client: AsyncClient, capsys: pytest.CaptureFixture[str], suspend: dict[str, bool]
) -> None:
    a_job_in(fake, "Running", **suspend)
    assert await resume(client, "digits") == 0
    assert capsys.readouterr().out == "digits is not suspended, but Running: nothing to resume\n"
    assert changes(fake) == []


async def test_a_job_that_is_being_resumed_is_not_resumed_again(
    fake: FakeApi, client: AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    a_job_in(fake, "Suspended", suspend=False)
    assert await resume(client, "digits") == 0
    assert "is being resumed already" in capsys.readouterr().out
    assert changes(fake) == []


async def test_a_suspended_job_is_resumed(
    fake: FakeApi, client: AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    # The operator has not suspended it yet.
    a_job_in(fake, "Running", suspend=True)
    assert await resume(client, "digits") == 0
    assert "digits resumed from the beginning" in capsys.readouterr().out
    assert changes(fake) == ["PATCH"]


async def test_a_job_is_not_scaled_to_the_nodes_that_it_has(
    fake: FakeApi, client: AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    a_job_in(fake, "Running", nodes=3)
    assert await scale(client, "digits", 3) == 0
    assert capsys.readouterr().out == "digits has 3 nodes already: nothing to scale\n"
    assert changes(fake) == []
    assert await scale(client, "digits", 2) == 0
    assert "scaled from 3 to 2 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(("phase", "command"), [("Complete", "restart"), ("Failed", "retry")])
async def test_the_command_for_a_finished_job_is_named(
    fake: FakeApi,
    client: AsyncClient,
    capsys: pytest.CaptureFixture[str],
    phase: str,
    command: str,
) -> None:
    a_job_in(fake, phase)
    assert await resume(client, "digits") == 0
    assert f"ddpjob {command} digits" in capsys.readouterr().out
    assert changes(fake) == []
