"""Fixtures: one API server for the whole run, and a namespace for each test."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from envtest import MISSING, NEEDED, ApiServer, find_binaries
from play import Cluster, Operator, end


@pytest.fixture(scope="session")
def bare_apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Start an API server without the CRD."""
    binaries = find_binaries()
    missing = ", ".join(name for name in NEEDED if name not in binaries)
    if missing and os.environ.get("CI") == "true":
        pytest.fail(MISSING.format(missing))
    if missing:
        pytest.skip(MISSING.format(missing))
    server = ApiServer(tmp_path_factory.mktemp("apiserver"), binaries)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def apiserver(bare_apiserver: ApiServer) -> ApiServer:
    """Return an API server with the CRD of DDPJobs."""
    bare_apiserver.install_crd()
    return bare_apiserver


@pytest.fixture
def namespace(apiserver: ApiServer) -> Iterator[str]:
    """Create a namespace for the test, and delete its jobs afterwards."""
    name = apiserver.create_namespace("t")
    yield name
    apiserver.delete_jobs(name)


@pytest.fixture
def other_namespace(apiserver: ApiServer) -> Cluster:
    """Return another namespace. Its users have no rights in the namespace of the test."""
    return Cluster(apiserver, apiserver.create_namespace("o"))


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str) -> Cluster:
    """Return the namespace, with a simulated scheduler and kubelet."""
    return Cluster(apiserver, namespace)


@pytest.fixture
def an_operator(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> Iterator[Callable[..., Operator]]:
    """Start operators for the test's namespace, and end them after the test."""
    started: list[Operator] = []

    def start(
        *options: str,
        kubeconfig: Path = apiserver.kubeconfig,
        scope: Sequence[str] = (f"--namespace={namespace}",),
    ) -> Operator:
        operator = Operator(
            tmp_path, kubeconfig, f"--lease-namespace={namespace}", *scope, *options
        )
        started.append(operator)
        return operator

    yield start
    for operator in started:
        end(operator)
