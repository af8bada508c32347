"""The API server as plain dicts: the Kubernetes client's configuration and transport, none of its models."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from ddpjob.core import names

Dict = Mapping[str, Any]

PAGE = 100
"""Objects a LIST asks for at once: parsed, each takes several times its text, and the whole page is in memory."""

IDLE_SECONDS = 75.0
"""How long an idle connection stays open; the API server closes it after 90 s."""

LONGEST_PAUSE = 60.0
"""Seconds; an API server that asks for more is asked again all the same."""

JOBS = f"apis/{names.GROUP}/{names.VERSION}"
OUR_PODS = names.LABEL_JOB
"""Selects by a label's presence, and by one that podTemplate cannot overwrite (others are often set for all of a chart)."""


class ApiError(Exception):
    """The API server's refusal: its HTTP status, its reason and its own words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class Unreachable(Exception):
    """No answer from the API server: refused, reset or timed out. What was asked may or may not have happened."""


async def configuration(kubeconfig: Path | None = None) -> Configuration:
    """In the cluster its service account, else a kubeconfig; raises ConfigException where there is neither."""
    found = Configuration()
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
    else:
        path = str(kubeconfig) if kubeconfig else None
        await config.load_kube_config(config_file=path, client_configuration=found)  # type: ignore[no-untyped-call]
    # aiohttp would look into netrc and proxy variables at every request, in threads: more CPU than the request itself.
    # A proxy belongs into the kubeconfig (proxy-url).
    found.client_session_kwargs = {"trust_env": False}
    return found


def job_path(namespace: str, name: str, subresource: str = "") -> str:
    path = f"{JOBS}/namespaces/{namespace}/{names.PLURAL}/{name}"
    return f"{path}/{subresource}" if subresource else path


def core_path(namespace: str, plural: str, name: str = "") -> str:
    path = f"api/v1/namespaces/{namespace}/{plural}"
    return f"{path}/{name}" if name else path


class Transport(RESTClientObject):
    """The client's transport, with connections that outlive the pauses of an operator: a TLS handshake costs 6 ms."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            limit=self.maxsize, ssl=self.ssl_context, keepalive_timeout=IDLE_SECONDS
        )


class Api:
    """One connection pool to one API server."""

    def __init__(self, settings: Configuration) -> None:
        self._settings = settings
        self._rest = Transport(settings)
        self._calm_at = 0.0

    async def close(self) -> None:
        await self._rest.close()

    async def calm(self) -> None:
        """Returns when the time is over that the API server asked for by Retry-After; at once where it did not."""
        await asyncio.sleep(max(0.0, self._calm_at - asyncio.get_running_loop().time()))

    def _heed(self, retry_after: str | None) -> None:
        if retry_after and retry_after.isdecimal():
            now = asyncio.get_running_loop().time()
            self._calm_at = max(self._calm_at, now + min(float(retry_after), LONGEST_PAUSE))

    async def call(
        self,
        method: str,
        path: str,
        body: Dict | None = None,
        query: Mapping[str, str] | None = None,
        timeout: float = 10,
    ) -> dict[str, Any]:
        """One request, `timeout` in seconds; raises ApiError or Unreachable."""
        headers = {"Accept": "application/json"}
        token = await self._settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = f"{self._settings.host.rstrip('/')}/{path}"
        if query:
            url += "?" + "&".join(f"{key}={value}" for key, value in query.items())
        try:
            answer = await self._rest.request(  # type: ignore[no-untyped-call]
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
            data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error or type(error).__name__}") from error
        self._heed(answer.headers.get("Retry-After"))
        return _read(answer.status, data)

    async def pages(
        self, path: str, selector: str = ""
    ) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        """A LIST page by page: (objects, resourceVersion of the list)."""
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            await self.calm()
            answer = await self.call("GET", path, query=query, timeout=30)
            yield answer["items"], int(answer["metadata"]["resourceVersion"])
            if not answer["metadata"].get("continue"):
                return
            query["continue"] = answer["metadata"]["continue"]


def _read(status: int, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):  # a proxy or a load balancer speaks
        answer = {"message": data[:200].decode(errors="replace")}
        if status < 400:
            raise Unreachable(f"the answer is no JSON object: {answer['message']}")
    if status < 400:
        return answer
    raise ApiError(status, str(answer.get("reason", "")), str(answer.get("message", "")))
