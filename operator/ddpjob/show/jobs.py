"""Show jobs to people: a list of jobs, and one job with all its facts.

The rows and the facts are for every display; `job_table` and `job_lines` are for a terminal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from rich.text import Text

from ddpjob.core.api.conditions import find_condition
from ddpjob.core.api.history import EndedAttempt
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Activity, Condition
from ddpjob.core.api.status import Status, goodput
from ddpjob.core.decide import timers
from ddpjob.core.decide.accounting import counts_from_meeting, seconds_until
from ddpjob.core.observe.observation import Observation, Pod, observe
from ddpjob.core.plan import counted
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.advice import advice_facts
from ddpjob.show.text import LABEL_WIDTH, age, columns, duration, ordinal, phase, rounded

HEADERS = ("NAME", "PHASE", "NODES", "RESTARTS", "STEP", "REASON", "AGE")
ATTEMPT_HEADERS = ("#", "Cause", "Lasted", "Lost steps", "Where", "Message")

# Characters of a message in a table of a terminal.
MESSAGE_WIDTH = 100

# The deadlines of a job, each with its effect.
DEADLINES = {
    "the next attempt starts": timers.backoff_ends,
    "the cause of the failure is decided": timers.failure_settles,
    "silent nodes end the attempt": timers.silence_ends,
    "activeDeadlineSeconds ends the job": timers.active_deadline,
    "startupDeadlineSeconds ends the job": timers.startup_deadline,
    "ttlSecondsAfterFinished deletes the job": timers.time_to_live,
}


def job_table(
    jobs: Sequence[DDPJob],
    progress: Mapping[str, Progress],
    now: datetime,
    *,
    wide: bool = False,
    namespaces: bool = False,
) -> list[Text]:
    """Return the lines of a table. `progress` is by the UIDs of jobs."""
    headers = list(HEADERS)
    # Most clusters have no queues.
    queues = any(job.queue for job in jobs)
    if queues:
        headers.append("QUEUE")
    if namespaces:
        headers.insert(0, "NAMESPACE")
    if wide:
        headers += ["ACCELERATOR", "GOODPUT", "IMAGE"]
    rows = []
    for job in jobs:
        row: list[str | Text] = list(job_row(job, progress.get(job.uid), now))
        row[1] = phase(job.phase)
        if queues:
            row.append(_short_queue(job))
        if namespaces:
            row.insert(0, job.namespace)
        if wide:
            row += [
                str(job.spec.get("accelerator", "cpu")),
                goodput(seconds_until(job.status, now)),
            ]
            row.append(str(job.spec.get("image", "")))
        rows.append(row)
    return columns(headers, rows)


def job_row(job: DDPJob, progress: Progress | None, now: datetime) -> Sequence[str]:
    """Return a job's cells under HEADERS. `progress` is None unless the job is training."""
    return (
        job.name,
        job.phase,
        _nodes(job),
        str(job.status.restarts),
        progress.short() if progress else _last_step(job),
        job.reason,
        age(job.created, now),
    )


def _last_step(job: DDPJob) -> str:
    """Return the last step reported by a job's newest ended attempt."""
    if not job.status.attempts:
        return ""
    last = job.status.attempts[0]
    return Progress(step=last.last_step, steps=last.total_steps).short()


def _short_queue(job: DDPJob) -> str:
    """Return the queue of a job, and the job's position in it, such as `team (3rd)`."""
    if job.position is None:
        return job.queue
    return f"{job.queue} ({ordinal(job.position.in_local_queue)})"


def _describe_queue(job: DDPJob) -> str:
    if job.position is None:
        return job.queue
    local, cluster = job.position
    return f"{job.queue}, position {local} in the LocalQueue and {cluster} in its ClusterQueue"


def _nodes(job: DDPJob) -> str:
    pods = job.status.pods
    return f"{pods.ready + pods.succeeded}/{pods.desired or job.spec.get('nodes', 1)}"


def job_lines(
    job: DDPJob,
    progress: Progress,
    pods: Sequence[Pod],
    now: datetime,
    *,
    message_width: int | None = None,
) -> Iterator[Text]:
    """Yield lines about a job: what it does, why, how far it is, and what comes next.

    Longer messages of attempts are cut to `message_width` characters.
    """
    yield Text.assemble((job.name, "bold"), "  ", phase(job.phase), f"  {job_age(job, now)}")
    for label, text in job_facts(job, progress, pods, now):
        yield Text.assemble((f"{label:<{LABEL_WIDTH}}", "bold"), text)
    yield from attempt_lines(job.status, message_width)


def attempt_lines(status: Status, message_width: int | None = None) -> Iterator[Text]:
    """Yield the table of the ended attempts, the newest first.

    Longer messages are cut to `message_width` characters.
    """
    if not status.attempts:
        return
    yield Text("Attempts", style="bold")
    rows = [
        (f"  {number}", *cells, _shortened(message, message_width))
        for number, *cells, message in attempt_rows(status)
    ]
    yield from columns(["  #", *(header.upper() for header in ATTEMPT_HEADERS[1:])], rows)


