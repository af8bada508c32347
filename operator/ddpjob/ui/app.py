"""The pages as a web application. Every route only reads."""

import asyncio
import hmac
import io
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

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
from ddpjob.core.readers import SpecError
from ddpjob.core.user_job import DDPJob
from ddpjob.show.curves import draw
from ddpjob.ui.pages import NO_NAMESPACE, job_page, list_page, node_count
from ddpjob.ui.sources import Source

FOLDER = Path(__file__).parent

# A page of another site can send requests here. It must not read the answers, under no name of this
# machine, and no page may run what a job has printed.
HOSTS = ["127.0.0.1", "localhost"]
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

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
        return self._page(request, "jobs.html", **list_page(jobs, datetime.now(UTC)))

    async def job(self, request: Request) -> Response:
        """Show a job, and the end of the log of the node in the query."""
        job = await self._job(request)
        node = _number(request.query_params.get("node", "0"))
        if node >= node_count(job):
            raise HTTPException(404, f"job {job.name} has {node_count(job)} nodes, from 0 on")
        metrics, pods, log = await asyncio.gather(
            self.source.metrics(job), self.source.pods(job), self._log(job, node)
        )
        shown = job_page(job, metrics, pods, datetime.now(UTC))
        return self._page(request, "job.html", **shown, node=node, log=log)

    async def curves(self, request: Request) -> Response:
        """Draw the curves of a job. matplotlib takes a moment, so it works in a thread."""
        job = await self._job(request)
        metrics = await self.source.metrics(job)
        figure = await asyncio.to_thread(draw, {job.name: metrics}, "")
        if figure is None:
            raise HTTPException(404, f"job {job.name} has printed no figures")
        data = io.BytesIO()
        await asyncio.to_thread(figure.savefig, data, format="svg")
        return Response(data.getvalue(), media_type="image/svg+xml")

    async def error(self, request: Request, error: Exception) -> Response:
        """Show an error of the cluster, or an address that does not exist."""
        status, text = 502, str(error)
        if isinstance(error, NotFound):
            status = 404
        if isinstance(error, HTTPException):
            status, text = error.status_code, error.detail
        return self._page(request, "error.html", status=status, text=text)

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
        return self.templates.TemplateResponse(request, template, context, status_code=status)


def create_app(source: Source, token: str, port: int) -> Starlette:
    """Return the application for requests that know a token.

    A browser sends it once, in the address that the command has printed, and gets a cookie. Other
    users of this machine can reach the port, too.
    """
    pages = Pages(source)
    # Browsers do not separate the cookies of two ports.
    cookie = f"ddpjob-ui-{port}"

    async def require_token(request: Request, call_next: Next) -> Response:
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), token.encode()):
            answer: Response = RedirectResponse(request.url.remove_query_params("token"))
            answer.set_cookie(cookie, token, httponly=True, samesite="strict")
        elif hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            answer = await call_next(request)
        else:
            answer = PlainTextResponse("Open the address that ddpjob ui has printed.\n", 403)
        answer.headers.update(HEADERS)
        return answer

    return Starlette(
        routes=pages.routes(),
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(BaseHTTPMiddleware, dispatch=require_token),
        ],
        exception_handlers={
            ClientError: pages.error,
            SpecError: pages.error,
            HTTPException: pages.error,
        },
    )


def _number(text: str) -> int:
    if not text.isdecimal():
        raise HTTPException(404, f"expected the index of a node, got {text!r}")
    return int(text)
