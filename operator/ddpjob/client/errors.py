"""The errors of the client. Each message says what is wrong and what to do.

ClientError         the cluster did not do what was asked
├── NotConnected    there is no cluster, or it does not answer
├── NotFound        there is no such job
├── Rejected        the API server does not accept an object or a request
└── WaitTimeout     the job has not finished in time
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ddpjob.core.api import names
from ddpjob.kube.errors import ApiError, Unreachable

NO_CRD = (
    "the cluster has no DDPJobs; install the operator with its chart, or choose another cluster "
    "with --context"
)
NOT_LOGGED_IN = (
    "the API server does not accept the credentials of the kubeconfig; log in to the cluster again"
)


# The answer to a server-side apply with a value of the wrong type.
TYPED_PATCH = re.compile(r"failed to create typed patch object \(.*?\): \.?(.*)", re.DOTALL)
TYPED_VALUE = re.compile(r"got &value\.valueUnstructured\{Value:(.*?)\}")


class ClientError(Exception):
    """The cluster did not do what was asked."""


class NotConnected(ClientError):
    """There is no configuration of a cluster, or the cluster does not answer."""


class NotFound(ClientError):
    """There is no such job."""


class Rejected(ClientError):
    """The API server does not accept an object or a request. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class WaitTimeout(ClientError, TimeoutError):
    """The job has not finished in time."""


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise a ClientError for an error of a request."""
    try:
        yield
    except ApiError as error:
        raise explain(error) from error
    except Unreachable as error:
        message = f"cannot reach the API server: {error}; see kubectl cluster-info"
        raise NotConnected(message) from error


def explain(error: ApiError) -> ClientError:
    """Return the error of the client for an answer of the API server."""
    if error.status == 401:
        return NotConnected(NOT_LOGGED_IN)
    if error.is_unserved:
        return NotConnected(NO_CRD)
    return Rejected(_without_prefix(error.message), error.status)


def _without_prefix(message: str) -> str:
    """Return a refusal of the API server without the name of the object."""
    typed = TYPED_PATCH.search(message)
    if typed:
        return TYPED_VALUE.sub(r"got \1", typed[1])
    start, separator, causes = message.partition(" is invalid: ")
    if not separator or names.KIND not in start:
        return message
    if causes.startswith("[") and causes.endswith("]"):
        causes = causes[1:-1]
    return causes
