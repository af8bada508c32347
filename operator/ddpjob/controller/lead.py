"""Run the parts of the leader side by side: the Lease, LISTs, workers and kopf's watches."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from ddpjob.controller import handlers
from ddpjob.controller.errors import CannotRun
from ddpjob.controller.lease import Lease
from ddpjob.controller.lister import Lister
from ddpjob.controller.probes import Probes
from ddpjob.controller.reconcile import Reconciler
from ddpjob.controller.workqueue import WORKERS
from ddpjob.core.api import names
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError, Unreachable
from ddpjob.kube.kinds import JOBS
from ddpjob.kube.request import ReadDocument

log = logging.getLogger(__name__)

# Seconds between two checks for the CRD, and for the first successful LIST.
CRD_INTERVAL = 2.0
LIST_INTERVAL = 0.1

NO_CRD = (
    f"the API server does not serve {names.PLURAL}.{names.GROUP}/{names.VERSION}. Install the CRD: "
    "run `helm upgrade` with crds.enabled=true, or `kubectl apply --server-side -f "
    "charts/ddpjob-operator/files/crd.yaml`."
)


@dataclass(frozen=True)
class Operator:
    """The parts of one operator that run side by side."""

    api: ApiClient
    configuration: Configuration
    lease: Lease
    lister: Lister
    reconciler: Reconciler


async def lead(operator: Operator, probes: Probes) -> None:
    """Wait for the Lease, then work until kopf ends. Raises CannotRun if a part fails."""
    # Only one operator works at a time.
    lister = operator.lister
    await operator.lease.acquire()
    lister.last_request = time.monotonic()
    probes.leading = True
    probes.metrics.leading.set(1)
    log.info("leading; watching %s", _watched(operator))

    # Work until kopf ends, because a signal stopped it, or until another part fails.
    reconciler = operator.reconciler
    workers = [reconciler.work() for _ in range(WORKERS)]
    async with _background(
        operator.lease.keep(),
        lister.run(),
        reconciler.keep_marks(),
        *(extension.run() for extension in reconciler.extensions.all),
        *workers,
    ) as failed:
        watches = asyncio.create_task(_watch(operator))
        try:
            await asyncio.wait([watches, failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # kopf needs time to end its own tasks.
            watches.cancel()
            await asyncio.wait([watches])
        if failed.done():
            raise CannotRun(f"stopping: {failed.exception()}")
        watches.result()
    log.info("stopped")


def _watched(operator: Operator) -> str:
    """Return the watched namespaces in words."""
    excluded = operator.reconciler.territory.excluded
    if excluded:
        return f"all namespaces except {', '.join(sorted(excluded))}"
    return ", ".join(operator.lister.namespaces) or "all namespaces"


@contextlib.asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Future[None]"]:
    """Run coroutines that must never end. The future gets the error of the first one to end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_end(task: asyncio.Task[None]) -> None:
        if not failed.done() and not task.cancelled():
            failed.set_exception(task.exception() or RuntimeError("a task of the operator ended"))

    for task in tasks:
        task.add_done_callback(on_end)
    try:
        yield failed
    finally:
        failed.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(operator: Operator) -> None:
    """Run kopf until a signal stops it. Raises CannotRun if it cannot watch."""
    await _require_crd(operator.api)
    lister = operator.lister
    namespaces = await _readable_namespaces(lister)
    registry = handlers.registry(lister, operator.reconciler.actor, operator.configuration)
    try:
        await kopf.operator(
            registry=registry,
            settings=handlers.settings(),
            memories=handlers.NoMemories(),
            clusterwide=not lister.namespaces,
            namespaces=namespaces,
            standalone=True,
        )
    except Exception as error:
        message = f"a watch failed: {error}. The next start continues from the cluster's state."
        raise CannotRun(message) from error


async def _readable_namespaces(lister: Lister) -> list[str]:
    """Return the namespaces for kopf to watch; none if it watches all.

    kopf ends if it has no right to read its kinds in a namespace. So it gets only the namespaces
    readable by the first LIST.
    """
    while not lister.namespaces and lister.reads_nodes is None:
        await asyncio.sleep(LIST_INTERVAL)
    if not lister.namespaces:
        return []
    while not lister.synced or not lister.readable:
        await asyncio.sleep(LIST_INTERVAL)
    lister.unwatched = lister.unreadable
    return lister.readable


async def _require_crd(api: ApiClient) -> None:
    """Wait until the API server answers, and raise CannotRun if it does not know DDPJobs.

    Without the CRD, kopf only logs a warning and watches nothing.
    """
    while True:
        try:
            found = await api.read(ReadDocument(JOBS.api)) or {}
        except Unreachable as error:
            log.warning("the API server does not answer yet: %s", error)
        except ApiError as error:
            if error.status in (401, 403):
                raise CannotRun(
                    f"cannot read which kinds the API server serves: {error}"
                ) from error
            log.warning("the API server is not ready yet: %s", error)
        else:
            kinds = [kind.get("name") for kind in found.get("resources", ())]
            if names.PLURAL not in kinds:
                raise CannotRun(NO_CRD)
            return
        await asyncio.sleep(CRD_INTERVAL)
