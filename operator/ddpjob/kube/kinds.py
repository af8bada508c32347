"""The kinds of objects that the operator watches and creates, and their paths in the API."""

from dataclasses import dataclass

from ddpjob.core.api import names


@dataclass(frozen=True)
class Kind:
    """A kind of objects: its group and version, its plural, and where its objects are.

    `selector` selects those that concern the operator.
    """

    group: str
    version: str
    plural: str
    selector: str = ""
    namespaced: bool = True

    @property
    def api(self) -> str:
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"

    def collection(self, namespace: str | None = None) -> str:
        """Return the path of all objects, in one namespace or in all."""
        scope = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return f"{self.api}{scope}/{self.plural}"

    def path(self, namespace: str, name: str, subresource: str = "") -> str:
        """Return the path of one object, or of a subresource of it."""
        path = f"{self.collection(namespace)}/{name}"
        return f"{path}/{subresource}" if subresource else path


JOBS = Kind(names.GROUP, names.VERSION, names.PLURAL)

# The label of the job selects the pods. A user's podTemplate cannot overwrite it, unlike labels
# such as app.kubernetes.io/managed-by, which often are set for everything in a chart.
PODS = Kind("", "v1", "pods", selector=names.LABEL_JOB)

NODES = Kind("", "v1", "nodes", namespaced=False)
SERVICES = Kind("", "v1", "services")
CONFIG_MAPS = Kind("", "v1", "configmaps")
EVENTS = Kind("", "v1", "events")
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
DEPLOYMENTS = Kind("apps", "v1", "deployments")
CRDS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
LEASES = Kind("coordination.k8s.io", "v1", "leases")

# In the order of a LIST. A job's pods are complete only after the job itself is known.
WATCHED = (NODES, JOBS, PODS)


def resource_of(path: str) -> str:
    """Return the plural of the kind that a path is about, with its subresource if it has one.

    Such as `pods`, or `ddpjobs/status`.
    """
    parts = path.split("/")
    # Before the plural there are api/VERSION or apis/GROUP/VERSION, and namespaces/NAME.
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]
    return "/".join(parts[::2])
