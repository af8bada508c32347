"""The pages as a web application. Every route only reads."""

import asyncio
import hmac
import io
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import uvicorn
from jinja2 import Environment, FileSystemLoader
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from ddpjob.client import ClientError, NotFound
from ddpjob.core.api.names import Phase
from ddpjob.core.api.readers import SpecError
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.curves import draw
from ddpjob.ui.pages import NO_NAMESPACE, job_page, list_page, node_count, path_of
from ddpjob.ui.sources import Source

FOLDER = Path(__file__).parent

# Host names accepted in requests. Another site could point a name of its own to this machine, and
# then read the answers.
HOSTS = ["127.0.0.1", "localhost"]

HEADERS = {
    # No output of a job is run as a script, and no other page shows this one inside.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

# matplotlib writes its colours as styles. They are needed if the picture is opened by itself.
PICTURE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

# Seconds to finish the current answers when the program is to end.
END_SECONDS = 1

# The progress of so many running jobs in a list is read.
MAX_PROGRESS = 40

Next = Callable[[Request], Awaitable[Response]]


class Pages:
    """The routes, over one source of jobs."""

    def __init__(self, source: Source) -> None:
        self.source = source
        loader = FileSystemLoader(FOLDER / "templates")
        env = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        self.templates = Jinja2Templates(env=env)

    def routes(self) -> list[Route | Mount]:
        return [
            Route("/", self.jobs),
            Route("/jobs/{namespace}/{name}", self.job),
            Route("/jobs/{namespace}/{name}/curves.svg", self.curves),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ]

    async def jobs(self, request: Request) -> Response:
        jobs = await self.source.jobs()
        running = [job for job in jobs if job.phase == Phase.RUNNING][:MAX_PROGRESS]
        found = await asyncio.gather(*map(self.source.progress, running))
        progress = dict(zip(map(path_of, running), found, strict=True))
        return self._page(request, "jobs.html", **list_page(jobs, progress, datetime.now(UTC)))

    async def job(self, request: Request) -> Response:
        """Show a job, and the end of the log of the node in the query."""
        job = await self._job(request)
        node = _number(request.query_params.get("node", "0"))
        if node >= node_count(job):
            raise HTTPException(404, f"job {job.name} has {node_count(job)} nodes, from 0 on")
        metrics, pods, log = await asyncio.gather(
            self.source.metrics(job), self.source.pods(job), self._log(job, node)
        )
        # It takes a moment to prepare many events. Other requests must not wait for it.
        shown = await asyncio.to_thread(job_page, job, metrics, pods, datetime.now(UTC))
        return self._page(request, "job.html", **shown, node=node, log=log)

    async def curves(self, request: Request) -> Response:
        """Draw the curves of a job."""
        job = await self._job(request)
        metrics = await self.source.metrics(job)
        figure = await asyncio.to_thread(draw, {job.name: metrics}, "")
        if figure is None:
            raise HTTPException(404, f"job {job.name} has printed no figures")
        data = io.BytesIO()
        await asyncio.to_thread(figure.savefig, data, format="svg")
        return Response(data.getvalue(), media_type="image/svg+xml", headers=PICTURE)

    async def error(self, request: Request, error: Exception) -> Response:
        """Show an error of the cluster, an unknown address, or a fault of ours."""
        if isinstance(error, HTTPException):
            answer = self._page(request, "error.html", error.status_code, text=error.detail)
            answer.headers.update(error.headers or {})
            return answer
        if isinstance(error, ClientError | SpecError):
            status = 404 if isinstance(error, NotFound) else 502
            return self._page(request, "error.html", status, text=str(error))
        text = f"ddpjob ui has failed; the terminal shows where: {type(error).__name__}: {error}"
        return self._page(request, "error.html", 500, text=text)

    async def _job(self, request: Request) -> DDPJob:
        namespace = request.path_params["namespace"]
        place = "" if namespace == NO_NAMESPACE else namespace
        return await self.source.job(place, request.path_params["name"])

    async def _log(self, job: DDPJob, node: int) -> str:
        """Return the end of a log, or why it cannot be read."""
        try:
            return "\n".join(line.text for line in await self.source.log(job, node))
        except ClientError as error:
            return str(error)

    def _page(
        self, request: Request, template: str, status: int = 200, **context: object
    ) -> Response:
        context["source"] = self.source.title
        return self.templates.TemplateResponse(
            request, template, context, status_code=status, headers=HEADERS
        )


def create_app(source: Source, token: str) -> Starlette:
    """Return the application. It answers only requests with the token.

    A browser sends the token once, in the address printed by the command, and gets a cookie. Other
    users of this machine can reach the port, too.
    """
    pages = Pages(source)
    # Browsers send all cookies of 127.0.0.1 to each of its ports, so the names must differ.
    cookie = f"ddpjob-ui-{sha256(token.encode()).hexdigest()[:8]}"

    async def require_token(request: Request, call_next: Next) -> Response:
        given = request.query_params.get("token")
        if given is not None and _equal(given, token):
            # Remove the token from the address, because addresses stay in the history.
            answer: Response = RedirectResponse(request.url.remove_query_params("token"))
            # With `strict`, a link from another page, such as a terminal in a browser, would fail.
            answer.set_cookie(cookie, token, httponly=True, samesite="lax")
        elif _equal(request.cookies.get(cookie, ""), token):
            answer = await call_next(request)
        else:
            answer = PlainTextResponse("Open the address that ddpjob ui has printed.\n", 403)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    return Starlette(
        routes=pages.routes(),
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(BaseHTTPMiddleware, dispatch=require_token),
        ],
        exception_handlers=dict.fromkeys(
            (ClientError, SpecError, HTTPException, Exception), pages.error
        ),
    )


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _number(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 4):
        raise HTTPException(404, f"expected the index of a node, got {text[:20]!r}")
    return int(text)


def server(source: Source, token: str) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(source, token),
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=END_SECONDS,
    )
    return uvicorn.Server(config)
