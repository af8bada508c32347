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
    accelerator = job.spec.accelerator if job.spec else ""
    phase = status.phase or str(Phase.PENDING)
    restarts = {
        "failures": status.budget.failures,
        "disruptions": status.budget.disruptions,
        "announced": status.budget.announced,
    }
    yield "info", (accelerator,), 1
    yield "phase", (phase,), 1
    for kind, count in restarts.items():
        yield "restarts", (kind,), count
    if status.attempt.number is not None:
        yield "attempt", (), status.attempt.number
        yield "nodes", ("desired",), status.pods.desired
        yield "nodes", ("ready",), status.pods.ready
    seconds = seconds_until(status, datetime.now(UTC))
    for activity, passed in seconds.items():
        yield "activity_seconds", (activity,), passed
    # A job before its first training, or a finished one, has no goodput to watch.
    if Activity.TRAINING in seconds and not status.finished:
        training = seconds[Activity.TRAINING]
        total = sum(seconds.values())
        yield "goodput_ratio", (), training / max(1, total)
    for cause, ended in _last_ends(status):
        yield "attempt_end_timestamp_seconds", (cause,), ended.timestamp()
    completed = status.completion_time
    if completed:
        yield "completion_timestamp_seconds", (), completed.timestamp()


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
        for name, own_values, value in _samples(job):
            values = (job.namespace, job.name, *own_values)
            line = _line(name, values, value)
            lines[name].append(line)
    families = [_family(name, lines[name]) for name in EACH_JOB]
    return "".join(families)


def _family(name: str, lines: Iterable[str]) -> str:
    full_name = f"ddpjob_job_{name}"
    help_line = f"# HELP {full_name} {EACH_JOB[name].text}\n"
    type_line = f"# TYPE {full_name} gauge\n"
    return help_line + type_line + "".join(lines)


def _line(name: str, values: Iterable[str], value: float) -> str:
    names = ("namespace", "ddpjob", *EACH_JOB[name].labels)
    pairs = sorted(zip(names, values, strict=True))
    labels = [f'{label}="{_escaped(text)}"' for label, text in pairs]
    listed = ",".join(labels)
    return f"ddpjob_job_{name}{{{listed}}} {float(value)}\n"


def _escaped(text: str) -> str:
    """Return the value of a label. A user may have changed a status."""
    text = text.replace("\\", r"\\")
    text = text.replace("\n", r"\n")
    return text.replace('"', r"\"")
