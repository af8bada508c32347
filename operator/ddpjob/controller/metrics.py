"""Prometheus metrics of the operator."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Set, Sized
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob.controller.cache import Cache, KeptJob
from ddpjob.controller.families import JOBS, SCRAPED, counters, gauges, histograms
from ddpjob.controller.job_metrics import text_of
from ddpjob.core.api.names import Activity, Cause, Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.kube.request import AnyRequest


@dataclass(frozen=True)
class CountedJobs:
    """The jobs in the cache with metrics: those outside the excluded namespaces."""

    cache: Cache
    excluded: Set[str]

    def __iter__(self) -> Iterator[KeptJob]:
        for seen in self.cache.jobs.objects.values():
            if seen.namespace not in self.excluded:
                yield seen.value


class JobsByPhase(Collector):
    """Counts the jobs in the cache at each scrape. So the numbers cannot drift."""

    def __init__(self, jobs: CountedJobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        row = SCRAPED[JOBS]
        family = GaugeMetricFamily(JOBS, row.text, labels=row.labels)
        phases = Tally(job.phase or Phase.PENDING for job in self._jobs)
        for phase in Phase:
            family.add_metric([str(phase)], phases.get(str(phase), 0))
        yield family


class Metrics:
    """The metrics of one operator, in a separate registry.

    `each_job` is whether there are metrics with the names of jobs. Jobs in `excluded` namespaces
    are not counted.
    """

    def __init__(
        self,
        cache: Cache,
        queue: Sized,
        *,
        each_job: bool = True,
        excluded: Set[str] = frozenset(),
    ) -> None:
        registry = CollectorRegistry()
        jobs = CountedJobs(cache, excluded)
        registry.register(JobsByPhase(jobs))
        self._each_job: Iterable[KeptJob] = jobs if each_job else ()
        self._registry = registry
        counted, timed, shown = counters(registry), histograms(registry), gauges(registry)
        self.reconciles = counted["ddpjob_reconciles"]
        self.requests = counted["ddpjob_api_requests"]
        self.restarts = counted["ddpjob_restarts"]
        self.seconds = counted["ddpjob_activity_seconds"]
        self.latency = timed["ddpjob_reconcile_seconds"]
        self.waits = timed["ddpjob_queue_seconds"]
        self.leading = shown["ddpjob_leader"]
        shown["ddpjob_queue_depth"].set_function(lambda: len(queue))
        # A counter that begins at 0 lets `increase()` see the first restart.
        for cause in Cause:
            self.restarts.labels(str(cause))
        for activity in Activity:
            self.seconds.labels(str(activity))

    def count_restarts(self, old: Status, new: Status) -> None:
        """Count the new attempt of a status, if there is one, also if it uses no budget.

        An attempt found again after a loss of the status is not new.
        """
        if old.attempt.number is None or new.attempt.number == old.attempt.number:
            return
        # A person has taken the job up again.
        if new.reason in (Reason.STATUS_RECOVERED, Reason.RETRIED):
            return
        # An attempt without pods has no entry in the history.
        ended = [one for one in new.attempts[:1] if one.attempt == old.attempt.number]
        is_held = old.has(Condition.SUSPENDED)
        cause = ended[0].cause if ended else Cause.SUSPENDED if is_held else Cause.RESIZED
        self.restarts.labels(str(cause)).inc()

    def count_seconds(self, old: Status, new: Status) -> None:
        """Count the time of the activities ended by a new status."""
        passed = {
            activity: new.account.seconds.get(activity, 0) - old.account.seconds.get(activity, 0)
            for activity in Activity
        }
        # Time found later to be no training has been counted already, as training.
        passed[Activity.STARTING] += min(passed[Activity.TRAINING], 0)
        for activity, seconds in passed.items():
            # A user may have changed the status.
            self.seconds.labels(str(activity)).inc(max(seconds, 0))

    def count_request(self, request: AnyRequest, status: int) -> None:
        """Count an answer of the API server."""
        self.requests.labels(request.verb.method, request.resource, str(status)).inc()

    async def text(self) -> bytes:
        """Return the metrics in the exposition format."""
        return generate_latest(self._registry) + (await text_of(self._each_job)).encode()