def _shortened(message: str, width: int | None) -> str:
    if width is None or len(message) <= width:
        return message
    return f"{message[: width - 1]}…"


def job_facts(
    job: DDPJob, progress: Progress, pods: Sequence[Pod], now: datetime
) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of what is known of a job."""
    status = job.status
    facts = [
        ("Reason", _reason(status)),
        *advice_facts(status.reason),
        ("Queue", _describe_queue(job)),
        ("Nodes", _describe_nodes(job)),
        ("Progress", str(progress)),
        ("Checkpoint", _describe_checkpoint(job, progress, now)),
        ("Recovery", job.recovery),
        ("Hangs", _describe_hangs(status)),
        ("Time", _describe_time(status, now)),
        ("Result", result_text(status)),
        *(("Next", text) for text in _deadlines(job, pods, now)),
    ]
    if status.ignored_fields:
        facts.append(("Ignored", f"{', '.join(status.ignored_fields)}: unknown fields"))
    return ((label, text) for label, text in facts if text)


def job_age(job: DDPJob, now: datetime) -> str:
    """Return the age of a job, and since when it has finished."""
    text = f"namespace {job.namespace}" if job.namespace else ""
    if job.created:
        text += f", created {age(job.created, now)} ago"
    if job.status.completion_time:
        text += f", finished {age(job.status.completion_time, now)} ago"
    return text.removeprefix(", ")


def _reason(status: Status) -> str:
    if not status.reason:
        return "no operator has seen the job yet; ddpjob doctor finds out why"
    return f"{status.reason}: {status.message}" if status.message else status.reason


def result_text(status: Status) -> str:
    """Return the result of a job with rounded numbers."""
    return "  ".join(f"{key} {rounded(value)}" for key, value in status.result.items())


def _describe_nodes(job: DDPJob) -> str:
    resolved = job.status.resolved
    text = f"{_nodes(job)} ready"
    if resolved.accelerator:
        processes = counted_processes(resolved.nproc_per_node)
        text += f", {processes} each, accelerator {resolved.accelerator}"
    if job.status.restarts:
        failures = counted(job.status.budget.failures, "failure")
        text += f", {failures}, {counted(job.status.budget.disruptions, 'disruption')}"
    if job.status.budget.announced:
        text += f", {counted(job.status.budget.announced, 'announced disruption')}"
    return text


def counted_processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _describe_hangs(status: Status) -> str:
    """Return why the operator cannot detect hangs of a job, or an empty string."""
    found = find_condition(status.conditions, Condition.HANGS_DETECTED)
    return found.message if found and found.status == "False" else ""


def _describe_checkpoint(job: DDPJob, progress: Progress, now: datetime) -> str:
    parts = []
    if progress.checkpoint_time:
        step = f"step {progress.checkpoint_step}, " if progress.checkpoint_step is not None else ""
        parts.append(f"{step}{age(progress.checkpoint_time, now)} ago")
    if job.checkpoint:
        parts.append(job.checkpoint)
    return "; ".join(parts)


def _describe_time(status: Status, now: datetime) -> str:
    spent = seconds_until(status, now)
    parts = []
    for activity, seconds in spent.items():
        part = f"{activity} {seconds:.0f} s"
        if activity == Activity.TRAINING and seconds and counts_from_meeting(status):
            part += " since the workers met"
        parts.append(part)
    if not parts:
        return ""
    share = goodput(spent)
    return ", ".join(parts) + (f" (goodput {share})" if share else "")


def _deadlines(job: DDPJob, pods: Sequence[Pod], now: datetime) -> Iterator[str]:
    """Yield the deadlines of the operator for a job, the next one first."""
    core = replace(Job.from_dict(job.manifest()), uid=job.uid, status=job.status)
    if core.spec is None:
        return
    obs: Observation = observe(core, pods)
    moments = []
    for what, timer in DEADLINES.items():
        moment = timer(obs, core.spec, now)
        if moment is not None and moment > now:
            moments.append((moment, what))
    for moment, what in sorted(moments):
        yield f"{what} in {duration(moment - now)}"


def attempt_rows(status: Status) -> Iterator[Sequence[str]]:
    """Yield the cells of each ended attempt under ATTEMPT_HEADERS, the newest first."""
    for attempt in status.attempts:
        yield (
            _text(attempt.attempt),
            attempt.cause,
            _lasted(attempt),
            _text(attempt.steps_lost),
            _where(attempt),
            attempt.message,
        )


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _lasted(attempt: EndedAttempt) -> str:
    start, end = attempt.start, attempt.end
    return duration(end - start) if start and end else ""


def _where(attempt: EndedAttempt) -> str:
    """Return the place of an attempt's end: the rank, the pod and the node."""
    parts = []
    if attempt.rank is not None:
        parts.append(f"rank {attempt.rank}")
    if attempt.pod:
        parts.append(attempt.pod)
    if attempt.node:
        parts.append(f"on {attempt.node}")
    return " ".join(parts)
