"""The metrics of the operator, one row for each. The rows also make the documentation's table.

The text of a row is the help of its metric.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


@dataclass(frozen=True)
class Family:
    """What a metric means, and its labels. A counter has `_total` after its name."""

    text: str
    labels: tuple[str, ...] = ()


# Counted while the operator works.
COUNTERS: Mapping[str, Family] = {
    "ddpjob_restarts": Family(
        "New attempts of a gang by cause, with or without use of a budget: Failure, Hang, "
        "Disruption, NotResumed, Rendezvous, Resized, Suspended or Yielded",
        ("cause",),
    ),
    "ddpjob_activity_seconds": Family(
        "Time of all jobs by what they did: queued, starting, training or recovering. It is "
        "counted when another activity begins",
        ("activity",),
    ),
    "ddpjob_reconciles": Family("Reconciles of jobs, by result: ok or error", ("result",)),
    "ddpjob_api_requests": Family(
        "Requests to the API server by method, resource and HTTP status (0: no answer), without "
        "those of the watches",
        ("method", "resource", "status"),
    ),
}
HISTOGRAMS: Mapping[str, Family] = {
    "ddpjob_reconcile_seconds": Family(
        "Duration of one reconcile of a job in seconds, with its writes"
    ),
    "ddpjob_queue_seconds": Family("Waiting time of a due job until a worker looks at it"),
}
GAUGES: Mapping[str, Family] = {
    "ddpjob_queue_depth": Family("Number of due jobs"),
    "ddpjob_leader": Family("1 while this process holds the Lease"),
}

# Counted at each scrape: so the numbers cannot drift.
JOBS = "ddpjob_jobs"
SCRAPED: Mapping[str, Family] = {JOBS: Family("DDPJobs by phase", ("phase",))}

# The metrics of each job, by the end of their names. Their labels are beside `namespace` and
# `ddpjob`, the job's name. Prometheus uses a label `job` for its own purposes.
EACH_JOB: Mapping[str, Family] = {
    "info": Family("1 for each job", ("accelerator",)),
    "phase": Family("1 for the phase of a job", ("phase",)),
    "attempt": Family("Number of the current attempt; the first is 0"),
    "restarts": Family(
        "Counted restarts, by budget: failures, disruptions or announced", ("budget",)
    ),
    "nodes": Family("Nodes of the current attempt, by state: desired or ready", ("state",)),
    "activity_seconds": Family(
        "Seconds of each activity, corrected when an attempt has ended", ("activity",)
    ),
    "goodput_ratio": Family(
        "Part of these seconds spent on training, from the first training on, until the job has "
        "finished"
    ),
    "attempt_end_timestamp_seconds": Family(
        "Unix time of the end of one of the last ten attempts, by its cause: the newest of each",
        ("cause",),
    ),
    "completion_timestamp_seconds": Family("Unix time of the end of a job"),
}


def counters(registry: CollectorRegistry) -> dict[str, Counter]:
    """Return the counters by their names."""
    return {
        name: Counter(name, one.text, one.labels, registry=registry)
        for name, one in COUNTERS.items()
    }


def histograms(registry: CollectorRegistry) -> dict[str, Histogram]:
    """Return the histograms by their names."""
    return {
        name: Histogram(name, one.text, one.labels, registry=registry)
        for name, one in HISTOGRAMS.items()
    }


def gauges(registry: CollectorRegistry) -> dict[str, Gauge]:
    """Return the gauges by their names."""
    return {
        name: Gauge(name, one.text, one.labels, registry=registry) for name, one in GAUGES.items()
    }


def families() -> dict[str, Family]:
    """Return the families of the whole operator, by their names in a scrape."""
    totals = {f"{name}_total": one for name, one in COUNTERS.items()}
    return {**SCRAPED, **totals, **HISTOGRAMS, **GAUGES}


def families_of_jobs() -> dict[str, Family]:
    """Return the families of each job, by their names in a scrape."""
    return {f"ddpjob_job_{name}": one for name, one in EACH_JOB.items()}
