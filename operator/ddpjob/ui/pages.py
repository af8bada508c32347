"""Prepare jobs for the templates: texts, and the places of the bars in a timeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpjob.core.api.status import Status
from ddpjob.core.api.times import since
from ddpjob.core.observe.observation import Pod
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.curves import has_curves
from ddpjob.show.jobs import ATTEMPT_HEADERS, HEADERS, attempt_rows, job_age, job_facts, job_row
from ddpjob.show.text import duration

# The namespace in the path of a page, for a job without one.
NO_NAMESPACE = "-"

# Units of the timeline, and its shortest bar.
WIDTH = 1000.0
SHORTEST = 4.0

# At most so many nodes have a link each. With more, the page asks for a number.
MAX_LINKS = 16


@dataclass(frozen=True)
class Bar:
    """An attempt in the timeline: from `x` on, `width` units of WIDTH."""

    text: str
    cause: str
    x: float
    width: float


def path_of(job: DDPJob) -> str:
    return f"/jobs/{job.namespace or NO_NAMESPACE}/{job.name}"


def list_page(
    jobs: Sequence[DDPJob], progress: Mapping[str, Progress], now: datetime
) -> dict[str, Any]:
    """Return the content of the page of all jobs. `progress` is by the paths of running jobs."""
    rows = []
    for job in jobs:
        path = path_of(job)
        rows.append((path, job.namespace, job_row(job, progress.get(path), now)))
    return {
        "headers": [header.capitalize() for header in HEADERS],
        "rows": rows,
        "has_namespaces": len({job.namespace for job in jobs}) > 1,
    }


def job_page(
    job: DDPJob, metrics: RunMetrics, pods: Sequence[Pod], now: datetime
) -> dict[str, Any]:
    """Return the content of the page of a job, except its log."""
    progress = Progress.from_events(metrics.events)
    events = metrics.events
    return {
        "job": job,
        "path": path_of(job),
        "age": job_age(job, now),
        "facts": list(job_facts(job, progress, pods, now)),
        "share": progress.share,
        "bars": list(timeline(job.status, now)),
        "width": WIDTH,
        "attempt_headers": ATTEMPT_HEADERS,
        "attempts": list(attempt_rows(job.status)),
        # The address of the picture changes with the curves: then it is loaded again.
        "version": f"{len(events)}-{events[-1].get('time', '')}" if events else "",
        "has_curves": has_curves({job.name: metrics}),
        "nodes": node_count(job),
        "max_links": MAX_LINKS,
    }


def node_count(job: DDPJob) -> int:
    nodes = job.spec.get("nodes", 1)
    return max(job.status.pods.desired, nodes if isinstance(nodes, int) else 1)


def timeline(status: Status, now: datetime) -> Iterator[Bar]:
    """Yield the attempts, the oldest first. The bars share the time from the first one on."""
    spans = []
    for attempt in reversed(status.attempts):
        if attempt.start and attempt.end:
            spans.append((str(attempt.attempt), attempt.cause, attempt.start, attempt.end))
    has_ended = any(number == str(status.attempt.number) for number, *_ in spans)
    if status.attempt.number is not None and status.attempt.start and not has_ended:
        end = status.completion_time or now
        spans.append((str(status.attempt.number), status.phase, status.attempt.start, end))
    if not spans:
        return
    first = min(start for _, _, start, _ in spans)
    whole = max(since(first, end).total_seconds() for *_, end in spans) or 1.0
    for number, cause, start, end in spans:
        lasted = since(start, end)
        width = max(WIDTH * lasted.total_seconds() / whole, SHORTEST)
        x = min(WIDTH * since(first, start).total_seconds() / whole, WIDTH - width)
        yield Bar(f"attempt {number}: {cause}, {duration(lasted)}", cause, x, width)
