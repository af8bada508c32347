"""Fixtures for pods and zygotes. They kill all leftover processes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob.local.ports import free_port

from .forks import Zygote
from .kubelet import Pod


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Return a function for making a pod: `pod(script, **options)`."""
    if not Path("/proc/self").exists():
        pytest.skip("the agent finds processes by /proc, which only Linux has")
    pods: list[Pod] = []

    def make(script: str = "", **options: Any) -> Pod:
        pods.append(Pod(tmp_path / f"pod{len(pods)}", script, **options))
        return pods[-1]

    yield make
    for each in pods:
        each.kill()


@pytest.fixture
def port() -> int:
    """Return a free port."""
    return free_port()


@pytest.fixture(scope="package")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    if not hasattr(os, "pidfd_open"):
        pytest.skip("a zygote needs Linux")
    found = Zygote(tmp_path_factory.mktemp("zygote"))
    yield found
    found.process.kill()
    found.process.wait()
