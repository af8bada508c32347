"""Every name visible to Kubernetes or to a user.

Group, labels, object names, phases, conditions, causes and variables.
"""

from enum import StrEnum
from typing import NamedTuple

GROUP = "ddpjob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DDPJob"
PLURAL = "ddpjobs"

# The fields of the object.
FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")

MANAGER = "ddpjob-operator"

# The Lease in each namespace with jobs. It names the installation in charge of the namespace.
INSTALLATION_LEASE = "ddpjob-installation"

# The value of spec.managedBy for this operator. It is also the default.
CONTROLLER = f"{GROUP}/operator"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_INDEX = f"{GROUP}/index"

# The label of a ConfigMap with code: the job of the code.
LABEL_CODE = f"{GROUP}/code"

# The assignment of a pod's agent, and since when the pod was ready when it got the assignment.
ANNOTATION_ASSIGNMENT = f"{GROUP}/assignment"
ANNOTATION_READY_BEFORE = f"{GROUP}/ready-before"

# The training container. Its end is the end of the pod, whatever the sidecars do.
TRAINER = "trainer"

# The first of the ports of rendezvous, and their number. They are even, so none is the agent's.
RENDEZVOUS_PORT = 29400
RENDEZVOUS_PORTS = 8
AGENT_PORT = 29401
STATE_PATH = "/state"
STARTED_PATH = "/started"
CHECKPOINT_VARIABLE = "DDP_CHECKPOINT_DIR"
HOME = "/home/ddpjob"
SHARED_MEMORY = "/dev/shm"

# How the names of the operator's volumes begin.
VOLUME_PREFIX = "ddpjob-"
AGENT_VOLUME = f"{VOLUME_PREFIX}agent"
CHECKPOINT_VOLUME = f"{VOLUME_PREFIX}checkpoint"
CODE_VOLUME = f"{VOLUME_PREFIX}code"

# The beginning of an agent's own lines in the log of its pod.
AGENT_LINE = "ddpjob agent: "

# The agent's files in a pod: its program, its pipes and small files, its assignment, its report.
FOLDER = "/ddpjob"
AGENT_FOLDER = f"{FOLDER}/agent"
RUN_FOLDER = f"{FOLDER}/run"
POD_FOLDER = f"{FOLDER}/pod"

# The ConfigMap of `spec.code`, and the working directory: the agent unpacks the code there.
CODE_FOLDER = f"{FOLDER}/code"
WORK_FOLDER = f"{FOLDER}/work"

# A second mount of the operator's volume at /dev/shm. The agent empties it between two attempts:
# whatever is mounted at /dev/shm or below it, only files of the volume are here.
MEMORY_FOLDER = f"{FOLDER}/shm"

# The operator's volume at each of these paths. The one at /ddpjob has `work`, `work.last` and
# `cache`: in one file system, files are moved from one folder to another at once.
OWN_MOUNTS = {
    FOLDER: f"{VOLUME_PREFIX}work",
    AGENT_FOLDER: AGENT_VOLUME,
    RUN_FOLDER: f"{VOLUME_PREFIX}run",
    POD_FOLDER: f"{VOLUME_PREFIX}pod",
    CODE_FOLDER: CODE_VOLUME,
    MEMORY_FOLDER: f"{VOLUME_PREFIX}shm",
}
ASSIGNMENT_FILE = f"{POD_FOLDER}/assignment"
MESSAGE_FILE = "/dev/termination-log"

# Neuron's collectives accept at most 63 characters of an address `n<index>-a<attempt>.<job>`.
MAX_JOB_NAME = 52

MAX_NODES = 1000

# torchrun sets these for each process, and torch_xla derives the last from MASTER_ADDR. A value for
# the whole pod would be wrong for all processes but one.
RESERVED_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NEURON_RT_ROOT_COMM_ID"}
)

# Every flag of torchrun can also be given as a variable with this prefix.
RESERVED_PREFIX = "PET_"


