"""Fixtures: a fake API server in the test's loop, and an operator in a thread of its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi

from ddpjob.controller.main import Options, operate
from ddpjob.kube.api import ApiClient, configuration
from ddpjob.local.ports import free_port

Work = Coroutine[Any, Any, Any]


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    await api.start()
    yield api
    await api.stop()


@pytest.fixture
def kubeconfig(fake: FakeApi, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    parts = {"clusters": {"cluster": {"server": fake.url}}, "users": {"user": {}}}
    named = {kind: [{"name": "it", **part}] for kind, part in parts.items()}
    contexts = [{"name": "it", "context": {"cluster": "it", "user": "it"}}]
    path.write_text(json.dumps({**named, "contexts": contexts, "current-context": "it"}))
    return path


@pytest.fixture
async def api(kubeconfig: Path) -> AsyncIterator[ApiClient]:
    """Return the operator's client of the fake API server."""
    client = ApiClient(await configuration(kubeconfig))
    yield client
    await client.close()


@pytest.fixture
async def background() -> AsyncIterator[Callable[[Work], asyncio.Task[Any]]]:
    """Return a function to run a coroutine until the test ends."""
    tasks: list[asyncio.Task[Any]] = []

    def run(work: Work) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    yield run
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def namespaces() -> tuple[str, ...]:
    """Return the namespaces to watch: all, unless a test has a parameter of this name."""
    return ()


@pytest.fixture
def excluded() -> frozenset[str]:
    """Return the namespaces to exclude: none, unless a test has a parameter of this name."""
    return frozenset()


@pytest.fixture
def options(kubeconfig: Path, namespaces: tuple[str, ...], excluded: frozenset[str]) -> Options:
    return Options(
        namespaces=namespaces, excluded=excluded, kubeconfig=kubeconfig, http_port=free_port()
    )


@pytest.fixture
async def operator(options: Options) -> AsyncIterator[None]:
    """Run one operator during the test. If it ends by itself, the test fails."""
    started: asyncio.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = asyncio.Future()
    here = asyncio.get_running_loop()

    async def work() -> None:
        task = asyncio.create_task(operate(options))
        here.call_soon_threadsafe(started.set_result, (asyncio.get_running_loop(), task))
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
    loop, task = await started
    yield
    if not thread.done():
        loop.call_soon_threadsafe(task.cancel)
    await thread
