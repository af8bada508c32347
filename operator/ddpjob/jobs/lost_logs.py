"""Explain a missing log of an attempt: a log is deleted with its pod."""

from collections.abc import Collection, Iterable, Sequence

from ddpjob.core.api.names import Cause
from ddpjob.core.api.readers import SpecError
from ddpjob.jobs.user_job import DDPJob

# Pairs of an attempt and the index of a node, for all lines read.
Seen = Collection[tuple[int, int]]


def previous_attempt(job: DDPJob) -> int:
    """Return the newest ended attempt, except a finished job's last one. Raises SpecError."""
    last = job.status.attempt.number if job.finished else None
    for ended in job.status.attempts:
        if ended.attempt is not None and ended.attempt != last:
            return ended.attempt
    raise SpecError(f"job {job.name} has no earlier attempt")


def require_attempt(job: DDPJob, attempt: int) -> None:
    """Raise SpecError for an attempt not yet begun."""
    last = job.status.attempt.number
    if last is None:
        raise SpecError(f"no attempt of job {job.name} has begun")
    if attempt > last:
        known = f"attempts 0 to {last}" if last else "only attempt 0"
        raise SpecError(f"job {job.name} has {known}, got {attempt}")


def why_lost(job: DDPJob, attempt: int, nodes: Collection[int], seen: Seen) -> str:
    """Return why lines of an attempt are missing, or an empty string if none are.

    `nodes` are the chosen nodes, or none for all. Each pod writes a line when an attempt begins, so
    a node without any line has no log.
    """
    found = {index for number, index in seen if number == attempt}
    is_current = attempt == job.status.attempt.number and not job.finished
    if is_current and job.status.pods.active:
        return ""
    if not found and not nodes:
        return _all_lost(job, attempt)
    is_resized = any(
        ended.cause == Cause.RESIZED and (ended.attempt or 0) >= attempt
        for ended in job.status.attempts
    )
    # The attempt may have had another number of nodes.
    expected = nodes or (() if is_resized else range(job.status.pods.desired))
    lost = sorted(set(expected) - found)
    if not lost:
        return ""
    pods = "its pod is" if len(lost) == 1 else "their pods are"
    which = f"{'node' if len(lost) == 1 else 'nodes'} {ranges(lost)}"
    return f"no log of {which} in attempt {attempt}: {pods} deleted, and the log is gone with it"


def _all_lost(job: DDPJob, attempt: int) -> str:
    text = f"no log of attempt {attempt}: its pods are deleted, and the log is gone with them"
    for ended in job.status.attempts:
        if ended.attempt == attempt:
            text += f"; it ended with {ended.cause}: {ended.message}"
    return text


def lost_attempts(job: DDPJob, seen: Seen) -> str:
    """Return a sentence about the ended attempts without a log, or an empty string."""
    found = {number for number, _ in seen}
    ended = {one.attempt for one in job.status.attempts if one.attempt is not None}
    lost = sorted(ended - found)
    if not lost:
        return ""
    which = "attempt" if len(lost) == 1 else "attempts"
    return (
        f"no log of {which} {ranges(lost)}: a log goes with its pod; ddpjob status {job.name} has "
        "the message of each"
    )


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers in the form of options: 0-2,5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(_range(part) for part in parts)


def _range(part: Sequence[int]) -> str:
    return str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
