"""The fields of a DDPJob's spec as types, written by `make generate` from their declarations."""

from collections.abc import Mapping
from typing import Any, Literal, Required, TypedDict

# Objects in Kubernetes' own shapes.
KubernetesObject = Mapping[str, Any]


class PodTemplate(TypedDict, total=False):
    """Overlay for other fields of the pods."""

    metadata: KubernetesObject
    spec: KubernetesObject


class Code(TypedDict, total=False):
    """Code in the working directory of each attempt."""

    configMap: Required[str]


class Torchrun(TypedDict, total=False):
    """How torchrun is started."""

    command: list[str]
    args: list[str]
    python: str
    rdzvConf: Mapping[str, int | str]


class Checkpoint(TypedDict, total=False):
    """Claim for checkpoints, mounted by every attempt of the job."""

    claimName: Required[str]
    mountPath: str


class Topology(TypedDict, total=False):
    """Nodes near each other, with the same value of a label."""

    required: str
    preferred: str


class Scheduling(TypedDict, total=False):
    """How the pods of an attempt get their nodes."""

    gang: Literal["Auto", "Off", "Volcano", "Coscheduling"]
    topology: Topology


class FailurePolicy(TypedDict, total=False):
    """Budgets of restarts of the whole gang, and what ends a job. Can be changed at any time."""

    maxRestarts: int
    maxDisruptions: int
    maxAnnouncedDisruptions: int
    windowSeconds: int
    nonRetryableExitCodes: list[int]
    maxAttemptsWithoutProgress: int


class ScriptFields(TypedDict, total=False):
    """The fields of `spec` that a script of one's own does not decide."""

    nodes: int
    nprocPerNode: int | Literal["auto"]
    accelerator: Literal["cpu", "gpu", "trn1.32xlarge", "trn1.2xlarge"]
    image: Required[str]
    setup: str
    setupTimeoutSeconds: int
    torchrun: Torchrun
    checkpoint: Checkpoint
    scheduling: Scheduling
    failurePolicy: FailurePolicy
    fastStart: bool
    podSecurity: Literal["None", "Restricted"]
    recovery: Literal["InPlace", "Recreate"]
    hangTimeoutSeconds: int
    firstHeartbeatSeconds: int
    heartbeat: Literal["File", "Log"]
    suspend: bool
    retries: int
    activeDeadlineSeconds: int
    startupDeadlineSeconds: int
    ttlSecondsAfterFinished: int
    cleanPodPolicy: Literal["None", "Running", "All"]
    managedBy: str
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"]
    imagePullSecrets: list[KubernetesObject]
    env: list[KubernetesObject]
    envFrom: list[KubernetesObject]
    resources: KubernetesObject
    volumes: list[KubernetesObject]
    volumeMounts: list[KubernetesObject]
    nodeSelector: Mapping[str, str]
    tolerations: list[KubernetesObject]
    affinity: KubernetesObject
    topologySpreadConstraints: list[KubernetesObject]
    serviceAccountName: str
    priorityClassName: str
    podTemplate: PodTemplate


class SpecFields(ScriptFields, total=False):
    """The fields of `spec`, with the names of the CRD."""

    args: Required[list[str]]
    code: Code
