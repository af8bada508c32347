"""Find out what an answer of the API server to a create request means for the job."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddpjob.controller.errors import GaveWay, Refused
from ddpjob.core.api.kubernetes import UNKNOWN_TO_CLUSTER
from ddpjob.core.api.reasons import Reason
from ddpjob.kube.errors import ApiError, Unreachable, is_admission

# Words of etcd and of its client for an object too large to be stored.
TOO_LARGE = ("etcdserver: request is too large", "trying to send message larger than max")

# The resource of a quota for pods in any phase.
POD_COUNT = "count/pods"

NO_REQUESTS = (
    "create the job again with spec.resources that name these resources, or give the namespace a "
    "LimitRange with defaults"
)
NO_ANSWER = (
    "the API server does not answer, probably because an admission webhook hangs; see kubectl get "
    "validatingwebhookconfigurations,mutatingwebhookconfigurations; the operator tries again: "
    "{error}"
)
NOT_RESTRICTED = (
    "set spec.podSecurity to Restricted, or install the operator with podSecurity=restricted"
)
TOO_MUCH_FOR_RESTRICTED = "remove from spec.podTemplate and spec.volumes what this level forbids"


@contextmanager
def told_refusals(*, restricted: bool = False) -> Iterator[None]:
    """Turn an answer about the job, and the lack of an answer, into Refused."""
    try:
        yield
    except ApiError as error:
        raise refused_or_error(error, restricted=restricted) from error
    except GaveWay:
        raise
    except Unreachable as error:
        raise Refused(Reason.NO_ANSWER, NO_ANSWER.format(error=error)) from error


def refused_or_error(error: ApiError, *, restricted: bool = False) -> Exception:
    """Return a Refused if the answer concerns the job, else the error itself.

    `restricted` says whether the generated pods already follow the Pod Security level restricted.
    """
    message = error.message
    if is_admission(message):
        return Refused(Reason.FORBIDDEN, message)
    if error.status == 400 and "unknown field" in message:
        explained = _with_advice(message, UNKNOWN_TO_CLUSTER)
        return Refused(Reason.INVALID_POD, explained, final=True)
    if error.status in (400, 413, 422) or any(words in message for words in TOO_LARGE):
        return Refused(Reason.INVALID_POD, message, final=True)
    if error.status >= 500:
        return Refused(Reason.NO_ANSWER, message)
    if error.is_absent:
        return Refused(Reason.NAMESPACE_ENDING, message)
    if error.status != 403:
        return error
    return _forbidden(message, restricted)


def _forbidden(message: str, restricted: bool) -> Refused:
    if "failed quota" in message:
        # The pod has no request for a resource limited by the quota.
        return Refused(Reason.QUOTA, _with_advice(message, NO_REQUESTS))
    if "exceeded quota" in message:
        return Refused(Reason.QUOTA, message, counts_ended_pods=POD_COUNT in message)
    if "violates PodSecurity" in message:
        advice = TOO_MUCH_FOR_RESTRICTED if restricted else NOT_RESTRICTED
        return Refused(Reason.POD_SECURITY, _with_advice(message, advice))
    if "being terminated" in message:
        return Refused(Reason.NAMESPACE_ENDING, message)
    return Refused(Reason.FORBIDDEN, message)


def _with_advice(message: str, advice: str) -> str:
    return f"{message}. To solve this, {advice}."
