"""The supported versions of Kubernetes. The chart, the tests and the documents follow this module.

A job may use fields of a newer or an older Kubernetes. With strict validation, as by kubectl, each
side refuses an unknown field and names it in the message: the CRD before the job is created, the
cluster when its pods are. The CRD accepts any field below those that it declares. Of these,
`ddpjob` refuses the unknown ones.
"""

import re

# Minor versions of Kubernetes 1. The oldest starts sidecars without a feature gate.
OLDEST_MINOR = 29
# The newest tested version. The CRD has the fields of its pods.
NEWEST_MINOR = 37

OLDEST = f"1.{OLDEST_MINOR}"
NEWEST = f"1.{NEWEST_MINOR}"

# Fields of a job with the shapes of a pod's fields.
SHAPES_OF_PODS = (
    *(
        "spec.podTemplate.spec.",
        "spec.volumes[",
        "spec.volumeMounts[",
        "spec.env[",
        "spec.envFrom[",
    ),
    *("spec.tolerations[", "spec.topologySpreadConstraints[", "spec.affinity."),
)

UNKNOWN_TO_CRD = f" (DDPJobs have the pod fields of Kubernetes {NEWEST})"
UNKNOWN_TO_NEWEST = (
    f"; Kubernetes {NEWEST} has none of this name. If the cluster has it, create the job with "
    "kubectl apply"
)
UNKNOWN_TO_CLUSTER = (
    "correct the field's name; if it is a field of a newer Kubernetes, remove it or upgrade the "
    "cluster"
)


def is_shape_of_pods(path: str) -> bool:
    """Return True if a field of a job is one of Kubernetes' own."""
    return path.startswith(SHAPES_OF_PODS)


def advice_on_version(git_version: str) -> str:
    """Return what to do about the version of a cluster, such as `v1.28.1`, or an empty string."""
    if 0 <= minor_of(git_version) < OLDEST_MINOR:
        return f"upgrade the cluster: ddpjob needs Kubernetes {OLDEST} or newer"
    return ""


def note_on_version(git_version: str) -> str:
    """Return what to know about the version of a cluster, or an empty string."""
    if minor_of(git_version) > NEWEST_MINOR:
        return f"; ddpjob was tested up to Kubernetes {NEWEST}"
    return ""


def minor_of(git_version: str) -> int:
    """Return the minor version of Kubernetes 1, or -1 if the text is something else."""
    found = re.match(r"v1\.(\d+)", git_version)
    return int(found[1]) if found else -1