class Phase(StrEnum):
    """A summary for people. No decision reads it."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Condition(StrEnum):
    """Condition types: those of a batch/v1 Job, and two of our own.

    Running: every node of the attempt runs. HangsDetected: all pods give heartbeats.
    """

    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    HANGS_DETECTED = "HangsDetected"


class Cause(StrEnum):
    """The causes that end an attempt. Only the first three can use a budget."""

    FAILURE = "Failure"
    HANG = "Hang"
    DISRUPTION = "Disruption"
    NOT_RESUMED = "NotResumed"
    RENDEZVOUS = "Rendezvous"
    RESIZED = "Resized"
    SUSPENDED = "Suspended"
    YIELDED = "Yielded"
    STOPPED = "Stopped"
    SUCCEEDED = "Succeeded"


class Activity(StrEnum):
    """What a job does with its time.

    - QUEUED: a pod has no node yet, or must not be created. STARTING: the workers have not met.
    - TRAINING: they have met. After the end of their attempt, only the time from its first step on
      counts, if the step is known.
    - RECOVERING: after an attempt that trained, until the workers meet again, whatever delays them.
    """

    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"


def state_path(uid: str, index: int | str) -> str:
    """Return where the agent of a job's pod tells its state. No pod of another job has the path.

    The address of a lost pod may belong to another one by now.
    """
    return f"{STATE_PATH}/{uid}/{index}"


def pod_name(job: str, attempt: int, index: int | str) -> str:
    """Return the name of a pod.

    It is unique over all jobs: the last two dashes separate the attempt and the index.
    """
    return f"{job}-{attempt}-{index}"


def group_name(job: str, attempt: int) -> str:
    """Return the name of the PodGroup of an attempt's new pods."""
    return f"{job}-{attempt}"


def is_group_of(job: str, group: str) -> bool:
    """Return True if the operator may have made a PodGroup of this name for a job."""
    stem, _, attempt = group.rpartition("-")
    return stem == job and attempt.isdecimal()


def attempt_of_group(group: str) -> int:
    """Return the attempt in the name of an own PodGroup."""
    return int(group.rpartition("-")[2])


class Identity(NamedTuple):
    """A job as one object: another namespace, and another time, may have one of the same name."""

    namespace: str
    name: str
    uid: str


def is_own_volume(name: str) -> bool:
    """Return True for a volume name reserved for the operator."""
    return name.startswith(VOLUME_PREFIX)


def is_own_path(path: str) -> bool:
    """Return True for a mount path reserved for the operator."""
    return path == FOLDER or path.startswith(f"{FOLDER}/")


def pod_on_node(pod: str, node: str) -> str:
    """Return a pod's name, with its Kubernetes node if it has one, for a message."""
    return f"pod {pod} on node {node}" if node else f"pod {pod}"


def hostname(attempt: int, index: int) -> str:
    """Return the host name of a pod created in an attempt.

    c10d sorts the agents' addresses as strings to assign ranks, and a gang may have pods of
    different attempts. So the name begins with the index, always with four digits.
    """
    return f"n{index:04d}-a{attempt}"


def rendezvous_endpoint(job: str, attempt: int, address: str = "") -> str:
    """Return the endpoint of a rendezvous: at the address of a pod, or else at node 0 by name."""
    host = address or f"{hostname(attempt, 0)}.{job}"
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{rendezvous_port(attempt)}"


def rendezvous_port(attempt: int) -> int:
    """Return the port of an attempt. A member must not find the store of the attempt before.

    A kept pod may still run the old store, while it writes a checkpoint.
    """
    return RENDEZVOUS_PORT + 2 * (attempt % RENDEZVOUS_PORTS)


def rendezvous_id(uid: str, attempt: int) -> str:
    """Return the id of an attempt's rendezvous.

    Each attempt has its own: a closed rendezvous cannot be opened again, and a process of an older
    attempt must not join.
    """
    return f"{uid}-{attempt}"
