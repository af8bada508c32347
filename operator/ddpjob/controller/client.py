"""The API server as plain dicts.

It uses the Kubernetes client's configuration and transport, and none of its models.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from ddpjob.controller.errors import ApiError, Unreachable
from ddpjob.core import names
from ddpjob.core.readers import Dict

# Objects per page of a LIST. A whole page is in memory at once, and parsed it takes several times
# the size of its text.
PAGE_SIZE = 100

# Seconds that an idle connection stays open. The API server closes it after 90 s.
IDLE_SECONDS = 75.0

# Longest time in seconds that a Retry-After of the API server is obeyed.
LONGEST_PAUSE = 60.0

# Seconds until a request without an answer has failed.
CALL_TIMEOUT = 10.0
LIST_TIMEOUT = 30.0

# Characters of a non-JSON answer that are quoted.
MAX_QUOTED = 200

JOBS = f"apis/{names.GROUP}/{names.VERSION}"

# Selects the pods that have the label. A user's podTemplate cannot overwrite it, unlike labels such
# as app.kubernetes.io/managed-by, which often are set for everything in a chart.
OUR_PODS = names.LABEL_JOB


async def configuration(kubeconfig: Path | None = None) -> Configuration:
    """Return the configuration of the service account in a cluster, else of a kubeconfig.

    Raises ConfigException if there is neither.
    """
    found = Configuration()
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
    else:
        path = str(kubeconfig) if kubeconfig else None
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, client_configuration=found
        )
    # By default aiohttp looks for netrc and proxy variables at every request, in threads. That
    # costs more CPU than the request. A proxy can be set in the kubeconfig (proxy-url).
    found.client_session_kwargs = {"trust_env": False}
    return found


def job_path(namespace: str, name: str, subresource: str = "") -> str:
    path = f"{JOBS}/namespaces/{namespace}/{names.PLURAL}/{name}"
    return f"{path}/{subresource}" if subresource else path


def core_path(namespace: str, plural: str, name: str = "") -> str:
    path = f"api/v1/namespaces/{namespace}/{plural}"
    return f"{path}/{name}" if name else path


class Transport(RESTClientObject):
    """The client's transport with connections that stay open: a TLS handshake takes 6 ms."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            limit=self.maxsize, ssl=self.ssl_context, keepalive_timeout=IDLE_SECONDS
        )


class ApiClient:
    """One connection pool to one API server."""

    def __init__(self, settings: Configuration) -> None:
        self._settings = settings
        self._transport = Transport(settings)
        # Time of the event loop until which the API server asked for a pause.
        self._paused_until = 0.0

    async def close(self) -> None:
        await self._transport.close()

    async def wait_until_allowed(self) -> None:
        """Wait for the end of the pause that the API server asked for by Retry-After."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, self._paused_until - now))

    def _obey(self, retry_after: str | None) -> None:
        if retry_after and retry_after.isdecimal():
            pause = min(float(retry_after), LONGEST_PAUSE)
            until = asyncio.get_running_loop().time() + pause
            self._paused_until = max(self._paused_until, until)

    async def call(
        self,
        method: str,
        path: str,
        body: Dict | None = None,
        query: Mapping[str, str] | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> dict[str, Any]:
        """Send one request and return the answer. Raises ApiError or Unreachable."""
        url = f"{self._settings.host.rstrip('/')}/{path}"
        if query:
            url += f"?{urlencode(query)}"
        headers = await self._headers(has_body=body is not None)
        try:
            answer = await self._transport.request(  # type: ignore[no-untyped-call]
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
            data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error or type(error).__name__}") from error
        self._obey(answer.headers.get("Retry-After"))
        return _read_answer(answer.status, data)

    async def _headers(self, *, has_body: bool) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        token = await self._settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        if has_body:
            headers["Content-Type"] = "application/json"
        return headers

    async def get(self, path: str, timeout: float = CALL_TIMEOUT) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist. Raises ApiError or Unreachable."""
        try:
            return await self.call("GET", path, timeout=timeout)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def pages(
        self, path: str, selector: str = ""
    ) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        """Yield a LIST page by page: (objects, resourceVersion of the LIST)."""
        query = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = selector
        while True:
            await self.wait_until_allowed()
            answer = await self.call("GET", path, query=query, timeout=LIST_TIMEOUT)
            metadata = answer["metadata"]
            yield answer["items"], int(metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]


def _read_answer(status: int, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
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
