"""Failures after which a job must not restart: another attempt would not help, or none is left.

REASONS are tried in order. The first match ends the job.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob.core.api.history import EndedAttempt, add_attempt, with_steps
from ddpjob.core.api.names import Cause
from ddpjob.core.api.policy import FailurePolicy
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import since
from ddpjob.core.decide.accounting import has_trained, trained_seconds
from ddpjob.core.decide.budget import budget_of, is_used_up
from ddpjob.core.decide.deletions import current_grace
from ddpjob.core.decide.reports import reported_steps
from ddpjob.core.decide.script_errors import is_permanent, is_same_error
from ddpjob.core.decide.transitions import Ending
from ddpjob.core.decide.verdict import Verdict
from ddpjob.core.observe.observation import Observation
from ddpjob.core.observe.pods import INIT_FAILED
from ddpjob.core.observe.termination import SETUP_FAILED

# A fault of the cluster, such as a volume not mounted yet, may last for so long.
PASSING = timedelta(seconds=30)

# After so much training, the script and the image of a job are known to work.
TRAINED_SECONDS = 60.0

# The causes of an attempt that the job itself has ended.
FAILED = (Cause.FAILURE, Cause.HANG)


@dataclass(frozen=True)
class Failure:
    """A failed attempt to be judged. `attempts` is the history, with this attempt as the newest."""

    obs: Observation
    policy: FailurePolicy
    verdict: Verdict
    attempts: tuple[EndedAttempt, ...]
    now: datetime

    @property
    def status(self) -> Status:
        return self.obs.status

    @property
    def is_of_job(self) -> bool:
        """True if the job itself failed, not the cluster."""
        return self.verdict.cause in FAILED

    @property
    def failures_before(self) -> int:
        """Return how many attempts have failed since the job was last taken up again."""
        return self.status.budget.failures - self.status.budget.retried.failures


# A reason for the status, and why the job ends.
Found = tuple[Reason, str]


def failure_of(obs: Observation, policy: FailurePolicy, verdict: Verdict, now: datetime) -> Failure:
    """Return a failed attempt. The status of `obs` has the failure as the last one already."""
    ended = EndedAttempt(obs.attempt, str(verdict.cause))
    attempts = with_steps(add_attempt(obs.status.attempts, ended), reported_steps(obs))
    return Failure(obs, policy, verdict, attempts, now)


def hopeless_ending(failure: Failure) -> Ending | None:
    """Return the end of the job if it must not restart, or None."""
    status = failure.status
    for find in REASONS:
        found = find(failure)
        if found:
            reason, why = found
            message = f"{failure.verdict.message}; {why}"
            grace = current_grace(status, failure.obs.attempt)
            return Ending(reason, message, status.last_failure, grace)
    return None


def may_repeat(failure: Failure) -> bool:
    """Return True if the job has never trained, and its error may end each attempt.

    If the next attempt begins after PASSING, it shows whether the error passes.
    """
    verdict = failure.verdict
    pod = verdict.pod
    # A kept pod may have a fault of its own.
    is_new_pod = pod is not None and pod.born == failure.obs.attempt
    is_of_script = verdict.is_own_failure and is_permanent(verdict.exception)
    return is_of_script and is_new_pod and not _has_trained(failure)


def _script_not_found(failure: Failure) -> Found | None:
    verdict = failure.verdict
    if not failure.is_of_job or not verdict.script_missing or _script_was_there(failure):
        return None
    return Reason.SCRIPT_NOT_FOUND, "Python did not find it; check spec.args and the image"


def _script_was_there(failure: Failure) -> bool:
    """Return True if the missing script's volume may come back: the job has trained before."""
    return failure.verdict.script_missing and has_trained(failure.status)


