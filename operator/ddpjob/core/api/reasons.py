"""The reasons of a job, as a table: each with its meaning and what to do.

A reason is in the column REASON, in `status.lastFailure` and `status.attempts`, or in a condition.
It is described only here: `make generate` writes these rows into a page of the documentation, and
`ddpjob status` refers to them. Texts are Markdown, and their links start from the page.

Kubelets, schedulers and the API server have reasons of their own. The page describes them too.
"""

from enum import StrEnum
from typing import Self

# The page with the rows, below docs/.
PAGE = "users/reasons.md"

RETRY = "[take the job up again](lifecycle.md#take-a-failed-job-up-again)"
NEXT_NODES = "nothing: the next attempt runs on other nodes"


class Reason(StrEnum):
    """Why a job is in its phase, or why an attempt of it ended, in one word."""

    meaning: str
    advice: str

    def __new__(cls, word: str, meaning: str, advice: str = "") -> Self:
        reason = str.__new__(cls, word)
        reason._value_ = word
        reason.meaning = meaning
        reason.advice = advice
        return reason

    @property
    def anchor(self) -> str:
        """Return the name of the row in the page, for links to it."""
        return f"reason-{self.lower()}"

    # From the start of a job to its end.

    CREATING_PODS = "CreatingPods", "the operator creates the pods of an attempt"
    STARTING = (
        "ContainersStarting",
        "nodes pull the image, mount volumes and start the containers",
        "if it takes long, run `kubectl describe pod` for the pod in the message; its events often "
        "name a missing claim, ConfigMap or Secret",
    )
    SETTING_UP = (
        "SettingUp",
        "all containers run, and the pods in the message run `spec.setup`",
        "usually nothing: `ddpjob logs` prints the output, and `setupTimeoutSeconds` limits the "
        "time. An image with the packages starts sooner",
    )
    WAITING_FOR_PEERS = (
        "WaitingForPeers",
        "all containers have run for a minute, and the workers of the pods in the message have not "
        "met the others; the job goes on by itself once they meet, and `startupDeadlineSeconds` "
        "limits the wait",
        "look at the log of the pod. For an error of name resolution or a connection timeout, see "
        "[names and networks](troubleshooting.md#names-and-networks); `ddpjob doctor` finds a "
        "NetworkPolicy between the pods. Otherwise look for other numbers of nodes in `args`, and "
        "for a rendezvous or launcher of the script's own",
    )
    NODES_RUNNING = "NodesRunning", "the job trains"
    SUCCEEDED = "Succeeded", "Complete"

    # Why a job waits.

    UNSCHEDULABLE = (
        "Unschedulable",
        "no node fits; the message is the scheduler's",
        "add nodes, or request less in `resources`; the waiting gang uses up no budget",
    )
    CLAIM_NOT_FOUND = (
        "ClaimNotFound",
        "the pods mount a PersistentVolumeClaim, and the job's namespace has no claim of this name",
        "create the claim: the job then starts by itself; or submit the job again with another one",
    )
    GATED = (
        "SchedulingGated",
        "a scheduling gate holds the pods, usually a queue",
        "wait for the queue",
    )
    HELD_BY_KUEUE = (
        "HeldByKueue",
        "Kueue takes the pods of the job one by one: its configuration does not name DDPJobs, or a "
        "LocalQueue `default` takes jobs without a queue",
        "[queues](queues.md#for-administrators) has the configuration; give the job the label of a "
        "queue",
    )
    IMAGE_PULL = (
        "ImagePull",
        "a node cannot pull the image; the message has the registry's answer",
        "check the name, the tag and `imagePullSecrets`",
    )
    QUOTA = (
        "QuotaExceeded",
        "the quota is used up; or, with `must specify …`, it limits a resource that the pods do "
        "not request",
        "wait: the operator retries, first after a second, later every minute. With `must specify "
        "…`, create a LimitRange with defaults in the namespace, or create the job again with "
        "these `resources`",
    )
    POD_SECURITY = (
        "PodSecurity",
        "the pods do not meet the level enforced by the namespace",
        "set `spec.podSecurity: Restricted` (it may change at any time), or `podSecurity: "
        "restricted` in the chart's values",
    )
    NAME_IN_USE = (
        "NameInUse",
        "a Service or pod with this name belongs to another object, or to an earlier job that has "
        "not ended; or the ConfigMap of the agent has other content",
        "rename the job; or wait for the last pod of the earlier job, as it may be writing its "
        "checkpoint; or delete the ConfigMap named in the message, and find out [who wrote "
        "it](../../SECURITY.md#configmaps)",
    )
    NAMESPACE_ENDING = (
        "NamespaceTerminating",
        "the namespace of the job is being deleted, so the API server refuses the pods",
        "nothing, or create the job in another namespace",
    )
    FORBIDDEN = (
        "Forbidden",
        "the API server, an admission policy or a webhook refuses the pods; the message is the "
        "original one",
        "correct what the message names; the operator retries",
    )
    NO_ANSWER = (
        "NoAnswer",
        "the API server has not answered the creation of a pod or Service; usually an admission "
        "webhook hangs",
        "run `kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations` and look "
        "at those for this namespace; the operator retries",
    )
    WAITING_FOR_OLD_PODS = (
        "WaitingForOldPods",
        "pods of the previous attempt have not ended; the message names one, its node, and the "
        "cause of the wait",
        "usually nothing: a pod on a dead node is [deleted by force](faults.md#dead-nodes). If the "
        "message has a command, run it once you know that the node is down",
    )
    BACK_OFF = (
        "BackOff",
        "the last failed attempts trained for less than 5 minutes, so the next attempt waits",
        "see `status.lastFailure`",
    )
    YIELDED = (
        "YieldedToOlderJob",
        "the job gave its pods back, because an older job was incomplete too",
        "wait: it goes on when the older one runs, after 10 minutes at the latest",
    )
    SUSPENDED = "Suspended", "`spec.suspend` is true", "set it to false"
    QUEUED = (
        "Queued",
        "the job waits for room in its queue; the message has Kueue's own words",
        "wait, or ask the administrator of the queue",
    )
    PREEMPTED = (
        "Preempted",
        "the queue has given the room of the job to one of higher priority, or to a team with a "
        "better claim; the job saves a checkpoint, and waits for room again",
        "nothing",
    )
    NO_QUEUE = (
        "QueueUnavailable",
        "the job has the label of a queue, and the operator cannot ask for room there; a running "
        "job goes on",
        "the message says what is missing",
    )
    NO_GANGS = (
        "GangUnavailable",
        "`spec.scheduling.gang` names a scheduler, and the operator cannot use its PodGroups",
        "the message says what is missing",
    )

    # Why a new attempt begins.

    RESIZED = "Resized", "a new attempt begins: `spec.nodes` was changed"
    RESUMED = "Resumed", "a new attempt begins: the job was suspended before"
    ADMITTED = "Admitted", "a new attempt begins: the queue has given the job room"
    RETRIED = "Retried", "a new attempt begins: `spec.retries` was raised"
    FAILURE = (
        "Failure",
        "a new attempt begins: the script, the image or a limit of the pod ended the last one",
        "see `status.lastFailure`",
    )
    DISRUPTION = (
        "Disruption",
        "a new attempt begins: the cluster ended a pod of the last one",
        "see `status.lastFailure`",
    )
    HANG = (
        "Hang",
        "a pod gave no heartbeat for `hangTimeoutSeconds`; the message has the first lines of its "
        "stacks",
        "read the stacks in `kubectl logs`; if the script only was slow, raise "
        "`hangTimeoutSeconds`",
    )
    NOT_RESUMED = (
        "NotResumed",
        "a pod kept for the attempt ended before it took part; usually it was lost, or failed, "
        "together with the pod counted before",
        "nothing, unless it repeats",
    )
    RENDEZVOUS_TIMEOUT = (
        "RendezvousTimeout",
        "the rendezvous timed out before every pod had started",
        "look for what kept the pods in the message from starting",
    )
    STATUS_RECOVERED = (
        "StatusRecovered",
        "the status was deleted or replaced; the job goes on with its newest attempt, and its "
        "counters begin anew",
        "nothing, unless it repeats",
    )

    # What ended an attempt.

    SILENT = (
        "Silent",
        "for 120 s, more with a long grace period, the named pods ran and were not ready",
        "look at their node and network, and at `kubectl logs`",
    )
    PEER_LOST = (
        "PeerLost",
        "the other pods lost the named pod, or waited for it too long",
        "look at its node and network; if it repeats on good nodes, the script may hang",
    )
    PEER_HANGS = (
        "PeerHangs",
        "the other pods waited too long for the named pod. Its agent answers the operator, so its "
        "node and its network work. It counts as a hang",
        "look at the script: does this rank do something that takes longer than the time-out of "
        "the process group?",
    )
    ENDED_EARLY = (
        "EndedEarly",
        "a rank ended with exit code 0 while others were still training, and they lost it",
        "make the same number of steps on all ranks: uneven data needs `drop_last`, a sampler with "
        "padding, or `Join`",
    )
    SETUP_FAILED = (
        "SetupFailed",
        "`spec.setup` failed in the named pod, or took longer than `setupTimeoutSeconds`. The "
        "message has its last line. It counts as a failure, and is tried again",
        "read the output with `ddpjob logs`. If the index of packages did not answer, check that "
        "the pods may reach it, or use an image with the packages",
    )
    NODE_UNREACHABLE = (
        "NodeUnreachable",
        "the node is dead: it does not answer, or does not exist any more",
        NEXT_NODES,
    )
    NODE_ENDING = "NodeEnding", "the node has a taint announcing its end", NEXT_NODES
    NODE_SHUTDOWN = "NodeShutdown", "the node shuts down", NEXT_NODES
    NODE_RESTARTED = "NodeRestarted", "the node has restarted", NEXT_NODES

    # Why a job has failed.

    MAX_RESTARTS = (
        "MaxRestartsExceeded",
        "Failed: `failurePolicy.maxRestarts` is used up",
        "see `status.lastFailure`, and run `kubectl logs` for the remaining pods; correct the "
        f"cause, then {RETRY}: it resumes from its checkpoint, if it writes any",
    )
    MAX_DISRUPTIONS = (
        "MaxDisruptionsExceeded",
        "Failed: `failurePolicy.maxDisruptions` or `maxAnnouncedDisruptions` is used up",
        f"see `status.lastFailure`; correct the cause, then {RETRY}: it resumes from its "
        "checkpoint, if it writes any",
    )
    NON_RETRYABLE = (
        "NonRetryableExitCode",
        "Failed: a worker ended with a code in `failurePolicy.nonRetryableExitCodes`",
        "correct the script or its arguments; `kubectl logs` has the output",
    )
    SCRIPT_NOT_FOUND = (
        "ScriptNotFound",
        "Failed: Python did not find the script or module",
        "correct `spec.args` or the image",
    )
    SAME_ERROR = (
        "SameErrorAgain",
        "Failed: the job never trained, and attempts on new pods ended by the same ImportError, "
        "SyntaxError, NameError, AttributeError, TypeError or `no kernel image is available` "
        "([what is not repeated](faults.md#what-is-not-repeated))",
        "correct the script, or use an image with what the message names",
    )
    NO_PROGRESS = (
        "NoProgress",
        "Failed: `failurePolicy.maxAttemptsWithoutProgress` attempts failed at or before the step "
        "at which they began",
        "see `status.attempts`; correct the cause, or remove the faulty checkpoint or data; then "
        f"{RETRY}",
    )
    DEADLINE = (
        "DeadlineExceeded",
        "Failed: the job was active for `activeDeadlineSeconds`",
        f"raise it, then {RETRY}",
    )
    STARTUP_DEADLINE = (
        "StartupDeadlineExceeded",
        "Failed: not all nodes ran within `startupDeadlineSeconds`. If one reason blocked them, "
        "such as Unschedulable, the job has this reason instead",
        "see what blocked them in the message",
    )
    INVALID_POD = (
        "InvalidPod",
        "the API server refuses the pod as invalid, or the operator cannot render a pod from the "
        "spec. Failed if the job never had a pod; later it is tried again with back-off",
        "a new job: create it again with a correct spec; a job with earlier pods: look for a "
        "policy or webhook that changes pods. The message and the operator's log have details",
    )
    INVALID_SPEC = (
        "InvalidSpec",
        "the operator cannot read a spec accepted by the API server: CRD and operator have "
        "different versions",
        "upgrade the older one; until then the operator does not change the pods",
    )

    # The condition HangsDetected, of a job with `hangTimeoutSeconds`.

    HEARTBEATS_SEEN = "HeartbeatsSeen", "condition HangsDetected: the pods give heartbeats"
    NO_HEARTBEAT = (
        "NoHeartbeat",
        "condition HangsDetected: hangs are not detected. With `heartbeat: File`, a pod has run "
        "for the time of the limit, at least ten minutes, and has never touched "
        "`$DDP_HEARTBEAT_FILE`. With `Log`, four times the limit are over, and no pod has written "
        "in three of them. An event says it too",
        "`File`: touch the file at each step, or use `Log`. `Log`: write a line at each step, or "
        "choose a longer time",
    )
