"""The fields of a spec for the restarts, the suspension, the end and the clean-up of a job."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as declared

from ddpjob.core.api import names
from ddpjob.core.api.declare import (
    CONFIG,
    Bool,
    Change,
    Declared,
    Int,
    Items,
    Seconds,
    Text,
    entry,
    seconds,
)
from ddpjob.core.api.history import MAX_ATTEMPTS
from ddpjob.core.api.recovery import Recovery
from ddpjob.core.api.times import MAX_INT32

# Each restart in a window is kept in the status, so their number is bounded.
MAX_BUDGET = 1000

# argparse ends a wrongly used script with this code, and so does Python if it cannot find the
# script.
WRONG_USE = 2


class CleanPodPolicy(StrEnum):
    """The pods to delete after the end of a job."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class Heartbeat(StrEnum):
    """What counts as a worker's sign of life: a file that it touches, or its output."""

    FILE = "File"
    LOG = "Log"


@declared(frozen=True, slots=True, config=CONFIG)
class FailurePolicy(Declared):
    """Budgets of restarts of the whole gang, and what ends a job. Can be changed at any time."""

    max_restarts: Int = entry(
        "Maximum number of gang restarts after failures of the script.",
        3,
        ge=0,
        le=MAX_BUDGET,
    )
    max_disruptions: Int = entry(
        "Maximum number of gang restarts after lost pods.",
        20,
        ge=0,
        le=MAX_BUDGET,
    )
    max_announced: Int | None = entry(
        """Maximum number of gang restarts after announced disruptions, such as a drain. Without it,
        they are not limited.""",
        None,
        name="maxAnnouncedDisruptions",
        ge=0,
        le=MAX_BUDGET,
    )
    window: Seconds | None = seconds(
        """Restarts older than the window do not count against the budgets. Without a window, all
        of them count.""",
        name="windowSeconds",
    )
    non_retryable: Items[Annotated[Int, Field(ge=1, le=255)]] = entry(
        """The job fails at once if a worker ends with one of these exit codes. argparse ends with 2
        after wrong use. A signal has the code 128 plus its number.""",
        (WRONG_USE,),
        name="nonRetryableExitCodes",
        max_length=32,
    )
    max_attempts_without_progress: Int = entry(
        """The job fails after so many attempts without progress: they failed at or before the step
        at which they began. An attempt counts only if its output has JSON lines with step.
        Disrupted, resized and suspended attempts do not count.""",
        5,
        ge=1,
        le=MAX_ATTEMPTS,
    )

    def is_retryable(self, exit_code: int | None) -> bool:
        """Return False for a code that ends the job.

        torchrun reports a signal as its negative number, a shell as 128 plus its number.
        """
        if exit_code is None:
            return True
        as_shell = 128 - exit_code if exit_code < 0 else exit_code
        return as_shell not in self.non_retryable


@declared(frozen=True, slots=True, config=CONFIG)
class Lifecycle(Declared):
    """When a job waits, ends and is cleaned up."""

    recovery: Recovery | None = entry(
        """With InPlace, healthy pods stay for the next attempt; their agents start torchrun anew.
        With Recreate, every attempt gets new pods. By default InPlace if the job has a checkpoint,
        or mounts a writable claim or network volume, else Recreate.""",
        None,
        change=Change.ALWAYS,
    )
    hang_timeout: Seconds | None = seconds(
        """An attempt ends with the cause Hang if, after its first heartbeat, a pod gives none for
        so many seconds. The stacks of its processes are in the log.""",
        name="hangTimeoutSeconds",
    )
    first_heartbeat: Seconds | None = seconds(
        """An attempt ends with the cause Hang if a pod gives no heartbeat for so many seconds after
        its workers have met. Without it, there is no limit before the first one.""",
        name="firstHeartbeatSeconds",
    )
    heartbeat: Heartbeat = entry(
        """What counts as a heartbeat. File: a process touches $DDP_HEARTBEAT_FILE. Log: a process
        writes output, and the job hangs only if no pod has written.""",
        Heartbeat.FILE,
    )
    suspended: Bool = entry(
        """While true, the job has no pods. They get SIGTERM and their grace period. When it is set
        to false, a new attempt begins. It uses no budget.""",
        False,
        name="suspend",
        change=Change.ALWAYS,
    )
    retries: Int = entry(
        """Each time this number grows, a Failed job is taken up again. It keeps its counters, its
        history and its checkpoints; its budgets and its active time begin anew. See `ddpjob
        retry`.""",
        0,
        change=Change.ALWAYS,
        ge=0,
        le=MAX_INT32,
    )
    active_deadline: Seconds | None = seconds(
        """The job fails after so many seconds of active time, from the first pod on. Suspended time
        does not count.""",
        name="activeDeadlineSeconds",
        change=Change.ALWAYS,
    )
    startup_deadline: Seconds | None = seconds(
        """The job fails if not all nodes of an attempt are ready after so many seconds. They are
        ready when their workers have met. The time of setup counts. Back-off, the wait for old
        pods, the wait for an older job, and the time of pods held by a scheduling gate do not
        count. A rendezvous timeout does not begin the time anew.""",
        name="startupDeadlineSeconds",
        change=Change.ALWAYS,
    )
    time_to_live: Seconds | None = seconds(
        "So many seconds after it has finished, the job is deleted with its pods.",
        name="ttlSecondsAfterFinished",
        change=Change.ALWAYS,
        low=0,
    )
    clean_pods: CleanPodPolicy = entry(
        """Pods to delete when the job has finished: None, Running (those not ended yet) or All.""",
        CleanPodPolicy.RUNNING,
        name="cleanPodPolicy",
        change=Change.ALWAYS,
    )
    managed_by: Text = entry(
        """Controller of the job. The operator leaves a job with another value than
        ddpjob.dev/operator alone.""",
        names.CONTROLLER,
        min_length=1,
        max_length=63,
    )
