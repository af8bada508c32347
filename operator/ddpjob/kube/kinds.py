"""The kinds of Kubernetes objects that ddpjob reads and writes."""

from dataclasses import dataclass, field

from ddpjob.core.api import kueue, names, queue
from ddpjob.core.api.pod_groups import BACKENDS
from ddpjob.core.api.queue_positions import VISIBILITY_GROUP


@dataclass(frozen=True)
class Kind:
    """A kind of objects: its group and version, and its plural.

    `selector` selects the operator's objects. Two kinds that differ only in it are equal.
    """

    group: str
    version: str
    plural: str
    selector: str = field(default="", compare=False)
    namespaced: bool = True

    @property
    def api(self) -> str:
        """Return the path of the group and version, where the API server lists its kinds."""
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"


JOBS = Kind(names.GROUP, names.VERSION, names.PLURAL)

# The label of the job selects the pods. A user's podTemplate cannot overwrite it, unlike labels
# such as app.kubernetes.io/managed-by. Charts often set those for everything.
PODS = Kind("", "v1", "pods", selector=names.LABEL_JOB)

NODES = Kind("", "v1", "nodes", namespaced=False)
SERVICES = Kind("", "v1", "services")
CONFIG_MAPS = Kind("", "v1", "configmaps")
EVENTS = Kind("", "v1", "events")
CLAIMS = Kind("", "v1", "persistentvolumeclaims")
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
DEPLOYMENTS = Kind("apps", "v1", "deployments")
CRDS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
LEASES = Kind("coordination.k8s.io", "v1", "leases")
ACCESS_REVIEWS = Kind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False)
SELF_REVIEWS = Kind("authentication.k8s.io", "v1", "selfsubjectreviews", namespaced=False)

# The kinds of queues. The operator reads the last three by name. Only users' commands ask for the
# Workloads waiting in a LocalQueue.
WORKLOADS = Kind(queue.GROUP, kueue.VERSION, "workloads")
LOCAL_QUEUES = Kind(queue.GROUP, kueue.VERSION, "localqueues")
PENDING_QUEUES = Kind(VISIBILITY_GROUP, kueue.VERSION, "localqueues")
FLAVORS = Kind(queue.GROUP, kueue.VERSION, "resourceflavors", namespaced=False)
WORKLOAD_PRIORITIES = Kind(queue.GROUP, kueue.VERSION, "workloadpriorityclasses", namespaced=False)
PRIORITY_CLASSES = Kind("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)

# The PodGroups of the gang schedulers, by the names of their backends.
POD_GROUPS = {one.name: Kind(one.group, one.version, "podgroups") for one in BACKENDS}

# In the order of a LIST. A job's pods are complete only after the job itself is known.
WATCHED = (NODES, JOBS, PODS)
