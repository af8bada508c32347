"""Probes and metrics over HTTP, up before the Lease is won."""

import time
from dataclasses import dataclass

from aiohttp import web

from ddpjob.controller.lease import Lease
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.reconcile import RESYNC_SECONDS, Reconciler

STALLED_SECONDS = 5 * RESYNC_SECONDS
"""Without a turn of the resync loop for so long, the process is stuck; an API server that is down is no reason."""


@dataclass
class Probes:
    """What the probes answer from: the loop's turns, and whether this process leads or waits."""

    reconciler: Reconciler
    lease: Lease
    metrics: Metrics
    leading: bool = False

    def alive(self) -> str | None:
        """None, or what is wrong."""
        age = time.monotonic() - self.reconciler.turned
        if self.leading and age > STALLED_SECONDS:
            return f"the resync loop made no turn for {age:.0f} s"
        return None

    def ready(self) -> str | None:
        """None, or what is missing: a leader has listed once; a standby, which can read the Lease, is ready to take over."""
        if not self.leading and not self.lease.readable:
            return "cannot read the Lease yet"
        if self.leading and not self.reconciler.synced:
            return "has not listed jobs and pods yet"
        return None


async def serve(probes: Probes, port: int) -> web.AppRunner:
    """Serves /healthz, /readyz and /metrics until the runner is cleaned up. Raises OSError where the port is taken."""

    async def healthz(_: web.Request) -> web.Response:
        return _answer(probes.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(probes.ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=probes.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]
    )
    # At exit kopf waits for every younger task of its loop, and a connection that is kept alive is one.
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _answer(trouble: str | None) -> web.Response:
    return web.Response(text=f"{trouble or 'ok'}\n", status=500 if trouble else 200)
