"""Prometheus metrics of the operator; their names and meanings in one place."""

from collections import Counter as Tally
from collections.abc import Iterator, Sized

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob.controller.cache import Cache
from ddpjob.core.names import Cause, Phase, Reason
from ddpjob.core.status import Status


class JobsByPhase(Collector):
    """Counted from the cache when asked, so that it cannot drift."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("ddpjob_jobs", "DDPJobs by phase", labels=["phase"])
        phases = Tally(seen.job.status.phase or Phase.PENDING for seen in self._cache.jobs.values())
        for phase in Phase:
            family.add_metric([str(phase)], phases.get(str(phase), 0))
        yield family


class Metrics:
    """All metrics of one operator, in a registry of their own."""

    def __init__(self, cache: Cache, queue: Sized) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(JobsByPhase(cache))
        self.reconciles = Counter(
            "ddpjob_reconciles",
            "Looks at a job, by result (ok or error)",
            ["result"],
            registry=self._registry,
        )
        self.latency = Histogram(
            "ddpjob_reconcile_seconds",
            "Seconds one look at a job took, its writes included",
            registry=self._registry,
        )
        depth = Gauge("ddpjob_queue_depth", "Jobs that are due for a look", registry=self._registry)
        depth.set_function(lambda: len(queue))
        self.restarts = Counter(
            "ddpjob_restarts", "Whole-gang restarts by cause", ["cause"], registry=self._registry
        )
        for cause in Cause:
            self.restarts.labels(str(cause))  # there from the beginning, as 0
        self.leading = Gauge(
            "ddpjob_leader", "1 while this process holds the Lease", registry=self._registry
        )

    def count_restarts(self, old: Status, new: Status) -> None:
        """The attempt that a status has begun which was just written; also those that cost the job's budgets nothing."""
        if old.attempt is not None and new.attempt != old.attempt:
            failed = new.last_failure.get("attempt") == old.attempt
            self.restarts.labels(str(new.last_failure["cause"] if failed else Reason.RESIZED)).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
