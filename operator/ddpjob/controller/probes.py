"""Serve probes and metrics over HTTP, also before the Lease is held."""

import time
from dataclasses import dataclass

from aiohttp import web

from ddpjob.controller.lease import Lease
from ddpjob.controller.lister import INTERVAL, Lister
from ddpjob.controller.metrics import Metrics

# If no LIST has begun for this many seconds, the process hangs. If only the API server does not
# answer, LISTs begin and fail, and the operator is not restarted.
STALLED_SECONDS = 5 * INTERVAL


@dataclass
class Probes:
    """The answers to the probes."""

    lister: Lister
    lease: Lease
    metrics: Metrics
    leading: bool = False

    def alive(self) -> str | None:
        """Return None if the process works, else what is wrong."""
        age = time.monotonic() - self.lister.last_request
        if self.leading and age > STALLED_SECONDS:
            return f"no LIST has begun for {age:.0f} s"
        return None

    def ready(self) -> str | None:
        """Return None if the process is ready, else what is missing.

        A leader is ready after its first LIST, a standby once it can read the Lease.
        """
        if self.leading and not self.lister.synced:
            return "jobs and pods are not listed yet"
        if not self.leading and not self.lease.readable:
            return "the Lease cannot be read yet"
        return None


async def serve(probes: Probes, port: int) -> web.AppRunner:
    """Serve /healthz, /readyz and /metrics until the runner is cleaned up.

    Raises OSError if the port is in use.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _answer(probes.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(probes.ready())

    async def metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=await probes.metrics.text(), headers=headers)

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
        ]
    )
    # When kopf ends, it waits for every task created after its own. A connection that is kept alive
    # has such a task.
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _answer(problem: str | None) -> web.Response:
    return web.Response(text=f"{problem or 'ok'}\n", status=500 if problem else 200)