def _non_retryable_exit_code(failure: Failure) -> Found | None:
    verdict = failure.verdict
    # A follower, an init container and a setup have exit codes too.
    is_of_worker = verdict.is_own_failure and verdict.reason not in (INIT_FAILED, SETUP_FAILED)
    if not is_of_worker or _script_was_there(failure):
        return None
    if failure.policy.is_retryable(verdict.exit_code):
        return None
    why = "failurePolicy.nonRetryableExitCodes has this code, so the job does not restart"
    return Reason.NON_RETRYABLE, why


def _same_error_again(failure: Failure) -> Found | None:
    """Find an error of the script or the image, seen in attempts before on other pods."""
    same = _attempts_with_same_error(failure)
    if not same or not may_repeat(failure):
        return None
    oldest = same[-1]
    if oldest.end is None or since(oldest.end, failure.now) < PASSING:
        return None
    why = (
        f"the same error ended attempt {oldest.attempt} and attempt {failure.obs.attempt} "
        "on new pods, so another attempt would not help; correct the script or the image"
    )
    return Reason.SAME_ERROR, why


def _has_trained(failure: Failure) -> bool:
    made_steps = any(_is_progress(ended) for ended in failure.attempts)
    return made_steps or trained_seconds(failure.obs, failure.now) >= TRAINED_SECONDS


def _attempts_with_same_error(failure: Failure) -> Sequence[EndedAttempt]:
    """Return the attempts before, newest first, as far back as each ended by the same error."""
    message = failure.verdict.message
    pod = failure.obs.pod_name(failure.verdict.index)
    same = []
    for ended in failure.attempts[1:][: failure.failures_before]:
        is_other_pod = ended.pod not in ("", pod)
        if ended.cause != Cause.FAILURE or not is_other_pod:
            break
        if not is_same_error(ended.message, message):
            break
        same.append(ended)
    return same


def _no_progress(failure: Failure) -> Found | None:
    """Find too many failed attempts without progress beyond their first step."""
    limit = failure.policy.max_attempts_without_progress
    if not failure.is_of_job:
        return None
    steps = _steps_without_progress(failure)
    if len(steps) < limit:
        return None
    why = (
        f"{len(steps)} failed attempts made no progress: each ended at or before the step at "
        f"which it began (the last at step {steps[0]}); "
        f"failurePolicy.maxAttemptsWithoutProgress is {limit}"
    )
    return Reason.NO_PROGRESS, why


def _steps_without_progress(failure: Failure) -> Sequence[int]:
    """Return the last steps of the failed attempts since the last progress, newest first.

    Attempts ended by the cluster or a person do not count, unless they made progress.
    """
    steps = []
    began: int | None = None
    failures = failure.failures_before + 1
    for ended in failure.attempts:
        # A script that went missing uses no budget.
        has_failed = ended.cause in FAILED and ended.reason != Reason.SCRIPT_NOT_FOUND
        if has_failed and failures == 0:
            break
        failures -= has_failed
        first, last = ended.first_step, ended.last_step
        if first is None or last is None:
            continue
        # A script that seldom reports its step may have made progress between two attempts.
        if last > first or (began is not None and began > first):
            break
        if has_failed:
            steps.append(last)
            began = first
    return steps


def _is_progress(ended: EndedAttempt) -> bool:
    first, last = ended.first_step, ended.last_step
    return first is not None and last is not None and last > first


def _budget_is_used_up(failure: Failure) -> Found | None:
    verdict = failure.verdict
    budget = budget_of(failure.status, verdict.cause, verdict.reason)
    if budget is None or not is_used_up(failure.status, budget, failure.policy, failure.now):
        return None
    limit = getattr(failure.policy, budget.limit)
    verb = "is used up" if limit else "allows no restart"
    return budget.used_up, f"{budget.option}={limit} {verb}"


REASONS: tuple[Callable[[Failure], Found | None], ...] = (
    _script_not_found,  # Before the exit code: Python ends with the code of wrong use.
    _non_retryable_exit_code,
    _same_error_again,  # It says more than a budget used up at the same time.
    _no_progress,  # The same.
    _budget_is_used_up,
)
