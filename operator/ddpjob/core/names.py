"""Every name that Kubernetes or a user sees, in one place: group, labels, object names, phases, reasons, variables."""

from enum import StrEnum

GROUP = "ddpjob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DDPJob"
PLURAL = "ddpjobs"

MANAGER = "ddpjob-operator"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_INDEX = f"{GROUP}/index"

TRAINER = "trainer"
"""The container whose end is the pod's fate."""

RENDEZVOUS_PORT = 29400
RESULT_FILE = "/dev/termination-log"
HEARTBEAT_FILE = "/dev/shm/ddpjob-heartbeat"
HOME = "/home/ddpjob"

MAX_JOB_NAME = 52
"""A local address `a<attempt>-n<index>.<job>` has to stay within the 63 characters that Neuron's collectives accept."""

RESERVED_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NEURON_RT_ROOT_COMM_ID"}
)
"""torchrun (and torch_xla from MASTER_ADDR) gives these to each process; a pod-wide value would be wrong for all but one."""

RESERVED_PREFIX = "PET_"
"""Every torchrun flag has an environment twin of this prefix, which would silently change the launch."""


class Phase(StrEnum):
    """A summary for people; no decision is taken from it."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Condition(StrEnum):
    """Condition types; batch/v1 Job's names, plus Running for 'every node of this attempt runs'."""

    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Cause(StrEnum):
    """Why an attempt ended."""

    FAILURE = "Failure"
    DISRUPTION = "Disruption"
    RENDEZVOUS = "Rendezvous"


class Reason(StrEnum):
    """One word for why a job is as it is: the column REASON."""

    CREATING_PODS = "CreatingPods"
    STARTING = "ContainersStarting"
    NODES_RUNNING = "NodesRunning"
    WAITING_FOR_OLD_PODS = "WaitingForOldPods"
    BACK_OFF = "BackOff"
    RESIZED = "Resized"
    FAILURE = "Failure"
    DISRUPTION = "Disruption"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    SUCCEEDED = "Succeeded"
    MAX_RESTARTS = "MaxRestartsExceeded"
    MAX_DISRUPTIONS = "MaxDisruptionsExceeded"
    INVALID_POD = "InvalidPod"
    INVALID_SPEC = "InvalidSpec"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    QUOTA = "QuotaExceeded"
    POD_SECURITY = "PodSecurity"
    NAMESPACE_ENDING = "NamespaceTerminating"
    FORBIDDEN = "Forbidden"
    NAME_IN_USE = "NameInUse"


def pod_name(job: str, attempt: int, index: int | str) -> str:
    """Unique over jobs too: the last two dashes always part attempt and index from the job's name."""
    return f"{job}-{attempt}-{index}"


def hostname(attempt: int, index: int, nodes: int) -> str:
    """Zero-padded, because c10d gives ranks by a plain string sort of the agents' addresses."""
    width = len(str(max(nodes - 1, 0)))
    return f"a{attempt}-n{index:0{width}d}"


def rendezvous_id(uid: str, attempt: int) -> str:
    """New for every attempt: a closed rendezvous is dead for good, and no straggler of an older attempt may join."""
    return f"{uid}-{attempt}"
