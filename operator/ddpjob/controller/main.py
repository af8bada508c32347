"""The operator as a process: its parts, their start, and their end."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException
from pythonjsonlogger.json import JsonFormatter

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.clock import SteadyClock
from ddpjob.controller.creator import Creator
from ddpjob.controller.deleter import Deleter
from ddpjob.controller.errors import CannotRun
from ddpjob.controller.events import Reporter
from ddpjob.controller.extension import extensions
from ddpjob.controller.inquiries import Inquiries
from ddpjob.controller.lead import Operator, lead
from ddpjob.controller.lease import Lease
from ddpjob.controller.lister import Lister
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.places import Places
from ddpjob.controller.pod_groups import PodGroups
from ddpjob.controller.probes import Probes, serve
from ddpjob.controller.reconcile import Reconciler
from ddpjob.controller.territory import Territory
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.controller.writer import Writer
from ddpjob.core.api import names
from ddpjob.core.observe.observation import ApiState, ClusterPolicy
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.api import ApiClient, configuration

log = logging.getLogger(__name__)

JSON_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
PLAIN_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"

# The API server accepts JSON nested up to 10,000 levels deep. With Python's own limit, one such job
# would end every start of the operator.
RECURSION_LIMIT = 60_000


@dataclass(frozen=True)
class Options:
    """Options of one operator process.

    Without `namespaces` it watches all of them. It does nothing in the `excluded` ones.
    """

    namespaces: Sequence[str] = ()
    excluded: Set[str] = frozenset()
    settings: Settings = field(default_factory=Settings)
    policy: ClusterPolicy = field(default_factory=ClusterPolicy)
    lease_namespace: str = "default"
    lease_name: str = names.MANAGER
    http_port: int = 8080
    kubeconfig: Path | None = None
    job_metrics: bool = True
    queues: ApiState = ApiState.UNKNOWN


def set_up_logging(style: str, level: str) -> None:
    """Log one line per record to stderr, as JSON or plain text. kopf logs from WARNING on only."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        renamed = {"asctime": "time", "levelname": "level"}
        handler.setFormatter(JsonFormatter(JSON_FORMAT, rename_fields=renamed))
    else:
        handler.setFormatter(logging.Formatter(PLAIN_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs every event at INFO.
    own_level = logging.getLevelName(level.upper())
    logging.getLogger("kopf").setLevel(max(logging.WARNING, own_level))


def run(options: Options) -> int:
    """Run the operator until SIGTERM, and return its exit code."""
    _tune_garbage_collector()
    sys.setrecursionlimit(RECURSION_LIMIT)
    try:
        asyncio.run(_run_until_signal(operate(options)))
    except CannotRun as error:
        log.error("%s", error)
        return 1
    except ConfigException as error:
        log.error("no cluster configuration found: %s. Run in a cluster or set KUBECONFIG.", error)
        return 1
    return 0


def _tune_garbage_collector() -> None:
    """Exclude the imported modules from garbage collection: bursts of pods make it frequent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def _run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and end it quietly on SIGTERM or SIGINT.

    Once kopf runs, it handles these signals itself.
    """
    task = asyncio.create_task(work)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise


async def operate(options: Options) -> None:
    """Run one operator until it is cancelled. Raises CannotRun if it cannot continue.

    It needs a separate event loop: when kopf ends, it cancels every task created in the loop after
    its own.
    """
    settings = await configuration(options.kubeconfig)
    operator = _assemble(options, settings)
    probes = Probes(operator.lister, operator.lease, operator.reconciler.metrics)
    try:
        runner = await serve(probes, options.http_port)
    except OSError as error:
        await operator.api.close()
        message = f"cannot serve probes and metrics: {error}; choose another port with --http-port"
        raise CannotRun(message) from error
    try:
        log.info("waiting for the Lease %s/%s", options.lease_namespace, options.lease_name)
        await lead(operator, probes)
    finally:
        # The next leader can begin as soon as the Lease is released.
        await operator.reconciler.inquiries.close()
        await operator.lease.release()
        await runner.cleanup()
        await operator.api.close()


def _assemble(options: Options, settings: Configuration) -> Operator:
    """Create the parts of one operator and connect them."""
    api = ApiClient(settings, names.MANAGER)
    host = os.environ.get("POD_NAME") or socket.gethostname()
    identity = f"{host}_{os.getpid()}"
    clock = time.monotonic
    cache = Cache()
    queue: WorkQueue[Key] = WorkQueue(clock, group_of=lambda key: key[0])
    lease = Lease(api, options.lease_namespace, options.lease_name, identity, clock)
    metrics = Metrics(cache, queue, each_job=options.job_metrics, excluded=options.excluded)
    api.on_answer = metrics.count_request
    queue.on_wait = metrics.waits.observe
    writer = Writer(api, lease)
    reporter = Reporter(writer, identity, clock)
    installation = f"{options.lease_namespace}/{options.lease_name}"
    now = SteadyClock().now
    watched = extensions(api, cache, queue, options.namespaces, options.queues)
    territory = Territory(writer, installation, clock, options.excluded, now)
    actor = Actor(
        writer=writer,
        cache=cache,
        creator=Creator(writer, cache, options.settings, territory),
        deleter=Deleter(writer, cache, reporter),
        reporter=reporter,
        places=Places(writer, cache, options.settings, now, watched.queues),
        pod_groups=PodGroups(writer, cache, options.settings, watched.pod_groups),
        clock=clock,
        metrics=metrics,
        now=now,
    )

    def forget_what_is_gone() -> None:
        actor.forget_removed_jobs()
        territory.forget_others(cache.jobs.namespaces)
        actor.creator.forget_others(cache.jobs.namespaces)

    lister = Lister(api, cache, queue, forget_what_is_gone, options.namespaces)
    reconciler = Reconciler(
        api=api,
        cache=cache,
        lister=lister,
        actor=actor,
        queue=queue,
        metrics=metrics,
        policy=options.policy,
        territory=territory,
        inquiries=Inquiries(clock, queue.add),
        extensions=watched,
    )
    return Operator(api, settings, lease, lister, reconciler)
