"""Prometheus metrics of each job, as text.

A cluster may have 10,000 jobs, and each has about 15 series. So the text is written in parts, and
the operator works in between. A Collector of prometheus_client cannot do this.
"""

import asyncio
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from ddpjob.controller.cache import KeptJob
from ddpjob.controller.families import EACH_JOB
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Activity, Cause, Phase
from ddpjob.core.api.status import Status
from ddpjob.core.decide.accounting import seconds_until

# Jobs of one part: about 10 ms.
PART = 50

Sample = tuple[str, tuple[str, ...], float]


def _samples(job: Job) -> Iterator[Sample]:
    """Yield (family, labels, value) of a job."""
    status = job.status
    yield "info", (job.spec.accelerator if job.spec else "",), 1
    yield "phase", (status.phase or str(Phase.PENDING),), 1
    yield "restarts", ("failures",), status.budget.failures
    yield "restarts", ("disruptions",), status.budget.disruptions
    yield "restarts", ("announced",), status.budget.announced
    if status.attempt.number is not None:
        yield "attempt", (), status.attempt.number
        yield "nodes", ("desired",), status.pods.desired
        yield "nodes", ("ready",), status.pods.ready
    seconds = seconds_until(status, datetime.now(UTC))
    for activity, passed in seconds.items():
        yield "activity_seconds", (activity,), passed
    # A job before its first training, or a finished one, has no goodput to watch.
    if Activity.TRAINING in seconds and not status.finished:
        yield "goodput_ratio", (), seconds[Activity.TRAINING] / max(1, sum(seconds.values()))
    for cause, ended in _last_ends(status):
        yield "attempt_end_timestamp_seconds", (cause,), ended.timestamp()
    if status.completion_time:
        yield "completion_timestamp_seconds", (), status.completion_time.timestamp()


def _last_ends(status: Status) -> Iterator[tuple[Cause, datetime]]:
    """Yield the causes of the attempts' ends in the job's history, each with its newest time."""
    ends: dict[str, datetime | None] = {}
    # The newest attempt comes first.
    for attempt in status.attempts:
        ends.setdefault(attempt.cause, attempt.end)
    for cause in Cause:
        ended = ends.get(cause)
        if ended:
            yield cause, ended


async def text_of(jobs: Iterable[KeptJob]) -> str:
    """Return the metrics of each job in the exposition format."""
    lines: dict[str, list[str]] = {name: [] for name in EACH_JOB}
    # A job may be added or removed between two parts.
    for number, kept in enumerate(tuple(jobs)):
        if number % PART == PART - 1:
            await asyncio.sleep(0)
        job = kept.unpack()
        for name, values, value in _samples(job):
            lines[name].append(_line(name, (job.namespace, job.name, *values), value))
    return "".join(_family(name, lines[name]) for name in EACH_JOB)


def _family(name: str, lines: Iterable[str]) -> str:
    full_name = f"ddpjob_job_{name}"
    return f"# HELP {full_name} {EACH_JOB[name].text}\n# TYPE {full_name} gauge\n{''.join(lines)}"


def _line(name: str, values: Iterable[str], value: float) -> str:
    labels = ("namespace", "ddpjob", *EACH_JOB[name].labels)
    pairs = sorted(zip(labels, values, strict=True))
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs)
    return f"ddpjob_job_{name}{{{text}}} {float(value)}\n"


def _escaped(text: str) -> str:
    """Return the value of a label. Somebody may have changed a status."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
