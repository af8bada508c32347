"""The operator as a process: probes, Lease, cache, workers and kopf, in this order; and an orderly end."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException
from pythonjsonlogger.json import JsonFormatter

from ddpjob.controller import handlers
from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.client import JOBS, Api, ApiError, Unreachable, configuration
from ddpjob.controller.lease import Lease
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.probes import Probes, serve
from ddpjob.controller.reconcile import WORKERS, Reconciler
from ddpjob.controller.workqueue import Wakeups
from ddpjob.core import names
from ddpjob.core.pod_context import Settings

log = logging.getLogger(__name__)


class CannotRun(Exception):
    """The operator cannot do its work here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Options:
    """How one operator process runs. No `namespaces`: all of them."""

    namespaces: Sequence[str] = ()
    restricted: bool = False
    lease_namespace: str = "default"
    lease_name: str = names.MANAGER
    http_port: int = 8080
    kubeconfig: Path | None = None


def set_up_logging(style: str, level: str) -> None:
    """One line a record on stderr, as JSON or plain text; kopf's own chatter only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    handler.setFormatter(
        JsonFormatter(fields, rename_fields={"asctime": "time", "levelname": "level"})
        if style == "json"
        else plain
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def run(options: Options) -> int:
    """Runs until SIGTERM; returns the exit code."""
    _spare_the_garbage_collector()
    try:
        asyncio.run(_until_told_to_stop(operate(options)))
    except CannotRun as error:
        log.error("%s", error)
        return 1
    except ConfigException as error:
        log.error("No cluster to talk to: %s. Run inside a cluster, or set KUBECONFIG.", error)
        return 1
    return 0


def _spare_the_garbage_collector() -> None:
    """The imports live as long as the process: a burst of pods must not have them looked through again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def _until_told_to_stop(work: Coroutine[Any, Any, None]) -> None:
    """`work` as a task that SIGTERM and SIGINT end quietly. kopf takes the signals over once it runs."""
    task, told, loop = asyncio.create_task(work), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        told.set()
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not told.is_set():
            raise


async def operate(options: Options) -> None:
    """One operator from start to end, which may be its cancellation; raises CannotRun where it must not go on.

    It wants a loop of its own: when kopf ends, it cancels every task that is younger than itself.
    """
    settings = await configuration(options.kubeconfig)
    api = Api(settings)
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.getpid()}"
    cache, queue = Cache(), Wakeups[Key](time.monotonic)
    lease = Lease(api, options.lease_namespace, options.lease_name, identity, time.monotonic)
    metrics = Metrics(cache, queue)
    rendering = Settings(restricted=options.restricted)
    actor = Actor(api, cache, lease, rendering, identity, time.monotonic, metrics)
    reconciler = Reconciler(api, cache, actor, queue, metrics, options.namespaces)
    probes = Probes(reconciler, lease, metrics)
    try:
        runner = await serve(probes, options.http_port)
    except OSError as error:
        await api.close()
        raise CannotRun(
            f"Cannot serve probes and metrics: {error}. Choose another port with --http-port."
        ) from error
    try:
        await _lead(options, settings, api, reconciler, lease, probes)
    finally:
        await lease.release()
        await runner.cleanup()
        await api.close()


async def _lead(
    options: Options,
    settings: Configuration,
    api: Api,
    reconciler: Reconciler,
    lease: Lease,
    probes: Probes,
) -> None:
    """Waits for the Lease, then works until told to stop; raises CannotRun when it may not go on."""
    log.info("waiting for the Lease %s/%s", options.lease_namespace, options.lease_name)
    await lease.acquire()
    reconciler.turned = time.monotonic()
    probes.leading = True
    probes.metrics.leading.set(1)
    log.info("leading; watching %s", ", ".join(options.namespaces) or "all namespaces")
    async with _background(
        lease.keep(), reconciler.resync(), *(reconciler.work() for _ in range(WORKERS))
    ) as failed:
        registry = handlers.registry(reconciler.cache, reconciler.queue, reconciler.actor, settings)
        watching = asyncio.create_task(_watch(api, registry, reconciler))
        try:
            await asyncio.wait([watching, failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        if failed.done():
            raise CannotRun(f"stopping: {failed.exception()}")
        watching.result()
    log.info("stopped")


async def _watch(api: Api, registry: kopf.OperatorRegistry, reconciler: Reconciler) -> None:
    """kopf, until a signal stops it; raises CannotRun where it can watch no longer.

    kopf ends for good where it may not read one of its namespaces, so it is given those that can be read.
    """
    await _require_the_crd(api)
    namespaces = await _readable_namespaces(reconciler)
    try:
        await kopf.operator(
            registry=registry,
            settings=handlers.settings(),
            clusterwide=not reconciler.namespaces,
            namespaces=namespaces,
            standalone=True,
        )
    except Exception as error:
        message = (
            f"a watch failed for good: {error}. The next start continues from the cluster's state."
        )
        raise CannotRun(message) from error


async def _readable_namespaces(reconciler: Reconciler) -> list[str]:
    """Of the namespaces to watch those that the first LIST could read, once there was one; empty where all are watched."""
    if not reconciler.namespaces:
        return []
    while not reconciler.synced or reconciler.unreadable >= set(reconciler.namespaces):
        await asyncio.sleep(0.1)
    reconciler.unwatched = reconciler.unreadable
    return [
        namespace for namespace in reconciler.namespaces if namespace not in reconciler.unwatched
    ]


@contextlib.asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Future[None]"]:
    """Runs coroutines that must never end; the future fails with the first that does."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Task[None]) -> None:
        if not first.done() and not task.cancelled():
            first.set_exception(task.exception() or RuntimeError("a task of the operator ended"))

    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield first
    finally:
        first.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _require_the_crd(api: Api) -> None:
    """kopf would only warn, and then be deaf for ever."""
    while True:
        try:
            served = await api.call("GET", JOBS)
        except Unreachable as error:
            log.warning("the API server does not answer yet: %s", error)
            await asyncio.sleep(2.0)
            continue
        except ApiError as error:
            if error.status in (401, 403):
                raise CannotRun(f"cannot ask which kinds the API server serves: {error}") from error
            if error.status != 404:
                log.warning("the API server is not ready yet: %s", error)
                await asyncio.sleep(2.0)
                continue
            served = {}
        if not any(kind.get("name") == names.PLURAL for kind in served.get("resources", ())):
            raise CannotRun(
                f"The API server does not serve {names.PLURAL}.{names.GROUP}/{names.VERSION}. Install the CRD: "
                "`helm upgrade` the chart with crds.enabled=true, or `kubectl apply --server-side -f charts/ddpjob-operator/files/crd.yaml`."
            )
        return
