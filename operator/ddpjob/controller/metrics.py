"""Prometheus metrics of the operator."""

from collections import Counter as Tally
from collections.abc import Iterator, Sized

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob.controller.cache import Cache
from ddpjob.core.names import Activity, Cause, Phase, Reason
from ddpjob.core.status import Status


class JobsByPhase(Collector):
    """Counts the jobs in the cache at each scrape, so that the numbers cannot drift."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("ddpjob_jobs", "DDPJobs by phase", labels=["phase"])
        jobs = (seen.value for seen in self._cache.jobs.objects.values())
        phases = Tally(job.phase or Phase.PENDING for job in jobs)
        for phase in Phase:
            family.add_metric([str(phase)], phases.get(str(phase), 0))
        yield family


class Metrics:
    """The metrics of one operator, in a separate registry."""

    def __init__(self, cache: Cache, queue: Sized) -> None:
        registry = CollectorRegistry()
        registry.register(JobsByPhase(cache))
        self._registry = registry
        self.reconciles = Counter(
            "ddpjob_reconciles",
            "Reconciles of jobs, by result (ok or error)",
            ["result"],
            registry=registry,
        )
        self.latency = Histogram(
            "ddpjob_reconcile_seconds",
            "Duration of one reconcile of a job in seconds, with its writes",
            registry=registry,
        )
        depth = Gauge("ddpjob_queue_depth", "Jobs that are due", registry=registry)
        depth.set_function(lambda: len(queue))
        self.restarts = Counter(
            "ddpjob_restarts", "Restarts of a gang, by cause", ["cause"], registry=registry
        )
        # A counter that begins at 0 lets `increase()` see the first restart.
        for cause in Cause:
            self.restarts.labels(str(cause))
        self.seconds = Counter(
            "ddpjob_activity_seconds",
            "Time of all jobs in seconds, by what they did with it",
            ["activity"],
            registry=registry,
        )
        for activity in Activity:
            self.seconds.labels(str(activity))
        self.leading = Gauge(
            "ddpjob_leader", "1 while this process holds the Lease", registry=registry
        )

    def count_restarts(self, old: Status, new: Status) -> None:
        """Count the new attempt of a status, if there is one, also if it uses no budget.

        An attempt that was found again is not new.
        """
        if old.attempt is None or new.attempt == old.attempt:
            return
        if new.reason == Reason.STATUS_RECOVERED:
            return
        cause = new.attempts[0].get("cause") if new.attempts else Cause.RESIZED
        self.restarts.labels(str(cause)).inc()

    def count_seconds(self, old: Status, new: Status) -> None:
        """Count the time of the activities that ended with a status."""
        for activity in Activity:
            passed = new.seconds.get(activity, 0) - old.seconds.get(activity, 0)
            # Somebody may have changed the status.
            self.seconds.labels(str(activity)).inc(max(passed, 0))

    def text(self) -> bytes:
        """Return the metrics in the exposition format."""
        return generate_latest(self._registry)
