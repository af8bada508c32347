"""Send requests to the API server, and return its answers as plain dicts.

It uses the Kubernetes client's configuration and transport, and none of its models.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from ddpjob import __version__
from ddpjob.core.api.backoff import exponential_delay
from ddpjob.kube.errors import ApiError, CallFailed, Unreachable, is_admission
from ddpjob.kube.kinds import Kind
from ddpjob.kube.request import AnyRequest, ReadDocument, Request, Verb

# Objects in the first page of a LIST, and in any. A whole page is in memory at once, and parsed it
# takes several times the size of its text. So the next pages get as many objects as fit into
# PAGE_BYTES. Large objects may follow small ones: a page of the longest kind takes about 190 MB if
# each object has 1 MB.
FIRST_PAGE = 10
LONGEST_PAGE = 64
PAGE_BYTES = 2**20

# Tries for a page of a LIST before the LIST fails, and the seconds in between.
PAGE_TRIES = 6
FIRST_PAGE_RETRY = 0.5
LONGEST_PAGE_RETRY = 5.0

# Maximum number of open connections. kopf's watches have connections of their own.
CONNECTIONS = 140

# Seconds until an idle connection is closed. The API server closes it after 90 s.
IDLE_SECONDS = 75.0

# Longest pause in seconds after a Retry-After of the API server.
LONGEST_PAUSE = 60.0

# Seconds until a request without an answer has failed.
CALL_TIMEOUT = 10.0
LIST_TIMEOUT = 30.0

# Quoted characters of a non-JSON answer.
MAX_QUOTED = 200


def is_in_cluster(kubeconfig: Path | None) -> bool:
    """Return True if the service account of this pod is to be used."""
    return kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ


async def configuration(
    kubeconfig: Path | None = None, context: str | None = None
) -> Configuration:
    """Return the configuration of the service account in a cluster, else of a kubeconfig.

    `context` is one of the kubeconfig; None is its current one. Raises ConfigException if there is
    neither.
    """
    found = Configuration()
    if is_in_cluster(kubeconfig) and context is None:
        config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
    else:
        path = str(kubeconfig) if kubeconfig else None
        loader = await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, context=context, client_configuration=found
        )
        # The token of a program such as `aws eks get-token` expires.
        if hasattr(loader, "exec_plugin_expiry"):
            found.refresh_api_key_hook = partial(_renew_token, loader)  # type: ignore[assignment]
    # By default aiohttp looks for netrc and proxy variables at every request, in threads. That
    # costs more CPU than the request. A proxy can be set in the kubeconfig (proxy-url).
    found.client_session_kwargs = {"trust_env": False}
    found.connection_pool_maxsize = CONNECTIONS
    return found


async def _renew_token(loader: Any, settings: Configuration) -> None:
    """Get a new token from the program in the kubeconfig, if the last one has expired."""
    await loader.load_from_exec_plugin()
    settings.api_key["BearerToken"] = loader.token


class Transport(RESTClientObject):
    """The client's transport with long-lived connections: a TLS handshake takes 6 ms."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            limit=self.maxsize, ssl=self.ssl_context, keepalive_timeout=IDLE_SECONDS
        )


