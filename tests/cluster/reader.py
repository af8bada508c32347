"""Read objects of a cluster over one connection.

Tests look at objects each second. A `kubectl` process for each look would use much CPU time.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes.client import ApiException, CoreV1Api, CustomObjectsApi
from kubernetes.config import new_client_from_config
from urllib3.exceptions import HTTPError

from .commands import CommandFailed, Object


class Reader:
    """Reads from the API server of a kubeconfig. Raises CommandFailed if it refuses or is down."""

    def __init__(self, kubeconfig: Path) -> None:
        api = new_client_from_config(config_file=str(kubeconfig))  # type: ignore[no-untyped-call]
        self._core = CoreV1Api(api)
        self._custom = CustomObjectsApi(api)

    def job(self, name: str, namespace: str) -> Object | None:
        """Return a DDPJob, or None if it does not exist."""
        kind = ("ddpjob.dev", "v1alpha1", namespace, "ddpjobs", name)
        return _object_or_none(self._custom.get_namespaced_custom_object, *kind)

    def namespace(self, name: str) -> Object | None:
        """Return a namespace, or None if it does not exist."""
        return _object_or_none(self._core.read_namespace, name)

    def is_ready(self, node: str) -> bool:
        """Return True if the Kubernetes node is ready."""
        found: Object = json.loads(_text(self._core.read_node, node))
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in found["status"]["conditions"]
        )

    def pods(self, namespace: str, selector: str = "") -> list[Object]:
        """Return the pods selected by labels; an empty namespace means all namespaces."""
        if namespace:
            text = _text(self._core.list_namespaced_pod, namespace, label_selector=selector)
        else:
            text = _text(self._core.list_pod_for_all_namespaces, label_selector=selector)
        items: list[Object] = json.loads(text)["items"]
        return items

    def log(self, pod: str, namespace: str, container: str) -> str:
        """Return the log of a started container."""
        return _text(self._core.read_namespaced_pod_log, pod, namespace, container=container)


def _object_or_none(read: Callable[..., Any], *arguments: str) -> Object | None:
    try:
        found: Object = json.loads(_text(read, *arguments))
    except CommandFailed as error:
        if isinstance(error.__cause__, ApiException) and error.__cause__.status == 404:
            return None
        raise
    return found


def _text(read: Callable[..., Any], *arguments: str, **options: str) -> str:
    """Return the body of an answer as it is, not as an object of the client's models."""
    try:
        text: str = read(*arguments, **options, _preload_content=False).data.decode(
            "utf-8", "replace"
        )
    except ApiException as error:
        raise CommandFailed(f"{error.status} {error.reason}: {error.body}") from error
    except HTTPError as error:
        raise CommandFailed(f"the API server does not answer: {error}") from error
    return text
