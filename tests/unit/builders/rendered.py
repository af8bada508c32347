"""Pods as the operator creates them."""

from ddpjob.core.render.objects import pods
from ddpjob.core.render.pod_context import Settings

from .jobs import a_job, a_status

DEFAULTS = Settings()
RESTRICTED = Settings(restricted=True)


def render(index=0, *, nodes=2, attempt=0, settings=DEFAULTS, **spec):
    """Return the pod of one node, of a job with these fields in its spec."""
    status = a_status(attempt=attempt, nodes=nodes)
    (pod,) = pods(a_job(status=status, nodes=nodes, **spec), [index], settings)
    return pod