class ApiClient:
    """One connection pool to one API server.

    `program` is the name of this program in the audit log, and the field manager of its writes.
    """

    def __init__(self, settings: Configuration, program: str = "ddpjob") -> None:
        self._settings = settings
        self._program = program
        self._transport = Transport(settings)
        # End of the pause requested by the API server, in event loop time.
        self._paused_until = 0.0
        # Called with each request and the HTTP status of its answer; 0 is no answer.
        self.on_answer: Callable[[AnyRequest, int], None] = lambda request, status: None

    async def close(self) -> None:
        await self._transport.close()

    async def wait_until_allowed(self) -> None:
        """Wait for the end of the pause requested by the API server with Retry-After."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, self._paused_until - now))

    def _note_pause(self, retry_after: str | None) -> None:
        if retry_after and retry_after.isdecimal():
            pause = min(float(retry_after), LONGEST_PAUSE)
            until = asyncio.get_running_loop().time() + pause
            self._paused_until = max(self._paused_until, until)

    async def call(self, request: AnyRequest, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        """Send one request and return the answer. Raises ApiError or Unreachable."""
        answer, _ = await self._send(request, timeout)
        return answer

    async def read(
        self, request: AnyRequest, timeout: float = CALL_TIMEOUT
    ) -> dict[str, Any] | None:
        """Return the answer to a GET, or None if the object or the document does not exist.

        Raises ApiError or Unreachable. An object of a kind that is not served may well exist, so
        the answer to its GET is an ApiError.
        """
        try:
            return await self.call(request, timeout)
        except ApiError as error:
            is_document = isinstance(request, ReadDocument)
            is_missing = error.is_unserved if is_document else error.is_absent
            if is_missing:
                return None
            raise

    async def stream(self, request: Request, seconds: float | None = None) -> AsyncIterator[bytes]:
        """Yield the lines of a possibly endless answer, such as a watch or a log.

        It fails after so many `seconds`. Raises ApiError or Unreachable.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CALL_TIMEOUT)
        with _connection_errors(request):
            answer = await self._open(request, timeout)
            try:
                if answer.status >= 400:
                    _read_answer(answer.status, await answer.read())
                rest = b""
                # A line may be longer than aiohttp's own readers of lines accept.
                async for data in answer.response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line
                if rest:
                    yield rest
            finally:
                answer.response.close()

    async def _send(self, request: AnyRequest, timeout: float) -> tuple[dict[str, Any], int]:
        """Send one request. Return the answer and its size in bytes."""
        status = 0
        try:
            with _connection_errors(request):
                answer = await self._open(request, timeout)
                data = await answer.read()
                status = answer.status
        finally:
            self.on_answer(request, status)
        try:
            return _read_answer(answer.status, data), len(data)
        except ApiError as error:
            # An admission webhook may ask for a pause too, but it must not stop the other jobs.
            if not is_admission(error.message):
                self._note_pause(answer.headers.get("Retry-After"))
            raise

    async def _open(self, request: AnyRequest, timeout: float | aiohttp.ClientTimeout) -> Any:
        """Send one request, and return the answer before its content has come."""
        url = f"{self._settings.host.rstrip('/')}/{request.path}"
        if request.query:
            url += f"?{urlencode(request.query)}"
        return await self._transport.request(  # type: ignore[no-untyped-call]
            request.verb.method,
            url,
            headers=await self._headers(request),
            body=request.body,
            _request_timeout=timeout,
        )

    async def _headers(self, request: AnyRequest) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": f"{self._program}/{__version__}"}
        token = await self._settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        if request.body is not None:
            headers["Content-Type"] = request.verb.media_type
        return headers

    async def pages(
        self,
        kind: Kind,
        namespace: str | None,
        before_try: Callable[[], None],
        tries: int = PAGE_TRIES,
    ) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        """Yield a LIST page by page: (objects, resourceVersion of the LIST).

        A failed page is requested again, up to `tries` times. `before_try` is called before each
        request. Raises ApiError or Unreachable.
        """
        query = _list_query(kind, FIRST_PAGE)
        while True:
            request = Request(Verb.GET, kind, namespace, query=query)
            answer, size = await self._page(request, before_try, tries)
            metadata = answer["metadata"]
            objects = answer["items"]
            yield objects, int(metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            limit = str(_next_page(len(objects), size))
            query = {**query, "continue": metadata["continue"], "limit": limit}

    async def list_version(
        self,
        kind: Kind,
        namespace: str | None,
        before_try: Callable[[], None],
        tries: int = PAGE_TRIES,
    ) -> tuple[int, bool]:
        """Return the resourceVersion of a LIST of one object, and whether it had one.

        Raises as `pages` does.
        """
        request = Request(Verb.GET, kind, namespace, query=_list_query(kind, 1))
        answer, _ = await self._page(request, before_try, tries)
        return int(answer["metadata"]["resourceVersion"]), bool(answer["items"])

    async def _page(
        self, request: Request, before_try: Callable[[], None], tries: int
    ) -> tuple[dict[str, Any], int]:
        for number in range(1, tries + 1):
            await self.wait_until_allowed()
            before_try()
            try:
                return await self._send(request, LIST_TIMEOUT)
            except CallFailed as error:
                if number == tries or not may_succeed_later(error):
                    raise
                await asyncio.sleep(exponential_delay(number, FIRST_PAGE_RETRY, LONGEST_PAGE_RETRY))
        raise AssertionError("the last try returns or raises")


def _list_query(kind: Kind, limit: int) -> dict[str, str]:
    selector = {"labelSelector": kind.selector} if kind.selector else {}
    return {"limit": str(limit), **selector}


def may_succeed_later(error: CallFailed) -> bool:
    """Return True for an overloaded or restarting API server."""
    return not isinstance(error, ApiError) or error.status == 429 or error.status >= 500


def _next_page(objects: int, size: int) -> int:
    """Return how many objects of the same mean size fit into PAGE_BYTES.

    A page has at most four times as many objects as the one before.
    """
    fitting = PAGE_BYTES * max(1, objects) // max(1, size)
    return max(1, min(fitting, 4 * max(1, objects), LONGEST_PAGE))


@contextmanager
def _connection_errors(request: AnyRequest) -> Iterator[None]:
    """Raise Unreachable for an error of the connection."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        what = f"{request.verb.method} {request.path}"
        raise Unreachable(f"{what}: {error or type(error).__name__}") from error


def _read_answer(status: int, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        # A proxy or a load balancer answered instead of the API server.
        text = data[:MAX_QUOTED].decode(errors="replace")
        if status < 400:
            raise Unreachable(f"expected a JSON object, got {text!r}")
        answer = {"message": text}
    if status < 400:
        return answer
    raise ApiError(status, str(answer.get("reason", "")), str(answer.get("message", "")))
