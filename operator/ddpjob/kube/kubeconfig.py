"""Read the user's cluster from a kubeconfig, as kubectl does."""

import os
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

from ddpjob.core.api.readers import child
from ddpjob.kube.api import configuration, is_in_cluster
from ddpjob.kube.errors import NotConfigured

# A pod finds the namespace of its service account here.
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def user_configuration(
    kubeconfig: Path | None, context: str | None
) -> tuple[Configuration, str]:
    """Return the configuration of a context of a kubeconfig, and its namespace.

    In a pod without a kubeconfig, both are those of its service account. Raises NotConfigured.
    """
    if kubeconfig is None:
        kubeconfig = _default_file()
    try:
        settings = await configuration(kubeconfig, context)
        namespace = _namespace(kubeconfig, context)
    # The others are raised if a kubeconfig is not YAML, lacks an expected object, or has a broken
    # certificate.
    except (
        config.ConfigException,
        yaml.YAMLError,
        AttributeError,
        TypeError,
        ValueError,
        OSError,
    ) as error:
        raise NotConfigured(
            f"no cluster is configured: {_reason(error)}; set KUBECONFIG or use --kubeconfig and "
            "--context"
        ) from error
    # As kubectl does: use the proxy of HTTPS_PROXY, and accept authorities that do not follow RFC
    # 5280 strictly.
    settings.client_session_kwargs = {"trust_env": True}
    settings.disable_strict_ssl_verification = True
    return settings, namespace


def _default_file() -> Path | None:
    """Return kubectl's kubeconfig, or None if there is none.

    The Kubernetes client reads KUBECONFIG only once, when it is imported.
    """
    if os.environ.get("KUBECONFIG"):
        return Path(os.environ["KUBECONFIG"])
    file = Path.home() / ".kube" / "config"
    return file if file.exists() else None


def _namespace(kubeconfig: Path | None, context: str | None) -> str:
    if is_in_cluster(kubeconfig) and context is None:
        return OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"
    path = str(kubeconfig) if kubeconfig else None
    contexts, active = config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
    chosen: Any = active
    for found in contexts:
        if found["name"] == context:
            chosen = found
    return str(child(chosen, "context").get("namespace") or "default")


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
